//! NCCL communicator for `burn-ddp`: gradients of CUDA tensors are reduced where they are.

pub mod device;
#[cfg_attr(not(test), expect(dead_code, reason = "the communicator is not there yet"))]
mod dtype;
mod error;
pub mod library;
mod unique_id;

pub use unique_id::UniqueId;
