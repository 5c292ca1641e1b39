//! Builder of sharded data loaders: checks the options and computes the rank's share.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::backend::Backend;
use burn_ddp_comm::{Error, Result};

use super::loader::{Source, sharded_loader};
use super::order::{Share, Tail};
use super::shards::{ShardState, Shards};
use crate::process_group::ProcessGroup;

/// Builds data loaders that give each rank its share of every global batch.
///
/// The methods are those of Burn's `DataLoaderBuilder`, with these differences:
///
/// - [`batch_size`](Self::batch_size) counts the items of one micro-step over *all* ranks, so a run on two ranks
///   takes the same steps as a run on one.
/// - The whole data set is shuffled in each epoch, by seed and epoch only. Each `iter()` is the next epoch, so all
///   ranks must call it equally often.
/// - Any number of workers gives the same batches in the same order.
/// - The last, shorter global batch is split as evenly as possible. A rank without an item in it ends its iterator one
///   batch earlier; [`Lockstep`](super::Lockstep) keeps the ranks together.
///
/// ```
/// use burn::data::dataloader::batcher::Batcher;
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::{Tensor, backend::Backend};
/// use burn_ddp::data::DataLoaderBuilder;
/// # use burn_ddp::{Ddp, ProcessGroup};
/// # type Device<B> = <B as burn::tensor::backend::BackendTypes>::Device;
///
/// struct Floats;
///
/// impl<B: Backend> Batcher<B, f32, Tensor<B, 1>> for Floats {
///     fn batch(&self, items: Vec<f32>, device: &Device<B>) -> Tensor<B, 1> {
///         Tensor::from_floats(items.as_slice(), device)
///     }
/// }
///
/// # type B = Ddp<burn_flex::Flex>;
/// # fn main() -> burn_ddp::Result<()> {
/// # let group = ProcessGroup::<B>::solo(&Default::default());
/// let items = InMemDataset::new((0..11).map(|item| item as f32).collect());
/// let loader = DataLoaderBuilder::<B, _, _>::new(Floats, &group)
///     .batch_size(4)
///     .shuffle(42)
///     .num_workers(2)
///     .build(items)?;
/// assert_eq!(loader.iter().map(|batch| batch.dims()[0]).collect::<Vec<_>>(), [4, 4, 3]);
/// # Ok(())
/// # }
/// ```
pub struct DataLoaderBuilder<B: Backend, I, O> {
    batcher: Arc<dyn Batcher<B, I, O>>,
    shards: Arc<Shards>,
    rank: usize,
    world_size: usize,
    device: B::Device,
    batch_size: Option<usize>,
    accumulation: usize,
    seed: Option<u64>,
    first_epoch: usize,
    workers: usize,
    drop_last: bool,
    pad: bool,
}

impl<B: Backend, I: 'static, O: Send + 'static> DataLoaderBuilder<B, I, O> {
    /// Creates a builder for the ranks of `group`, whose batches are made on the group's device. `B` is the backend of
    /// the batches: `Autodiff<Ddp<Flex>>` for training and `Ddp<Flex>` for validation, both with a group of
    /// `Ddp<Flex>`.
    pub fn new<Bt, G>(batcher: Bt, group: &ProcessGroup<G>) -> Self
    where
        Bt: Batcher<B, I, O> + 'static,
        G: Backend<Device = B::Device>,
    {
        let position = (group.rank().0, group.world_size());
        Self::at(batcher, position, group.device().clone(), group.ranks().attached::<Shards>())
    }

    pub(super) fn at<Bt>(
        batcher: Bt,
        (rank, world_size): (usize, usize),
        device: B::Device,
        shards: Arc<Shards>,
    ) -> Self
    where
        Bt: Batcher<B, I, O> + 'static,
    {
        Self {
            batcher: Arc::new(batcher),
            shards,
            rank,
            world_size,
            device,
            batch_size: None,
            accumulation: 1,
            seed: None,
            first_epoch: 0,
            workers: 0,
            drop_last: false,
            pad: false,
        }
    }

    /// Sets the number of items of one micro-step over all ranks; required. If the world size does not divide it, the
    /// first ranks have one item more; with fewer items than ranks, the last ranks have none.
    pub fn batch_size(self, batch_size: usize) -> Self {
        Self { batch_size: Some(batch_size), ..self }
    }

