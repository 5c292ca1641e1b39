//! NCCL communicator for `burn-ddp`: gradients of CUDA tensors are reduced where they are.
//!
//! One process drives one GPU. A program for CPUs changes its backend and two lines; replica, Learner, loaders and
//! launcher stay what they are:
//!
//! ```ignore
//! type Inner = Ddp<Cuda>;                                          // train on Autodiff<Inner>
//! let device = burn_ddp_nccl::local_device::<Inner>()?;            // the GPU of this process
//! let group = burn_ddp_nccl::process_group::<Inner>(&device)?;     // instead of ProcessGroup::from_env
//! ```
//!
//! Nothing is linked against CUDA or NCCL: both are loaded when a program asks for them.
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `cuda` | no | tensors of `burn-cuda`, with or without its feature `fusion`, for [`process_group`] |
//! | `check` | no | the program `nccl_check`, which `gpu-check.sh` runs on a machine with a GPU |
//! | `tch` | no | CUDA tensors of LibTorch for [`process_group`]; needs a LibTorch to link |
//!
//! Without `cuda` and `tch` the crate compiles everything but the access to a backend's tensors, which is what its
//! tests need.
//!
//! Environment variables are listed in `docs/launching.md` of the repository, and those of NCCL in `docs/gpus.md`.
//!
//! # Design
//!
//! Modules in the order in which they build on each other:
//!
//! ```text
//! library         NCCL, loaded at run time, as a table of C functions
//! stream          a CUDA stream that can be polled and never blocks
//! comm            NcclComm: an NCCL communicator of which every wait ends
//! device          the GPUs that the driver shows, and which of them a rank drives
//! device_buffer   the memory of a tensor, and the fence behind the kernels that write it
//! bucket          where the tensors of one collective lie in one piece of memory
//! communicator    caller's thread: tensors -> bucket, and bucket -> tensors
//! engine          communication thread: wait for the fence, start NCCL, compare with the peers, wait for NCCL
//! factory         one exchange between all ranks, then NCCL or host memory (selection)
//! cuda, tch       the memory of tensors of Burn's CUDA backends and of LibTorch
//! process_group   what a training program calls
//! ```
//!
//! All extension points are traits or function tables, so tests use an in-memory fake: [`library::Symbols`] stands for
//! NCCL, [`Stream`] for CUDA's streams and [`DeviceAccess`] for the memory of a device. With the fake the whole stack
//! runs in processes without a GPU.
//!
//! NCCL fixes no order of summation: all ranks get the same bits, but not those of one process, nor those of the path
//! through host memory.

mod bucket;
mod comm;
mod communicator;
#[cfg(feature = "cuda")]
mod cuda;
mod cuda_stream;
mod device;
mod device_buffer;
mod driver;
mod dtype;
mod engine;
mod error;
mod factory;
pub mod library;
mod process_group;
mod selection;
mod stream;
mod symbols;
#[cfg(feature = "tch")]
mod tch;
mod unique_id;

pub use comm::{NcclComm, Span};
#[cfg(feature = "cuda")]
pub use cuda::{CudaAccess, CudaBackend};
pub use cuda_stream::CudaStream;
pub use device::DeviceInfo;
pub use device_buffer::{DeviceAccess, DeviceBuffer, Fence};
pub use factory::{NcclFactory, StreamMaker};
pub use process_group::{NcclBackend, local_device, process_group, process_group_with};
pub use stream::Stream;
#[cfg(feature = "tch")]
pub use tch::TchAccess;
pub use unique_id::UniqueId;
