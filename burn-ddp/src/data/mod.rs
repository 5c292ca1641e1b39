//! Sharded data loaders: N processes see the global batches of one.
//!
//! [`DataLoaderBuilder`] takes the data set itself and is exact for any number of ranks and of loading threads. Here
//! are 5 items in batches of 4, shuffled, on 2 ranks:
//!
//! ```text
//! data set                     0 1 2 3 4
//! global order                 3 0 4 1 2         f(seed, epoch): the same on all ranks
//! global batches               [3 0 4 1] [2]     batch_size: items of one micro-step over all ranks
//! rank 0's share               [3 0]     [2]     contiguous, as even as possible
//! rank 1's share                   [4 1] []      no item: no batch, or a placeholder batch that counts no items
//! ```
//!
//! [`slice()`], [`stride`] and [`local`] wrap a loader that exists. The result is an `Arc<dyn DataLoader>` in either
//! case, whose type does not tell if it is sharded. The process group keeps a registry of sharded loaders, and a loader
//! that is not registered is refused: each rank would train on all items, and no number would look wrong.
//!
//! Loaders never communicate. [`Lockstep`] keeps ranks together whose loaders have different or unknown lengths; all
//! agreement between ranks on data is made there.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::Backend;
use burn_ddp_comm::{Error, Result};

use crate::process_group::ProcessGroup;

mod builder;
mod loader;
mod lockstep;
mod order;
mod shards;
mod workers;
mod wrap;

pub use builder::DataLoaderBuilder;
pub use lockstep::{Lockstep, Round, Uneven};
pub use wrap::{local, slice, stride};

pub(crate) use shards::ShardState;
use shards::Shards;

/// Checks that `loader` is sharded for `group` and has the same options on all ranks; all ranks must call it. Loops of
/// your own need it, because they could iterate a loader that gives every rank all items.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use burn::data::dataloader::DataLoader;
/// # use burn::tensor::{Tensor, backend::Backend};
/// # use burn_ddp::{ProcessGroup, data};
/// # fn check<B: Backend>(
/// #     loader: Arc<dyn DataLoader<B, Tensor<B, 2>>>, group: ProcessGroup<B>,
/// # ) -> burn_ddp::Result<()> {
/// let loader = data::slice(loader, &group);
/// data::verify(&loader, &group)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// - [`ErrorKind::Config`](crate::ErrorKind::Config) in a world of more than one rank, for a loader that this module
///   neither built nor wrapped;
/// - [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch), which names the difference and the ranks.
pub fn verify<B: Backend, O, G: Backend>(
    loader: &Arc<dyn DataLoader<B, O>>,
    group: &ProcessGroup<G>,
) -> Result<()> {
    match sharded(loader, group, "given").inspect_err(|error| group.fail(error))? {
        Some(state) => compare(&state, group, "given"),
        None => Ok(()),
    }
}

/// Returns the state of a loader that is sharded for `group`; `None` for another loader in a world of one. `split`
/// names the loader in the error, as in "training".
///
/// # Errors
/// If another loader is given in a larger world.
pub(crate) fn sharded<B: Backend, O, G: Backend>(
    loader: &Arc<dyn DataLoader<B, O>>,
    group: &ProcessGroup<G>,
    split: &str,
) -> Result<Option<Arc<ShardState>>> {
    match group.ranks().attached::<Shards>().find(loader) {
        None if group.world_size() > 1 => Err(refusal(split, group.world_size())),
        known => Ok(known),
    }
}

fn refusal(split: &str, world_size: usize) -> Error {
    Error::config(format!(
        "the {split} data loader is not sharded: each of {world_size} ranks would use all of its items. Build it with \
         burn_ddp::data::DataLoaderBuilder, or wrap it with the same group: data::slice (does not shuffle; exact), \
         data::stride (shuffles with the same seed on all ranks, at most one worker) or data::local (holds this \
         rank's own items already)"
    ))
}

/// Compares the options of the ranks' loaders for `split`; all ranks must call it.
///
/// # Errors
/// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) on all ranks, which names both values and ranks.
pub(crate) fn compare<G: Backend>(state: &ShardState, group: &ProcessGroup<G>, split: &str) -> Result<()> {
    let compared = group.ranks().compare(&format!("the {split} data"), state.fingerprint());
    compared.inspect_err(|error| group.fail(error))
}

#[cfg(test)]
mod tests;
