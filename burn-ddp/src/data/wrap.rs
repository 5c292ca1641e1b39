//! Wrappers that shard a loader that exists.
//!
//! Such a loader does not let others set its order. [`slice()`] is exact for a loader that does not shuffle, [`stride`]
//! serves one that shuffles equally on all ranks, and [`local`] one that holds this rank's items only. Other cases need
//! [`DataLoaderBuilder`](super::DataLoaderBuilder).

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use burn_ddp_comm::collective::chunk;
use derive_new::new;

use super::shards::{Marker, ShardState, Shards};
use crate::process_group::ProcessGroup;

/// Gives each rank a contiguous share of a loader that does **not** shuffle: rank `r` of `W` has the items
/// `r*n/W..(r+1)*n/W` of `n`, by [`DataLoader::slice`]. Shares are disjoint and complete, and differ in length by
/// at most one. Each rank's batches have the loader's batch size.
///
/// A loader that shuffles does so within each share, and never mixes the shares.
///
/// The loader makes its batches on the device it was built for (`set_device(group.device().clone())`) until
/// `to_device` moves it. A loader that is already sharded for this group is returned as it is.
///
/// ```no_run
/// use burn::data::dataloader::DataLoaderBuilder;
/// # use burn::data::dataloader::batcher::Batcher;
/// # use burn::data::dataset::Dataset;
/// # use burn::tensor::{Tensor, backend::Backend};
/// # use burn_ddp::{ProcessGroup, data};
/// # fn loader<B: Backend, Bt: Batcher<B, f32, Tensor<B, 2>> + 'static>(
/// #     batcher: Bt, items: impl Dataset<f32> + 'static, group: ProcessGroup<B>,
/// # ) {
/// let loader = DataLoaderBuilder::new(batcher).batch_size(32).set_device(group.device().clone()).build(items);
/// let loader = data::slice(loader, &group);
/// # }
/// ```
pub fn slice<B, O, G>(loader: Arc<dyn DataLoader<B, O>>, group: &ProcessGroup<G>) -> Arc<dyn DataLoader<B, O>>
where
    B: Backend,
    O: 'static,
    G: Backend<Device = B::Device>,
{
    wrap(loader, group.ranks().attached(), (group.rank().0, group.world_size()), Sharding::Slice)
}

/// Distributes the batches of a loader that shuffles: rank `r` of `W` uses the batches `r`, `r + W`, ..., so a global
/// batch is `W` of the loader's batches.
///
/// All ranks must build the loader with the same seed and with **at most one worker**, because the order of Burn's
/// batches is a race with more. Each rank makes all batches and drops those of the others, so the data work of each
/// rank is that of a single process.
///
/// [`slice()`] describes devices and loaders that are already sharded.
pub fn stride<B, O, G>(
    loader: Arc<dyn DataLoader<B, O>>,
    group: &ProcessGroup<G>,
) -> Arc<dyn DataLoader<B, O>>
where
    B: Backend,
    O: 'static,
    G: Backend<Device = B::Device>,
{
    let (rank, world) = (group.rank().0, group.world_size());
    wrap(loader, group.ranks().attached(), (rank, world), Sharding::Stride { rank, world })
}

/// Declares that a loader already holds this rank's own items only, so nothing is split. The loader may be a stream of
/// unknown length: one that does not count its items counts 1 for each batch.
///
/// [`slice()`] describes devices and loaders that are already sharded.
pub fn local<B, O, G>(loader: Arc<dyn DataLoader<B, O>>, group: &ProcessGroup<G>) -> Arc<dyn DataLoader<B, O>>
where
    B: Backend,
    O: 'static,
    G: Backend<Device = B::Device>,
{
    wrap(loader, group.ranks().attached(), (group.rank().0, group.world_size()), Sharding::Local)
}

/// The way in which a loader is sharded.
#[derive(Clone, Copy)]
enum Sharding {
    Slice,
    Stride { rank: usize, world: usize },
    Local,
}

