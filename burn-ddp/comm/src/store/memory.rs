//! A store inside one process, for ranks that are threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::{Store, not_set};
use crate::watched::Watched;

/// Keys and counters in this process. Clones are handles to the same store.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Watched<Entries>>);

#[derive(Default)]
struct Entries {
    values: BTreeMap<String, Vec<u8>>,
    counters: BTreeMap<String, i64>,
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.update(|entries| entries.values.insert(key.into(), value.into()));
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.0.wait_for(Deadline::after(timeout), |entries| entries.values.get(key).cloned());
        value.ok_or_else(|| not_set(key, timeout))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let mut entries = self.0.lock();
        let counter = entries.counters.entry(key.into()).or_default();
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
        assert_eq!(error.to_string(), "no process set the store key 'key' within 0.02 s");
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
