//! The budget of a waiting rank: it spins before it sleeps, and not for long.
//!
//! Sleeping and being woken costs some ten microseconds, more than most waits last. Spinning takes a core, and if the
//! rank that is waited for needs that core, every microsecond of spinning is added to the wait: with pure spinning four
//! ranks on two cores took forty times as long. So the budget depends on whether every thread that may run has a core:
//! one thread a rank, and a second one a rank whose caller computes while its communication thread waits.
//!
//! ```text
//! spin, a pause between two looks ─▶ yield the core between two looks ─▶ sleep up to MAX_SLEEP, look, sleep ...
//! ```

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::yield_now;
use std::time::Duration;

/// Longest sleep before a waiting rank looks whether the group still stands.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(20);

/// Pauses of a waiting rank when every thread has a core: about 50 µs.
const SPINS: usize = 2000;
/// Pauses otherwise: only a rank that is about to publish is waited for.
const FEW_SPINS: usize = 50;
/// Number of times that a waiting rank yields its core after that.
const YIELDS: usize = 50;

/// Set while the thread that calls a group's collectives computes and its communication thread runs beside it. Ranks
/// that wait in shared memory then spin less, because the two threads need two cores. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct ComputeHint(Arc<AtomicBool>);

impl ComputeHint {
    /// Says whether the caller's thread computes from now on.
    pub fn set(&self, computes: bool) {
        self.0.store(computes, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The budget of looks for the ranks of one host.
pub(super) struct SpinPolicy {
    /// Cores on which at least one of the ranks may run.
    cores: usize,
    ranks: usize,
    hint: ComputeHint,
}

impl SpinPolicy {
    pub(super) fn new(cores: usize, ranks: usize, hint: ComputeHint) -> Self {
        Self { cores, ranks, hint }
    }

    /// Polls `done` within the budget; returns its last answer.
    pub(super) fn poll(&self, done: impl Fn() -> bool) -> bool {
        if done() {
            return true;
        }
        let threads = if self.hint.get() { 2 * self.ranks } else { self.ranks };
        let spins = if threads <= self.cores { SPINS } else { FEW_SPINS };
        for _ in 0..spins {
            spin_loop();
            if done() {
                return true;
            }
        }
        for _ in 0..YIELDS {
            yield_now();
            if done() {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn polls(cores: usize, ranks: usize, computes: bool) -> usize {
        let hint = ComputeHint::default();
        hint.set(computes);
        let polls = Cell::new(0);
        let never = || {
            polls.set(polls.get() + 1);
            false
        };
        assert!(!SpinPolicy::new(cores, ranks, hint).poll(never));
        polls.get()
    }

    #[test]
    fn a_rank_without_a_core_of_its_own_gives_up_sooner() {
        assert_eq!(polls(2, 2, false), 1 + SPINS + YIELDS);
        assert_eq!(polls(2, 2, true), 1 + FEW_SPINS + YIELDS);
        assert_eq!(polls(2, 4, false), 1 + FEW_SPINS + YIELDS);
        assert_eq!(polls(8, 4, true), 1 + SPINS + YIELDS);
    }
}
