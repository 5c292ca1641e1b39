//! The budget of a waiting rank: it spins before it sleeps, and not for long.
//!
//! Sleeping and being woken costs some ten microseconds, more than most waits last. Spinning takes a core, and if the
//! rank that is waited for needs that core, every microsecond of spinning is added to the wait: with pure spinning four
//! ranks on two cores took forty times as long. So the budget depends on whether every thread that may run has a core.
//! Each rank counts as one thread, or as two while [`ComputeHint`] is set.
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

/// A flag of one rank: true while the thread that calls the group's collectives computes. The communication thread then
/// needs a second core, so a rank that waits in shared memory spins less if the host has fewer than two cores for each
/// of its ranks. The waiting rank reads its own flag and takes the other ranks to be in the same situation.
///
/// A group sets the flag when it is connected and clears it while its caller is in `Work::wait`. Without a group it
/// stays false, because the thread that calls the collectives is the one that waits. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct ComputeHint(Arc<AtomicBool>);

impl ComputeHint {
    /// Sets the flag to `computes`.
    pub fn set(&self, computes: bool) {
        self.0.store(computes, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The budget of a rank that waits for others of its host.
pub(super) struct SpinPolicy {
    /// Number of cores that the ranks of the host may use together; see `RegionLayout::cores`.
    cores: usize,
    /// Number of ranks on the host.
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
