//! NCCL communicator for `burn-ddp`: gradients of CUDA tensors are reduced where they are.
//!
//! One process drives one GPU. A program for CPUs changes its backend and two lines; replica, Learner, loaders and launcher
//! stay what they are:
//!
//! ```ignore
//! type Inner = Ddp<Cuda>;                                          // train on Autodiff<Inner>
//! let device = burn_ddp_nccl::local_device::<Inner>()?;            // the GPU of this process
//! let group = burn_ddp_nccl::process_group::<Inner>(&device)?;     // instead of ProcessGroup::from_env
//! ```
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `cuda` | no | tensors of `burn-cuda`, with or without its feature `fusion`, for [`process_group`] |
//! | `check` | no | the program `nccl_check`, which `gpu-check.sh` runs on a machine with a GPU |
//! | `tch` | no | CUDA tensors of LibTorch for [`process_group`]; needs a LibTorch to link |
//!
//! Without either the crate has NCCL itself ([`library`], [`NcclComm`]), which knows addresses, counts and types and
//! neither Burn nor a backend, and the halves that a communicator is made of. Nothing is linked against CUDA or NCCL: both
//! are looked for when they are asked for.
//!
//! | variable | what it does |
//! | --- | --- |
//! | `BURN_DDP_COMM` | `auto`: NCCL if all ranks have it, else through host memory with a warning; `nccl`: NCCL or an error; `host` |
//! | `BURN_DDP_NCCL_LIB` | the file of NCCL to load; otherwise `libnccl.so.2`, `libnccl.so`, then the wheel in `$VIRTUAL_ENV` and `$CONDA_PREFIX` |
//! | `BURN_DDP_TIMEOUT` | seconds that one collective may last, NCCL's included |
//! | `BURN_DDP_RENDEZVOUS_TIMEOUT` | seconds that start-up may last, NCCL's included |
//! | `BURN_DDP_CONNECT_ALONE` | `1`: a world of one takes the way of several, to measure what it costs |
//! | `LOCAL_RANK`, `CUDA_VISIBLE_DEVICES` | which GPU a process drives |
//! | `NCCL_DEBUG`, `NCCL_DEBUG_FILE` | what NCCL says, and where; `burnrun` gives each rank a file |
//!
//! # Design
//!
//! From the ground up: [`library`] (NCCL as a table of functions) and [`device`] (what the driver shows), [`Queue`] (a stream
//! that can be asked and not be waited for), [`communicator`] (NCCL whose every wait ends), [`device_buffer`] (tensors as
//! memory) and [`engine`] (a collective on the communication thread), [`factory`] (from ranks that have met to ranks that
//! have met in NCCL). Each states its reasons. What is a table of functions, a trait of three methods and a trait that gives
//! memory away can be played by a test over host memory: that is how the whole stack runs in processes without a GPU, and
//! it is called a fake there.
//!
//! NCCL fixes no order of summation: all ranks get the same bits, but not those that one process gets, nor those of the
//! path through host memory.

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
mod symbols;
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
