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
//! # fn batch<B: AutodiffBackend>(rank: usize, _: usize) -> Tensor<B, 2> { Tensor::ones([1, 2], &Default::default()) * rank as f64 }
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
//! Programs that use Burn's `SupervisedTraining` call [`launch_ddp`](learner::LaunchDdp::launch_ddp) instead of `launch`:
//! see [`learner`].
//!
//! # Design
//!
//! A stack of floors, each calling only those below it, results travelling as return values:
//! [`error`], [`rank`], [`deadline`], [`dtype`], [`options`] < [`store`], [`transport`] <
//! [`rendezvous`], [`control`], [`collective`] < [`join`] < [`communicator`] < [`process_group`] < [`replica`] < [`nn`], [`data`] <
//! [`learner`]. Below `communicator` no Burn type appears. [`backend`] (the decorator [`Ddp`]) and [`launch`] stand beside it.
//!
//! Three rules hold everywhere. A world of one is the plain case: no environment, no socket, bitwise the plain
//! loop. Nothing waits for ever: each wait has a deadline, and a dead, stopped or disagreeing rank is an error
//! that names it. And there is no global state, except where the process itself has it: Burn's hook into
//! the backward pass (`replica::registry`), and in [`learner`] panic hooks and signal handlers.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `train` | yes | [`learner`] for Burn's `SupervisedTraining`, the sharded loaders of [`data`], [`nn`] |
//! | `launcher` | yes | [`launch`] and the binary `burnrun` |
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
    collective, control, deadline, dtype, error, join, options, rank, rendezvous, store, transport,
};
pub use dtype::{DType, ReduceOp};
pub use error::{Error, ErrorKind, Result};
pub use options::{CommunicatorKind, GroupOptions, TransportKind};
pub use rank::{Rank, RankInfo};

pub use backend::Ddp;
pub use bucket::{Bucket, BucketPlan};
pub use process_group::{ProcessGroup, Work};
pub use reducer::GradientReduction;
pub use replica::{
    BufferSync, MicroStep, OverlapStats, Reduced, Replica, ReplicaOptions, Reproducibility, verify_parameters,
};