    /// Shuffles the data set in each epoch, equally on all ranks. By default the items keep their order.
    pub fn shuffle(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Sets the epoch of the first `iter()`, counted from 0 (default), for a loop of your own that resumes.
    pub fn first_epoch(self, epoch: usize) -> Self {
        Self { first_epoch: epoch, ..self }
    }

    /// Sets the number of threads that make batches in advance, two each; with 0 (default) `next()` makes the batch.
    pub fn num_workers(self, num_workers: usize) -> Self {
        Self { workers: num_workers, ..self }
    }

    /// Makes the batches on `device`; default the group's device.
    pub fn set_device(self, device: B::Device) -> Self {
        Self { device, ..self }
    }

    /// Leaves out the items that do not fill the last window of [`accumulation`](Self::accumulation) global batches.
    /// With [`shuffle`](Self::shuffle), different items are left out in each epoch.
    pub fn drop_last(self) -> Self {
        Self { drop_last: true, ..self }
    }

    /// Fills the last window of [`accumulation`](Self::accumulation) global batches with the first items of the epoch's
    /// order, which are then used more than once. Do not use it for validation, because metrics count the duplicates.
    pub fn pad(self) -> Self {
        Self { pad: true, ..self }
    }

    /// Sets the micro-steps of an optimizer step (default 1), which [`drop_last`](Self::drop_last) and
    /// [`pad`](Self::pad) keep whole.
    pub fn accumulation(self, micro_steps: usize) -> Self {
        Self { accumulation: micro_steps, ..self }
    }

    /// Builds the loader; all ranks build it with the same options and over the same data set.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) without a batch size, with a batch size or accumulation of 0,
    /// with both [`drop_last`](Self::drop_last) and [`pad`](Self::pad), and for an epoch without items, whose cause is
    /// more likely a wrong path than intent.
    pub fn build<D: Dataset<I> + 'static>(self, dataset: D) -> Result<Arc<dyn DataLoader<B, O>>> {
        let items = dataset.len();
        let (batch, window, tail) = self.check(items)?;
        let share = Share::new(items, batch, window, tail, self.seed, (self.rank, self.world_size));
        let state = ShardState::new(self.fingerprint(items, batch, tail), true, self.first_epoch);
        let source = Source {
            dataset: Arc::new(dataset),
            batcher: self.batcher,
            device: self.device,
            share,
            workers: self.workers,
        };
        Ok(sharded_loader(source, Arc::new(state), &self.shards))
    }

    /// Returns items of a global batch, items of a window, and the treatment of the last items.
    fn check(&self, items: usize) -> Result<(usize, usize, Tail)> {
        let batch = match self.batch_size {
            Some(0) => Err("batch_size is 0: give the items of one micro-step over all ranks".into()),
            Some(batch) => Ok(batch),
            None => {
                Err("no batch size: call batch_size with the items of one micro-step over all ranks".into())
            }
        };
        let batch = batch.map_err(|text: String| Error::config(text))?;
        if self.accumulation == 0 {
            return Err(Error::config(
                "accumulation is 0: give the micro-steps of an optimizer step, 1 for none",
            ));
        }
        let window = batch.saturating_mul(self.accumulation);
        let tail = match (self.drop_last, self.pad) {
            (true, true) => {
                return Err(Error::config(
                    "drop_last and pad are both set: the last items are either left out or filled up",
                ));
            }
            (true, false) => Tail::Drop,
            (false, true) => Tail::Pad,
            (false, false) => Tail::Split,
        };
        if items == 0 {
            return Err(Error::config("the data set has no items: is its path right?"));
        }
        if tail == Tail::Drop && items < window {
            return Err(Error::config(format!(
                "drop_last leaves nothing of {items} items: a window is {window} (batch size {batch} times \
                 accumulation {})",
                self.accumulation
            )));
        }
        if tail == Tail::Pad && items.div_ceil(window).checked_mul(window).is_none() {
            return Err(Error::config(format!(
                "pad cannot fill a window of {window} items: lower batch_size"
            )));
        }
        Ok((batch, window, tail))
    }

    /// Describes the options that must be equal on all ranks.
    fn fingerprint(&self, items: usize, batch: usize, tail: Tail) -> String {
        let order = match self.seed {
            Some(seed) => format!("shuffled with seed {seed}"),
            None => "not shuffled".into(),
        };
        let tail = match tail {
            Tail::Split => "last one split",
            Tail::Drop => "last window dropped",
            Tail::Pad => "last window padded",
        };
        format!(
            "{items} items in batches of {batch}, {order}, accumulation {}, {tail}, from epoch {}",
            self.accumulation, self.first_epoch
        )
    }
}
