//! One member's counter of published steps: how the other members learn that it has published, and sleep until then.
//!
//! A rank that waits spins for a while (`spin.rs`), because the other side is often a microsecond away, and then sleeps
//! in the kernel. The danger of that mixture is the lost wake-up: a rank decides to sleep while the counter moves. Both
//! sides therefore write before they read, with a full fence in between, so at least one sees the other:
//!
//! ```text
//! sleeper:    sleepers += 1 ; fence ; read published ─▶ reached? return : futex wait (compares `published` again)
//! publisher:  published = s ; fence ; read sleepers  ─▶ none?    return : futex wake
//! ```
//!
//! The tests at the end of this file let `loom` try the interleavings:
//! `RUSTFLAGS="--cfg loom" cargo test -p burn-ddp-comm --release --lib step_counter`.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// One member's counter, alone on its cache lines (processors fetch them in pairs): its owner writes it, the others
/// wait for it. Zeroed memory is a new counter.
#[repr(C, align(128))]
pub(super) struct StepCounter {
    /// Number of steps that the owner has published; wraps around.
    published: AtomicU32,
    /// Number of ranks that sleep or are about to.
    sleepers: AtomicU32,
    /// The kernel's wait queue.
    #[cfg(loom)]
    queue: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

/// True if `step` is among the `published` steps. Ranks are never more than a few steps apart.
fn reached(published: u32, step: u32) -> bool {
    published.wrapping_sub(step) as i32 >= 0
}

impl StepCounter {
    /// True if `step` has been published. If so, all that its owner wrote before is visible.
    pub(super) fn has_reached(&self, step: u32) -> bool {
        reached(self.published.load(Ordering::Acquire), step)
    }

    /// Publishes `step` and all that was written before, and wakes sleepers.
    pub(super) fn publish(&self, step: u32) {
        self.published.store(step, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    /// Sleeps until `step` is published or `limit` has passed, or wakes up earlier without a reason: the caller has to
    /// ask [`has_reached`](Self::has_reached) again.
    pub(super) fn sleep(&self, step: u32, limit: Duration) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = self.published.load(Ordering::Acquire);
        if !reached(seen, step) {
            self.sleep_at(seen, limit);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    #[cfg(all(target_os = "linux", not(any(loom, miri))))]
    fn sleep_at(&self, seen: u32, limit: Duration) {
        use rustix::thread::futex::{Flags, Timespec, wait};
        let limit = Timespec { tv_sec: limit.as_secs() as _, tv_nsec: limit.subsec_nanos() as _ };
        // No private futex: processes share the counter. The caller asks the counter again, however this ends.
        let _ = wait(&self.published, Flags::empty(), seen, Some(&limit));
    }

    #[cfg(all(target_os = "linux", not(any(loom, miri))))]
    fn wake(&self) {
        use rustix::thread::futex::{Flags, wake};
        // The kernel can only refuse an address that is not mapped.
        let _ = wake(&self.published, Flags::empty(), i32::MAX as u32);
    }

    /// Without futexes a sleep ends without a reason. Miri refuses the type of pointer by which rustix calls the
    /// kernel; other systems than Linux never make a region.
    #[cfg(all(not(loom), any(miri, not(target_os = "linux"))))]
    fn sleep_at(&self, _: u32, _: Duration) {
        std::thread::yield_now();
    }

    #[cfg(all(not(loom), any(miri, not(target_os = "linux"))))]
    fn wake(&self) {}

    /// A model of the kernel: it compares and sleeps under the lock that the waker has to take.
    #[cfg(loom)]
    fn sleep_at(&self, seen: u32, _: Duration) {
        let guard = self.queue.0.lock().unwrap();
        if self.published.load(Ordering::Relaxed) == seen {
            drop(self.queue.1.wait(guard).unwrap());
        }
    }

    #[cfg(loom)]
    fn wake(&self) {
        let _guard = self.queue.0.lock().unwrap();
        self.queue.1.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Instant;

    fn counter() -> StepCounter {
        StepCounter { published: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    #[test]
    fn counters_wrap_around() {
        assert!(reached(0, u32::MAX) && reached(5, 5) && !reached(u32::MAX, 0));
    }

    #[test]
    fn a_sleeper_is_woken_and_a_limit_ends_a_sleep() {
        let counter = counter();
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !counter.has_reached(1) {
                    counter.sleep(1, Duration::from_secs(20));
                }
            });
            while counter.sleepers.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            counter.publish(1);
        });
        assert!(start.elapsed() < Duration::from_secs(10), "woken by the limit only");
        counter.sleep(2, Duration::from_millis(1));
        assert!(!counter.has_reached(2));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    fn counter() -> StepCounter {
        StepCounter {
            published: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            queue: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }

    fn wait(counter: &StepCounter, step: u32) {
        while !counter.has_reached(step) {
            counter.sleep(step, Duration::ZERO);
        }
    }

    /// Two ranks, each with a counter and two slots, in the protocol of a region: write, publish, wait for the other,
    /// read, and write the slot of two steps ago again. Loom finds a sleeper that is never woken (a deadlock) and a
    /// slot that is read while it is written.
    #[test]
    fn no_wake_up_is_lost_and_no_slot_is_torn() {
        struct Two {
            counters: [StepCounter; 2],
            slots: [[UnsafeCell<u32>; 2]; 2],
        }
        fn rank(two: &Two, me: usize) {
            for step in 1..=3u32 {
                let parity = (step % 2) as usize;
                two.slots[me][parity].with_mut(|slot| {
                    #[allow(unsafe_code)]
                    // SAFETY: loom reports a data race here, which is what the test is for.
                    unsafe {
                        *slot = step
                    }
                });
                two.counters[me].publish(step);
                wait(&two.counters[1 - me], step);
                let theirs = two.slots[1 - me][parity].with(|slot| {
                    #[allow(unsafe_code)]
                    // SAFETY: as above.
                    unsafe {
                        *slot
                    }
                });
                assert_eq!(theirs, step);
            }
        }
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let cell = || UnsafeCell::new(0);
            let two = Arc::new(Two {
                counters: [counter(), counter()],
                slots: [[cell(), cell()], [cell(), cell()]],
            });
            let other = two.clone();
            let thread = thread::spawn(move || rank(&other, 1));
            rank(&two, 0);
            thread.join().unwrap();
        });
    }

    /// Two sleepers on one counter, as with three ranks and more.
    #[test]
    fn all_sleepers_are_woken() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let counter = Arc::new(counter());
            let sleepers: Vec<_> = (0..2)
                .map(|_| {
                    let counter = counter.clone();
                    thread::spawn(move || wait(&counter, 1))
                })
                .collect();
            counter.publish(1);
            for sleeper in sleepers {
                sleeper.join().unwrap();
            }
        });
    }
}
