//! Which loaders are known to be sharded.
//!
//! A data loader is handed around as `Arc<dyn DataLoader>`, which cannot be asked what it holds. Whether each rank
//! sees its own part or all of it must not be guessed, so the loaders made here are remembered with the group by
//! their address. A marker inside the loader, held weakly, tells whether the address is still its own.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The sharded loaders of one group.
#[derive(Default)]
pub(crate) struct Shards(Mutex<Vec<Entry>>);

struct Entry {
    address: usize,
    marker: Weak<Marker>,
}

/// Lives inside a loader, and as long as it.
pub(super) struct Marker(pub(super) Arc<ShardState>);

impl Shards {
    /// Remembers a loader that holds the marker.
    pub(super) fn enter<T: ?Sized>(&self, loader: &Arc<T>, marker: &Arc<Marker>) {
        let mut entries = self.entries();
        entries.retain(|entry| entry.marker.strong_count() > 0);
        entries.push(Entry { address: address(loader), marker: Arc::downgrade(marker) });
    }

    /// What is known of a loader, if it was made here.
    pub(crate) fn find<T: ?Sized>(&self, loader: &Arc<T>) -> Option<Arc<ShardState>> {
        let address = address(loader);
        let entries = self.entries();
        let mut known = entries.iter().filter(|entry| entry.address == address);
        known.find_map(|entry| Some(entry.marker.upgrade()?.0.clone()))
    }

    /// Whether any loader makes placeholders.
    pub(super) fn any_places(&self) -> bool {
        self.entries().iter().any(|entry| entry.marker.upgrade().is_some_and(|marker| marker.0.places()))
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn address<T: ?Sized>(loader: &Arc<T>) -> usize {
    Arc::as_ptr(loader).cast::<()>() as usize
}

/// What a sharded loader and its copies on other devices have in common.
pub(crate) struct ShardState {
    fingerprint: String,
    can_place: bool,
    epoch: AtomicUsize,
    placeholders: AtomicBool,
}

impl ShardState {
    pub(super) fn new(fingerprint: String, can_place: bool, epoch: usize) -> Self {
        Self { fingerprint, can_place, epoch: epoch.into(), placeholders: false.into() }
    }

    /// Sets the epoch whose order the next `iter()` takes; later ones go on from there. Without effect on wrapped
    /// loaders, whose order is their own affair.
    pub(crate) fn set_epoch(&self, epoch: usize) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    /// The epoch of an iteration that begins.
    pub(super) fn begin_epoch(&self) -> usize {
        self.epoch.fetch_add(1, Ordering::Relaxed)
    }

    /// The epoch of the next iteration.
    pub(super) fn next_epoch(&self) -> usize {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Whether iterations that begin from now on make a batch that counts no items where this rank has none.
    /// Without effect on loaders that cannot.
    pub(crate) fn set_placeholders(&self, on: bool) {
        self.placeholders.store(on, Ordering::Relaxed);
    }

    /// Whether [`ShardState::set_placeholders`] has an effect.
    pub(crate) fn can_place(&self) -> bool {
        self.can_place
    }

    pub(super) fn places(&self) -> bool {
        self.can_place && self.placeholders.load(Ordering::Relaxed)
    }

    /// What must be equal on all ranks, in words.
    pub(crate) fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Loader(#[allow(dead_code, reason = "held, not read")] Arc<Marker>, u64);

    fn entered(shards: &Shards, name: &str) -> Arc<Loader> {
        let marker = Arc::new(Marker(Arc::new(ShardState::new(name.into(), true, 0))));
        let loader = Arc::new(Loader(marker.clone(), 7));
        shards.enter(&loader, &marker);
        loader
    }

    #[test]
    fn a_loader_is_found_through_every_handle() {
        let shards = Shards::default();
        let (a, b) = (entered(&shards, "a"), entered(&shards, "b"));
        let found = |loader: &Arc<Loader>| shards.find(loader).map(|state| state.fingerprint());
        assert_eq!(found(&a.clone()), Some("a".into()));
        assert_eq!(found(&b), Some("b".into()));
        assert_eq!(shards.find(&Arc::new(a.1)).map(|state| state.fingerprint()), None);
    }

    #[test]
    fn the_address_of_a_loader_that_is_gone_means_nothing() {
        let shards = Shards::default();
        drop(entered(&shards, "gone"));
        // The allocator gives the freed address out again.
        let others: Vec<_> = (0..64)
            .map(|_| {
                let state = ShardState::new(String::new(), false, 0);
                Arc::new(Loader(Arc::new(Marker(Arc::new(state))), 0))
            })
            .collect();
        assert!(others.iter().all(|other| shards.find(other).is_none()));
        let _one = entered(&shards, "one");
        assert_eq!(shards.entries().len(), 1, "what is gone is forgotten");
    }

    #[test]
    fn only_loaders_that_can_make_placeholders_do() {
        for can in [false, true] {
            let state = ShardState::new(String::new(), can, 0);
            state.set_placeholders(true);
            assert_eq!((state.can_place(), state.places()), (can, can));
        }
    }
}
