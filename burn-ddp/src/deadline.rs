//! The moment until which a wait may last.
//!
//! A moment rather than a duration, so that an operation of many waits has one limit and not a limit each.

use std::time::{Duration, Instant};

/// A point in time that ends a wait. Clone it freely; it does not move.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// The moment `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    /// Time left, zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    /// Whether the moment has passed.
    pub fn passed(&self) -> bool {
        self.remaining().is_zero()
    }

    /// The whole duration the wait was given, for messages.
    pub fn limit(&self) -> Duration {
        self.limit
    }
}
