//! Registry of sharded loaders, kept with the process group.
//!
//! Users hand a loader around as `Arc<dyn DataLoader>`, whose type does not tell if it holds all items or a rank's
//! share. The registry maps the addresses of sharded loaders to their state. Each loader holds a [`Marker`], to which
//! the registry has a weak reference: once the loader is dropped, another loader at the same address is not taken for
//! it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Registry of the sharded loaders of one group.
#[derive(Default)]
pub(super) struct Shards(Mutex<Vec<Entry>>);

struct Entry {
    address: usize,
    marker: Weak<Marker>,
}

/// Part of a sharded loader that lives as long as the loader.
pub(super) struct Marker(pub(super) Arc<ShardState>);

impl Shards {
    /// Registers a loader that holds `marker`.
    pub(super) fn register<T: ?Sized>(&self, loader: &Arc<T>, marker: &Arc<Marker>) {
        let mut entries = self.entries();
        entries.retain(|entry| entry.marker.strong_count() > 0);
        entries.push(Entry { address: address(loader), marker: Arc::downgrade(marker) });
    }

    /// Returns the state of a loader, if it is registered.
    pub(super) fn find<T: ?Sized>(&self, loader: &Arc<T>) -> Option<Arc<ShardState>> {
        let address = address(loader);
        let entries = self.entries();
        let mut known = entries.iter().filter(|entry| entry.address == address);
        known.find_map(|entry| Some(entry.marker.upgrade()?.0.clone()))
    }

    /// True if any loader makes placeholders.
    pub(super) fn any_makes_placeholders(&self) -> bool {
        self.entries()
            .iter()
            .any(|entry| entry.marker.upgrade().is_some_and(|marker| marker.0.makes_placeholders()))
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn address<T: ?Sized>(loader: &Arc<T>) -> usize {
    Arc::as_ptr(loader).cast::<()>() as usize
}

/// State that a sharded loader shares with its copies on other devices.
pub(crate) struct ShardState {
    fingerprint: String,
    can_make_placeholders: bool,
    epoch: AtomicUsize,
    placeholders: AtomicBool,
}

impl ShardState {
    pub(super) fn new(fingerprint: String, can_make_placeholders: bool, epoch: usize) -> Self {
        Self { fingerprint, can_make_placeholders, epoch: epoch.into(), placeholders: false.into() }
    }

    /// Sets the epoch of the next `iter()`, from which later ones continue. It has no effect on wrapped loaders, which
    /// have an order of their own.
    pub(crate) fn set_epoch(&self, epoch: usize) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    /// Returns the epoch of an iteration that begins, and advances to the next.
    pub(super) fn begin_epoch(&self) -> usize {
        self.epoch.fetch_add(1, Ordering::Relaxed)
    }

    /// Epoch of the next iteration.
    pub(super) fn next_epoch(&self) -> usize {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Makes later iterations give a batch that counts no items in steps in which this rank has none. It has no effect
    /// on loaders that cannot do so.
    pub(crate) fn set_placeholders(&self, on: bool) {
        self.placeholders.store(on, Ordering::Relaxed);
    }

    /// True if [`ShardState::set_placeholders`] has an effect.
    pub(crate) fn can_make_placeholders(&self) -> bool {
        self.can_make_placeholders
    }

    pub(super) fn makes_placeholders(&self) -> bool {
        self.can_make_placeholders && self.placeholders.load(Ordering::Relaxed)
    }

    /// Description of the options that must be equal on all ranks.
    pub(super) fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Loader(#[allow(dead_code, reason = "held, not read")] Arc<Marker>, u64);

    fn registered(shards: &Shards, name: &str) -> Arc<Loader> {
        let marker = Arc::new(Marker(Arc::new(ShardState::new(name.into(), true, 0))));
        let loader = Arc::new(Loader(marker.clone(), 7));
        shards.register(&loader, &marker);
        loader
    }

    #[test]
    fn a_loader_is_found_through_every_handle() {
        let shards = Shards::default();
        let (a, b) = (registered(&shards, "a"), registered(&shards, "b"));
        let found = |loader: &Arc<Loader>| shards.find(loader).map(|state| state.fingerprint());
        assert_eq!(found(&a.clone()), Some("a".into()));
        assert_eq!(found(&b), Some("b".into()));
        assert_eq!(shards.find(&Arc::new(a.1)).map(|state| state.fingerprint()), None);
    }

    #[test]
    fn the_address_of_a_loader_that_is_gone_means_nothing() {
        let shards = Shards::default();
        drop(registered(&shards, "gone"));
        // The allocator gives the freed address out again.
        let others: Vec<_> = (0..64)
            .map(|_| {
                let state = ShardState::new(String::new(), false, 0);
                Arc::new(Loader(Arc::new(Marker(Arc::new(state))), 0))
            })
            .collect();
        assert!(others.iter().all(|other| shards.find(other).is_none()));
        let _one = registered(&shards, "one");
        assert_eq!(shards.entries().len(), 1, "what is gone is forgotten");
    }

    #[test]
    fn only_loaders_that_can_make_placeholders_do() {
        for can in [false, true] {
            let state = ShardState::new(String::new(), can, 0);
            state.set_placeholders(true);
            assert_eq!((state.can_make_placeholders(), state.makes_placeholders()), (can, can));
        }
    }
}
