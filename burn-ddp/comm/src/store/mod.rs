//! A small shared dictionary through which ranks find each other.
//!
//! The store is the only thing that ranks share before they are connected. It can set a value, wait for a value, and
//! add to an atomic counter. Start-up needs no more, so a group can be built over memory in tests, over TCP in
//! production, and over a prefix of either for a group within a group.
//!
//! A [`TcpStore`] is served by rank 0 for one attempt of one run; [`MemoryStore`] serves ranks that are threads;
//! [`PrefixStore`] gives each group, and each step of its start-up, keys of its own.

use std::time::Duration;

use crate::deadline::seconds;
use crate::error::{Error, ErrorKind, Result};

mod claim;
mod memory;
mod prefix;
mod tcp;

pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use tcp::TcpStore;

/// Bytes by key, shared by all ranks of a run.
pub trait Store: Send + Sync {
    /// Sets `key` to `value`, replacing an earlier value.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when key or value are over the store's limits, and the errors of a store that has ended.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`; waits up to `timeout` until a process sets it. A zero timeout does not wait.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the key when no process set it, and the errors of a store that has ended.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the counter `key`, which starts at 0, and returns the new value. Counters and values are
    /// separate: [`Store::get`] cannot read a counter.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when the key is over the store's limit, and the errors of a store that has ended.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Facts about absent processes, for the message of a wait that timed out: those that were refused, with the
    /// reason, and those that have left. Empty for stores that do not know.
    fn remarks(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The error of every store for a key that was not set in time.
fn not_set(key: &str, timeout: Duration) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!("no process set the store key '{key}' within {} s", seconds(timeout)),
    )
}