fn wrap<B: Backend, O: 'static>(
    loader: Arc<dyn DataLoader<B, O>>,
    shards: Arc<Shards>,
    (rank, world): (usize, usize),
    sharding: Sharding,
) -> Arc<dyn DataLoader<B, O>> {
    if shards.find(&loader).is_some() {
        return loader;
    }
    let items = loader.num_items();
    let (inner, fingerprint, can_make_placeholders) = match sharding {
        Sharding::Slice => {
            // The product of two 64-bit numbers fits into 128 bits.
            let at = |rank: usize| (rank as u128 * items as u128 / world as u128) as usize;
            (loader.slice(at(rank), at(rank + 1)), format!("a slice of {items} items"), false)
        }
        Sharding::Stride { .. } => (loader, format!("a stride over {items} items"), true),
        Sharding::Local => (loader, "each rank's own items".into(), false),
    };
    let state = ShardState::new(fingerprint, can_make_placeholders, 0);
    Wrapped::create(inner, sharding, Arc::new(state), &shards)
}

struct Wrapped<B: Backend, O> {
    inner: Arc<dyn DataLoader<B, O>>,
    sharding: Sharding,
    marker: Arc<Marker>,
    shards: Arc<Shards>,
}

impl<B: Backend, O: 'static> Wrapped<B, O> {
    fn create(
        inner: Arc<dyn DataLoader<B, O>>,
        sharding: Sharding,
        state: Arc<ShardState>,
        shards: &Arc<Shards>,
    ) -> Arc<dyn DataLoader<B, O>> {
        let marker = Arc::new(Marker(state));
        let loader = Arc::new(Self { inner, sharding, marker: marker.clone(), shards: shards.clone() });
        shards.register(&loader, &marker);
        loader
    }
}

impl<B: Backend, O: 'static> DataLoader<B, O> for Wrapped<B, O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let inner = CountingIterator { inner: self.inner.iter(), batches: 0 };
        match self.sharding {
            Sharding::Slice | Sharding::Local => Box::new(inner),
            Sharding::Stride { rank, world } => {
                let placeholders = self.marker.0.makes_placeholders();
                Box::new(StrideIterator::new(inner, rank, world, placeholders))
            }
        }
    }

    /// For a stride this is an estimate: the number of items of a batch is not known before it is made.
    fn num_items(&self) -> usize {
        match self.sharding {
            Sharding::Slice | Sharding::Local => self.inner.num_items(),
            Sharding::Stride { rank, world } => chunk(self.inner.num_items(), world, rank).len(),
        }
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, O>> {
        Self::create(self.inner.to_device(device), self.sharding, self.marker.0.clone(), &self.shards)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, O>> {
        let inner = match self.sharding {
            Sharding::Slice | Sharding::Local => self.inner.slice(start, end),
            Sharding::Stride { world, .. } => {
                let all = self.inner.num_items();
                let last = if end >= self.num_items() { all } else { end.saturating_mul(world).min(all) };
                self.inner.slice(start.saturating_mul(world).min(last), last)
            }
        };
        let fingerprint = format!("items {start}..{end} of {}", self.marker.0.fingerprint());
        let state = ShardState::new(fingerprint, self.marker.0.can_make_placeholders(), 0);
        Self::create(inner, self.sharding, Arc::new(state), &self.shards)
    }
}

/// An iterator that counts each batch as one item if the inner iterator does not count items.
struct CountingIterator<'a, O> {
    inner: Box<dyn DataLoaderIterator<O> + 'a>,
    batches: usize,
}

impl<O> Iterator for CountingIterator<'_, O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        let batch = self.inner.next()?;
        self.batches += 1;
        Some(batch)
    }
}

impl<O> DataLoaderIterator<O> for CountingIterator<'_, O> {
    fn progress(&self) -> Progress {
        let progress = self.inner.progress();
        match progress.items_processed {
            0 => Progress::new(self.batches, progress.items_total),
            _ => progress,
        }
    }
}

