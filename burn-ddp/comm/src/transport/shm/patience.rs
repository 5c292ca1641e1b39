//! How long to look before one sleeps.
//!
//! Sleeping and being woken costs some ten microseconds, more than most waits last. But looking takes a core, and if
//! the rank that is waited for needs that core, every microsecond of looking is added to the wait: with pure spinning
//! four ranks on two cores took forty times as long. So the budget depends on whether all threads that may run find a
//! core: one a rank, and one more a rank whose caller computes while its communication thread waits.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::yield_now;

/// Looks with a pause between, where everybody has a core: about 50 µs.
const PAUSES: usize = 2000;
/// And where not: a rank that is just about to publish is waited for, no other.
const FEW_PAUSES: usize = 50;
/// Looks with the core offered to others between.
const YIELDS: usize = 50;

/// Whether the caller of a group's collectives waits for them and leaves its core to the communication thread.
#[derive(Clone, Debug, Default)]
pub struct CallerBusy(Arc<AtomicBool>);

impl CallerBusy {
    /// Says so.
    pub fn set(&self, busy: bool) {
        self.0.store(busy, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

pub(super) struct Patience {
    /// Cores on which at least one of the ranks may run.
    cores: usize,
    ranks: usize,
    caller: CallerBusy,
}

impl Patience {
    pub(super) fn new(cores: usize, ranks: usize, caller: CallerBusy) -> Self {
        Self { cores, ranks, caller }
    }

    /// Looks whether it is `so`, within the budget, and says whether it was.
    pub(super) fn until(&self, so: impl Fn() -> bool) -> bool {
        if so() {
            return true;
        }
        let threads = if self.caller.get() { 2 * self.ranks } else { self.ranks };
        let pauses = if threads <= self.cores { PAUSES } else { FEW_PAUSES };
        for _ in 0..pauses {
            spin_loop();
            if so() {
                return true;
            }
        }
        for _ in 0..YIELDS {
            yield_now();
            if so() {
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

    fn looks(cores: usize, ranks: usize, busy: bool) -> usize {
        let caller = CallerBusy::default();
        caller.set(busy);
        let looks = Cell::new(0);
        let never = || {
            looks.set(looks.get() + 1);
            false
        };
        assert!(!Patience::new(cores, ranks, caller).until(never));
        looks.get()
    }

    #[test]
    fn who_has_no_core_of_his_own_gives_up_sooner() {
        assert_eq!(looks(2, 2, false), 1 + PAUSES + YIELDS);
        assert_eq!(looks(2, 2, true), 1 + FEW_PAUSES + YIELDS);
        assert_eq!(looks(2, 4, false), 1 + FEW_PAUSES + YIELDS);
        assert_eq!(looks(8, 4, true), 1 + PAUSES + YIELDS);
    }
}
