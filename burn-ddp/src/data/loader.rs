//! Loader of this rank's share of every global batch.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::Dataset;
use burn::tensor::backend::Backend;

use super::order::Share;
use super::shards::{Marker, ShardState, Shards};
use super::workers::{Batches, Failure, MakeBatch, guard};

/// Data set, batcher and share of a loader.
pub(super) struct Source<B: Backend, I, O> {
    pub(super) dataset: Arc<dyn Dataset<I>>,
    pub(super) batcher: Arc<dyn Batcher<B, I, O>>,
    pub(super) device: B::Device,
    pub(super) share: Share,
    pub(super) workers: usize,
}

impl<B: Backend, I, O> Clone for Source<B, I, O> {
    fn clone(&self) -> Self {
        Self {
            dataset: self.dataset.clone(),
            batcher: self.batcher.clone(),
            device: self.device.clone(),
            share: self.share.clone(),
            workers: self.workers,
        }
    }
}

struct ShardedLoader<B: Backend, I, O> {
    source: Source<B, I, O>,
    marker: Arc<Marker>,
    shards: Arc<Shards>,
}

/// Creates a loader and registers it in `shards` with `state`.
pub(super) fn sharded_loader<B: Backend, I: 'static, O: Send + 'static>(
    source: Source<B, I, O>,
    state: Arc<ShardState>,
    shards: &Arc<Shards>,
) -> Arc<dyn DataLoader<B, O>> {
    let marker = Arc::new(Marker(state));
    let loader = Arc::new(ShardedLoader { source, marker: marker.clone(), shards: shards.clone() });
    shards.register(&loader, &marker);
    loader
}

impl<B: Backend, I: 'static, O: Send + 'static> DataLoader<B, O> for ShardedLoader<B, I, O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let state = &self.marker.0;
        let share = self.source.share.clone();
        let steps = share.steps(state.makes_placeholders());
        let make = batch_maker(self.source.clone(), state.begin_epoch());
        let batches = Batches::new(make, steps, self.source.workers);
        Box::new(ShardIterator { batches, share, processed: 0 })
    }

    fn num_items(&self) -> usize {
        self.source.share.own()
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, O>> {
        let source = Source { device: device.clone(), ..self.source.clone() };
        sharded_loader(source, self.marker.0.clone(), &self.shards)
    }

    /// A part of this rank's own items, by position in the order of each epoch. It counts epochs separately, so that
    /// the slices of one loader, each iterated once an epoch, stay disjoint.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, O>> {
        let source = Source { share: self.source.share.slice(start..end), ..self.source.clone() };
        let state = &self.marker.0;
        let fingerprint = format!("items {start}..{end} of a rank's share of {}", state.fingerprint());
        let state = ShardState::new(fingerprint, false, state.next_epoch());
        sharded_loader(source, Arc::new(state), &self.shards)
    }
}

/// Returns the function that makes the batch of a step in `epoch`.
fn batch_maker<B: Backend, I: 'static, O: Send + 'static>(
    source: Source<B, I, O>,
    epoch: usize,
) -> Arc<MakeBatch<O>> {
    let order = source.share.epoch(epoch);
    Arc::new(move |step| {
        let Source { dataset, batcher, device, share, .. } = &source;
        let item = |index: usize| {
            let found =
                guard(|| format!("Dataset::get of item {index} of {}", share.items), || dataset.get(index))?;
            let none = || format!("Dataset::get returned None for item {index} of {}", share.items);
            found.ok_or_else(|| Failure::new(none()))
        };
        let indices = order.indices(step);
        let items = indices.iter().map(|index| item(*index)).collect::<Result<Vec<_>, _>>()?;
        let place = || format!("Batcher::batch of batch {step}, items {}", list(&indices));
        guard(place, || batcher.batch(items, device))
    })
}

/// Formats the first indices, which identify the batch.
fn list(indices: &[usize]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = indices.iter().take(SHOWN).map(usize::to_string).collect();
    match indices.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

struct ShardIterator<O> {
    batches: Batches<O>,
    share: Share,
    processed: usize,
}

impl<O> Iterator for ShardIterator<O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        let (step, batch) = self.batches.next()?;
        self.processed += self.share.count(step);
        Some(batch)
    }
}

impl<O> DataLoaderIterator<O> for ShardIterator<O> {
    fn progress(&self) -> Progress {
        Progress::new(self.processed, self.share.own())
    }
}