/// Every `world`-th batch of an iterator, from the `rank`-th on.
#[derive(new)]
struct StrideIterator<'a, O> {
    inner: CountingIterator<'a, O>,
    rank: usize,
    world: usize,
    placeholders: bool,
    /// Batches of the current global batch that this rank has not read yet.
    #[new(default)]
    unread: usize,
    #[new(default)]
    ended: bool,
    #[new(default)]
    processed: usize,
    /// Items of the first batch, and so of all but the last; 0 before it is read.
    #[new(default)]
    batch_size: usize,
}

impl<O> StrideIterator<'_, O> {
    fn read(&mut self) -> Option<O> {
        let batch = if self.ended { None } else { self.inner.next() };
        self.ended |= batch.is_none();
        if self.batch_size == 0 {
            self.batch_size = self.inner.progress().items_processed;
        }
        batch
    }

    /// Number of items in every `world`-th batch from `rank` on, out of `items` in batches of one size.
    fn share(&self, items: usize) -> usize {
        if self.batch_size == 0 {
            return chunk(items, self.world, self.rank).len();
        }
        let batches = items.div_ceil(self.batch_size);
        let own = batches.saturating_sub(self.rank).div_ceil(self.world);
        let has_last = own > 0 && (batches - 1) % self.world == self.rank;
        let missing = if has_last { batches * self.batch_size - items } else { 0 };
        own * self.batch_size - missing
    }
}

impl<O> Iterator for StrideIterator<'_, O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        for _ in 0..std::mem::take(&mut self.unread) {
            self.read()?;
        }
        let mut first = None;
        for position in 0..self.rank {
            let batch = self.read();
            if position == 0 && self.placeholders {
                first = batch;
            }
        }
        let before = self.inner.progress().items_processed;
        match self.read() {
            Some(batch) => {
                let items = self.inner.progress().items_processed.saturating_sub(before);
                self.processed += items;
                self.unread = self.world - 1 - self.rank;
                Some(batch)
            }
            // The placeholder is the first batch of the global batch, and its items are not counted.
            None => first,
        }
    }
}

