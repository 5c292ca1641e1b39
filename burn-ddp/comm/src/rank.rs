//! Position of a process in its group.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Position of a process in its group, from 0. A newtype because Burn's tensors have a `rank()` too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub usize);

impl Rank {
    /// True if this is rank 0, the one that logs and saves.
    pub fn is_root(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}
