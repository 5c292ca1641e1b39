//! NCCL communicator for `burn-ddp`: gradients of CUDA tensors are reduced where they are.

pub mod communicator;
mod cuda_queue;
mod dtype;
mod error;
pub mod library;
mod queue;
mod unique_id;

pub use communicator::{NcclComm, Span};
pub use cuda_queue::CudaQueue;
pub use queue::Queue;
pub use unique_id::UniqueId;
