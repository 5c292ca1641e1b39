//! A small shared dictionary through which ranks find each other.
//!
//! It is the only thing ranks share before they are connected, so it can do little: set, get with a wait, and
//! an atomic counter. Everything that start-up needs (addresses, the decision that a rank is
//! taken twice) is said in these three words, which is why a group can be built over memory in tests, over
//! TCP in production, and over a prefix of either for a group inside a group.

use std::time::Duration;

use crate::deadline::seconds;
use crate::error::{Error, ErrorKind, Result};

mod claim;
mod memory;
mod prefix;
mod tcp;

pub use claim::Claim;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use tcp::TcpStore;

/// Bytes by key, shared by all ranks of a run.
pub trait Store: Send + Sync {
    /// Sets `key` to `value`, replacing what was there.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`, waiting up to `timeout` until somebody sets it. A zero timeout only looks.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the key when nobody did.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the counter `key`, which starts at 0, and returns the new value. Counters and values
    /// are separate: a counter cannot be read by [`Store::get`].
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// What the store knows of processes that are not there: who was turned away and why, who has gone. For
    /// the message of a wait that was in vain; stores that know nothing say nothing.
    fn remarks(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The error of every store for a key that nobody set in time.
fn not_set(key: &str, timeout: Duration) -> Error {
    Error::new(ErrorKind::Timeout, format!("nobody set the store key '{key}' within {} s", seconds(timeout)))
}
