//! Which rank trains on which items, so that N processes see the global batches of one.
//!
//! Two ways lead here. [`DataLoaderBuilder`] takes the data set itself and is exact: the global batches are those
//! of one process, for any number of ranks and of loading threads. [`slice()`], [`stride`] and [`local`] take a
//! loader that exists. Either way the result is an `Arc<dyn DataLoader>` for the `SupervisedTraining` that Burn's
//! users have, so whether a loader is sharded does not show in its type; the group remembers those that are, and a
//! loader that is not is refused rather than guessed about: with one that is whole, each rank would train on
//! everything, and no number would look wrong.
//!
//! [`Lockstep`] keeps ranks together that walk data of different or unknown length. Loaders only hold data, they
//! never communicate; every agreement between ranks on data is made there.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::Backend;

use crate::error::{Error, Result};
use crate::process_group::ProcessGroup;

mod builder;
mod loader;
mod lockstep;
mod order;
mod shards;
mod workers;
mod wrap;

pub use builder::DataLoaderBuilder;
pub use lockstep::{Lockstep, Turn, Uneven};
pub use wrap::{local, slice, stride};

pub(crate) use shards::{ShardState, Shards};

/// Checks that `loader` is sharded for `group` and built alike on all ranks: for loops of your own, which could as
/// well iterate a loader that gives every rank everything. All ranks must call it.
///
/// # Errors
/// [`ErrorKind::Config`](crate::ErrorKind::Config) for a loader that is neither built nor wrapped here, in a world of more than one;
/// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) naming what differs and on which ranks.
pub fn verify<B: Backend, O, G: Backend>(
    loader: &Arc<dyn DataLoader<B, O>>,
    group: &ProcessGroup<G>,
) -> Result<()> {
    match sharded(loader, group, "given").inspect_err(|error| group.fail(error))? {
        Some(state) => compare(&state, group, "given"),
        None => Ok(()),
    }
}

/// What is known of a loader that `group` is to use for `what` ("training"); `None` for a foreign one in a world
/// of one.
///
/// # Errors
/// A foreign loader in a larger world.
pub(crate) fn sharded<B: Backend, O, G: Backend>(
    loader: &Arc<dyn DataLoader<B, O>>,
    group: &ProcessGroup<G>,
    what: &str,
) -> Result<Option<Arc<ShardState>>> {
    match group.ranks().attached::<Shards>().find(loader) {
        None if group.world_size() > 1 => Err(refusal(what, group.world_size())),
        known => Ok(known),
    }
}

fn refusal(what: &str, world_size: usize) -> Error {
    Error::config(format!(
        "the {what} data loader is not sharded: each of {world_size} ranks would use all of its items. Build it with \
         burn_ddp::data::DataLoaderBuilder, or wrap it with the same group: data::slice (does not shuffle; exact), \
         data::stride (shuffles with the same seed on all ranks, at most one worker) or data::local (holds this \
         rank's own items already)"
    ))
}

/// Compares what the ranks know of their loaders for `what`. All ranks must call it.
///
/// # Errors
/// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) naming both values and ranks, on all ranks.
pub(crate) fn compare<G: Backend>(state: &ShardState, group: &ProcessGroup<G>, what: &str) -> Result<()> {
    let compared = group.ranks().compare(&format!("the {what} data"), state.fingerprint());
    compared.inspect_err(|error| group.fail(error))
}

#[cfg(test)]
mod tests;
