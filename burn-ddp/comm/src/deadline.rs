//! The latest end of a wait.
//!
//! A deadline is a moment and not a duration, so that all waits of one operation share one limit.

use std::time::{Duration, Instant};

/// The moment at which a wait ends.
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

    /// True if the moment has passed.
    pub fn passed(&self) -> bool {
        self.remaining().is_zero()
    }

    /// The whole duration of the wait, for messages.
    pub fn limit(&self) -> Duration {
        self.limit
    }
}

/// `duration` in seconds for messages, rounded to milliseconds.
pub(crate) fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_round() {
        let text = |nanos| format!("{} s", seconds(Duration::from_nanos(nanos)));
        assert_eq!(text(999_999_930), "1 s");
        assert_eq!(text(4_999_979_940), "5 s");
        assert_eq!(text(50_000_000), "0.05 s");
        assert_eq!(text(300_000_000_000), "300 s");
    }
}
