//! Layers whose forward pass communicates: [`SyncBatchNorm`], and sums over ranks for layers of your own.
//!
//! No other part of this crate communicates in a forward pass: gradients are reduced after or during the backward pass,
//! and evaluation is local. Statistics of the global batch are needed earlier, because every later activation depends
//! on them. A layer of `C` channels exchanges them by one collective in each direction, in a world of `W` ranks:
//!
//! ```text
//! forward   input [n_r, C, ..] -> mean [C], squared deviations [C], count [1] -> all_gather -> [W, 2C + 1]
//!           -> mean [C], variance [C] of all ranks' items -> output [n_r, C, ..]
//! backward  gradient [W, 2C + 1] of what was gathered -> reduce_scatter -> [2C + 1], this rank's row
//! ```
//!
//! These layers add a rule: **all ranks run the same forward and backward passes**, as many of them and in the same
//! order. Burn walks a graph in an order that depends on its shape alone, so equal models keep the rule, branches
//! included; a model that takes another path on one rank breaks it. Evaluation (`model.valid()`) never communicates.
//!
//! [`SyncGroup`] is a process group without its backend type. A user's `Model<B: Backend>` can hold layers made from it
//! without a bound on `B`, which Burn's `Module` derive could not express. [`SyncGroup::all_reduce_sum`] is a
//! differentiable sum over ranks.

mod batch_norm;
mod differentiable;
mod group;
mod module;

pub use batch_norm::{SyncBatchNorm, SyncBatchNormConfig};
pub use group::SyncGroup;
pub(crate) use group::SyncState;
