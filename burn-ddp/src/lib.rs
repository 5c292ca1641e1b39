//! Data-parallel training for Burn: the program that trains on one device trains on many.
//!
//! Each process drives one device and trains a replica of the model on its share of every global batch; gradients
//! are averaged over all processes before the optimizer sees them, and N processes give the numbers of one up to
//! rounding.
//!
//! ```no_run
//! use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
//! use burn_ddp::{Ddp, ProcessGroup, Replica, ReplicaOptions};
//! # use burn::module::{AutodiffModule, Module};
//! # use burn::nn::{Linear, LinearConfig};
//! # use burn::tensor::{Tensor, backend::AutodiffBackend};
//! # type Device<B> = <B as burn::tensor::backend::BackendTypes>::Device;
//! # fn batch<B: AutodiffBackend>(rank: usize, _: usize) -> Tensor<B, 2> {
//! #     Tensor::ones([1, 2], &Default::default()) * rank as f64
//! # }
//! # fn train<B: AutodiffBackend>(device: Device<B>) -> burn_ddp::Result<()> {
//! // `B` is `Autodiff<Ddp<Flex>>` where it was `Autodiff<Flex>`.
//! # let model = LinearConfig::new(2, 1).init::<B>(&device);
//! let group = ProcessGroup::from_env(&device)?;
//! let (mut model, mut replica) = Replica::new(model, &group, ReplicaOptions::new())?;
//! let mut optimizer = AdamWConfig::new().init();
//! for _ in 0..100 {
//!     let loss = model.forward(batch::<B>(group.rank().0, group.world_size())).mean();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     let reduced = replica.reduce(&model, grads)?;
//!     model = optimizer.step(1e-3, model, reduced.grads);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Programs that use Burn's `SupervisedTraining` call [`launch_ddp`](learner::LaunchDdp::launch_ddp) instead of
//! `launch`: see [`learner`].
//!
//! # Modules
//!
//! Each module uses only those above it, and results travel as return values:
//!
//! | module | what it holds |
//! | --- | --- |
//! | `burn-ddp-comm` | a package of its own, without Burn: ranks, errors, transports, collectives, [groups](burn_ddp_comm::group) |
//! | [`communicator`] | tensors become memory and tensors again; the extension point for NCCL and MPI |
//! | [`process_group`] | collectives of tensors: [`ProcessGroup`], [`Work`] |
//! | `reducer` | from the gradients of micro-steps to the gradient of the global batch, in buckets |
//! | [`replica`] | a copy of the model that stays equal to all others: [`Replica`] |
//! | [`backend`] | the backend decorator [`Ddp`] |
//! | [`data`], [`nn`] | sharded loaders; layers that communicate |
//! | [`learner`] | Burn's `SupervisedTraining` on several processes |
//! | [`launch`] | the launcher of the package `burnrun` as a library |
//!
//! Three rules hold everywhere. A world of one is the plain case: no environment, no socket, the bits of the plain
//! loop. Nothing waits for ever: each wait for a peer has a deadline, and a dead, stopped or disagreeing rank is an
//! error that names it. And global state exists only where it cannot be avoided: the registry for Burn's hook into the
//! backward pass (`replica::registry`), a counter of store clients in `burn-ddp-comm`, and in [`learner`] the panic
//! hook and the signal handlers.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `train` | yes | [`learner`] for Burn's `SupervisedTraining`, the sharded loaders of [`data`], [`nn`] |
//! | `launcher` | yes | [`launch`]: the launcher `burnrun` as a library |
//! | `overlap` | no | gradients are sent while the backward pass runs ([`ReplicaOptions::overlap`]); it enables `burn-autodiff/distributed`, with which a bare `Autodiff<Flex>` is no `AutodiffBackend` any more |
//! | `flex`, `ndarray`, `cuda`, `tch` | no | Burn's backends, passed through |

pub mod backend;
mod bucket;
pub mod communicator;
#[cfg(feature = "train")]
pub mod data;
#[cfg(feature = "launcher")]
pub use burnrun as launch;
#[cfg(feature = "train")]
pub mod learner;
#[cfg(feature = "train")]
pub mod nn;
mod norm;
mod parameters;
pub mod process_group;
mod reducer;
pub mod replica;

pub use burn_ddp_comm::{
    CommunicatorKind, DType, Error, ErrorKind, GroupOptions, Rank, RankInfo, ReduceOp, Result, TransportKind,
};

pub use backend::Ddp;
pub use bucket::{Bucket, BucketPlan};
pub use process_group::{ProcessGroup, Work};
pub use reducer::GradientReduction;
pub use replica::{
    BufferSync, MicroStep, OverlapStats, Reduced, Replica, ReplicaOptions, Reproducibility, verify_parameters,
};
