//! NCCL communicator for `burn-ddp`: gradients of CUDA tensors are reduced where they are.

mod dtype;
mod error;
pub mod library;
mod unique_id;

pub use unique_id::UniqueId;
