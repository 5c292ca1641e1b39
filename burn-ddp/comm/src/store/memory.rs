//! A store inside one process, for ranks that are threads.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::{Store, not_set};

/// Keys and counters in this process. Clones are handles to the same store.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    values: BTreeMap<String, Vec<u8>>,
    counters: BTreeMap<String, i64>,
}

impl MemoryStore {
    // A panic while the lock is held cannot leave the state half-written: every update is one insertion.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.lock().values.insert(key.into(), value.into());
        self.0.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout);
        let mut state = self.lock();
        loop {
            if let Some(value) = state.values.get(key) {
                return Ok(value.clone());
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(not_set(key, timeout));
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let mut state = self.lock();
        let counter = state.counters.entry(key.into()).or_default();
        *counter = counter.wrapping_add(delta);
        Ok(*counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_get_waits_for_the_set_of_another_thread() {
        let store = MemoryStore::default();
        let other = store.clone();
        let waiting = std::thread::spawn(move || other.get("key", Duration::from_secs(10)));
        store.set("key", b"value").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"value");
        store.set("key", b"").unwrap();
        assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"");
    }

    #[test]
    fn a_missing_key_is_named_with_the_time() {
        let store = MemoryStore::default();
        assert_eq!(store.add("key", 1).unwrap(), 1);
        let error = store.get("key", Duration::from_millis(20)).expect_err("a counter is not a value");
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(error.to_string(), "nobody set the store key 'key' within 0.02 s");
    }

    #[test]
    fn eight_threads_count_together() {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..100).for_each(|_| assert!(store.add("n", 2).unwrap() > 0)));
            }
        });
        assert_eq!(store.add("n", -1).unwrap(), 1599);
    }
}
