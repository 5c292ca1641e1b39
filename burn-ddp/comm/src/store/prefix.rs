//! A store of its own within another store.

use std::sync::Arc;
use std::time::Duration;

use derive_new::new;

use crate::error::Result;
use crate::store::Store;

/// Puts a prefix in front of every key, so that two groups (or two attempts of one) share a store and never see each
/// other's keys. Prefixes nest.
#[derive(Clone, new)]
pub struct PrefixStore {
    inner: Arc<dyn Store>,
    #[new(into)]
    prefix: String,
}

impl PrefixStore {
    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.get(&self.key(key), timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(&self.key(key), delta)
    }

    fn remarks(&self) -> Vec<String> {
        self.inner.remarks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn prefixes_part_the_keys_and_nest() {
        let memory = MemoryStore::default();
        let a = Arc::new(PrefixStore::new(Arc::new(memory.clone()), "a"));
        let b = PrefixStore::new(Arc::new(memory.clone()), "b");
        let nested = PrefixStore::new(a.clone(), "b");
        a.set("key", b"a").unwrap();
        nested.set("key", b"ab").unwrap();
        assert_eq!(a.get("key", Duration::ZERO).unwrap(), b"a");
        assert_eq!(memory.get("a/b/key", Duration::ZERO).unwrap(), b"ab");
        let error = b.get("key", Duration::ZERO).expect_err("never set in b");
        assert!(error.to_string().contains("'b/key'"), "{error}");
        assert_eq!((a.add("n", 1).unwrap(), b.add("n", 1).unwrap(), a.add("n", 1).unwrap()), (1, 1, 2));
    }
}
