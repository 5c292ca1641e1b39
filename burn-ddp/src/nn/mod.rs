//! Layers whose forward pass communicates.
//!
//! Nothing else in this crate does: gradients meet after the backward pass, and evaluation is a rank's own
//! affair. A normalization by the statistics of the global batch cannot wait until then, because every
//! activation behind it depends on them. So these layers are the exception, off unless a model is built with
//! them, and they bring a rule along: **all ranks run the same forward and backward passes**, as many of them
//! and in the same order. Burn walks a graph in an order that depends on its shape alone, so equal models keep
//! that rule by themselves, branches included; a model that takes another path on one rank breaks it.
//! Evaluation (`model.valid()`) never communicates.
//!
//! The seam is [`SyncGroup`], a process group without its backend type: a user's `Model<B: Backend>` can hold
//! layers made from it without a bound on `B`, which Burn's `Module` derive could not express.
//!
//! # What stands on it
//!
//! - [`SyncBatchNorm`], batch normalization over the global batch;
//! - [`SyncGroup::all_reduce_sum`], a sum over ranks that can be differentiated, for layers of your own.

mod batch_norm;
mod differentiable;
mod group;
mod module;

pub use batch_norm::{SyncBatchNorm, SyncBatchNormConfig};
pub use group::SyncGroup;
pub(crate) use group::SyncState;