impl<O> DataLoaderIterator<O> for StrideIterator<'_, O> {
    fn progress(&self) -> Progress {
        let inner = self.inner.progress();
        if !self.ended {
            let total = self.share(inner.items_total);
            return Progress::new(self.processed, total.max(self.processed));
        }
        match inner.items_total.saturating_sub(inner.items_processed) {
            0 => Progress::new(self.processed, self.processed),
            missing => Progress::new(self.processed, self.processed + missing),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::data::dataloader::batcher::Batcher;
    use burn::data::dataloader::{BatchDataLoader, FixBatchStrategy};
    use burn::data::dataset::InMemDataset;
    use burn_flex::{Flex, FlexDevice};

    use super::*;

    type Loader = Arc<dyn DataLoader<Flex, Vec<usize>>>;

    struct Collect;

    impl Batcher<Flex, usize, Vec<usize>> for Collect {
        fn batch(&self, items: Vec<usize>, _: &FlexDevice) -> Vec<usize> {
            items
        }
    }

    fn foreign(items: usize, batch: usize) -> Loader {
        let strategy = Box::new(FixBatchStrategy::new(batch));
        let dataset = Arc::new(InMemDataset::new((0..items).collect()));
        Arc::new(BatchDataLoader::new(strategy, dataset, Arc::new(Collect), FlexDevice, None))
    }

    /// Batches of an iteration, each with the number of items by which it advanced the progress.
    fn counted(loader: &Loader) -> Vec<(Vec<usize>, usize)> {
        let mut iterator = loader.iter();
        let mut batches = Vec::new();
        let mut before = 0;
        while let Some(batch) = iterator.next() {
            let now = iterator.progress().items_processed;
            batches.push((batch, now - before));
            before = now;
        }
        assert_eq!(iterator.progress().items_total, before, "all were counted");
        batches
    }

    #[test]
    fn a_stride_counts_its_own_batches() {
        // Batches of 3, 3, 3 and 1.
        let of = |rank| {
            counted(&wrap(foreign(10, 3), Arc::default(), (rank, 3), Sharding::Stride { rank, world: 3 }))
        };
        assert_eq!(of(0), [(vec![0, 1, 2], 3), (vec![9], 1)]);
        assert_eq!(of(1), [(vec![3, 4, 5], 3)]);
        assert_eq!(of(2), [(vec![6, 7, 8], 3)]);
    }

    #[test]
    fn the_totals_of_all_strides_are_the_items_at_every_batch() {
        for (items, batch, world) in [(1000, 32, 2), (1000, 32, 3), (10, 3, 3), (9, 3, 2), (2, 3, 3)] {
            let loaders: Vec<_> = (0..world)
                .map(|rank| {
                    wrap(
                        foreign(items, batch),
                        Arc::default(),
                        (rank, world),
                        Sharding::Stride { rank, world },
                    )
                })
                .collect();
            let mut iterators: Vec<_> = loaders.iter().map(|loader| loader.iter()).collect();
            let rounds = items.div_ceil(batch * world);
            for _ in 0..rounds {
                iterators.iter_mut().for_each(|iterator| {
                    iterator.next();
                });
                let total: usize = iterators.iter().map(|iterator| iterator.progress().items_total).sum();
                assert_eq!(total, items, "{items} in batches of {batch} on {world}");
            }
        }
    }

    #[test]
    fn a_stride_stands_in_with_the_first_batch_of_the_round() {
        for (rank, last) in [(0, 1), (1, 0), (2, 0)] {
            let shards = Arc::<Shards>::default();
            let loader = wrap(foreign(10, 3), shards.clone(), (rank, 3), Sharding::Stride { rank, world: 3 });
            shards.find(&loader).expect("known").set_placeholders(true);
            let batches = counted(&loader);
            assert_eq!((batches.len(), &batches[1]), (2, &(vec![9], last)), "rank {rank}");
        }
    }

    #[test]
    fn slices_differ_in_length_by_at_most_one() {
        for world in 1..=5 {
            let of = |rank| {
                let loader = wrap(foreign(21, 4), Arc::default(), (rank, world), Sharding::Slice);
                let items: Vec<_> = counted(&loader).into_iter().flat_map(|(batch, _)| batch).collect();
                assert_eq!(loader.num_items(), items.len());
                items
            };
            let parts: Vec<_> = (0..world).map(of).collect();
            assert_eq!(parts.concat(), (0..21).collect::<Vec<_>>());
            assert!(parts.iter().all(|part| part.len().abs_diff(21 / world) <= 1));
        }
    }

    #[test]
    fn what_is_made_of_a_wrapped_loader_is_known_too() {
        for sharding in [Sharding::Slice, Sharding::Stride { rank: 1, world: 2 }, Sharding::Local] {
            let shards = Arc::<Shards>::default();
            let loader = wrap(foreign(12, 2), shards.clone(), (1, 2), sharding);
            let parts = [loader.slice(0, 2), loader.slice(2, loader.num_items())];
            let all: Vec<_> = parts.iter().flat_map(counted).map(|(batch, _)| batch).collect();
            let whole: Vec<_> = counted(&loader).into_iter().map(|(batch, _)| batch).collect();
            assert_eq!(all.concat(), whole.concat());
            for known in [&loader.to_device(&FlexDevice), &parts[0], &parts[1]] {
                assert!(shards.find(known).is_some());
            }
            let again = wrap(loader.clone(), shards.clone(), (1, 2), Sharding::Slice);
            assert!(Arc::ptr_eq(&again, &loader), "not sharded twice");
        }
    }
}
