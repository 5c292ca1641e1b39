//! NCCL communicator for `burn-ddp`: gradients of CUDA tensors are reduced where they are.

mod agreement;
pub mod communicator;
#[cfg(feature = "cuda")]
pub mod cuda;
mod cuda_queue;
pub mod device;
pub mod device_buffer;
mod dtype;
pub mod engine;
mod error;
pub mod factory;
mod group;
pub mod library;
mod queue;
#[cfg(feature = "tch")]
pub mod tch;
mod unique_id;

pub use communicator::{NcclComm, Span};
#[cfg(feature = "cuda")]
pub use cuda::CudaAccess;
pub use cuda_queue::CudaQueue;
pub use device_buffer::{DeviceAccess, DeviceBuffer, Fence, NcclCommunicator};
pub use engine::NcclEngine;
pub use factory::NcclFactory;
pub use group::{NcclBackend, local_device, process_group, process_group_with};
pub use queue::Queue;
#[cfg(feature = "tch")]
pub use tch::TchAccess;
pub use unique_id::UniqueId;
