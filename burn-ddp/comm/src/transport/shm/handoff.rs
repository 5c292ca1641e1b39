//! How one rank learns that another has got so far: a counter, and a bed to sleep in until it moves.
//!
//! A rank that waits first looks at the counter for a while, because the other side is often a microsecond away, and
//! then sleeps in the kernel. The danger of such a mixture is the lost wake-up: a rank decides to sleep while the
//! counter moves. Here the sleeper announces itself before it looks for the last time, and the other side moves the
//! counter before it looks for sleepers, with a full fence between in both, so at least one of them sees the other; and
//! the kernel compares the counter once more as it puts the sleeper to bed. The tests at the foot of this file let `loom`
//! try the interleavings; `checks/Cargo.toml` has the command.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// One rank's counter, alone on its cache lines (processors fetch them in pairs): its owner writes it, all others
/// wait for it. Zeroed memory is a fresh one.
#[repr(C, align(128))]
pub(super) struct Line {
    /// Steps that its owner has published; wraps around.
    published: AtomicU32,
    /// Ranks that sleep, or are about to.
    sleepers: AtomicU32,
    #[cfg(loom)]
    bed: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

/// Whether a counter that stands at `published` has come to `step`. Ranks are never more than a few steps apart.
fn reached(published: u32, step: u32) -> bool {
    published.wrapping_sub(step) as i32 >= 0
}

impl Line {
    /// Whether `step` has been published; what was written before that is visible then.
    pub(super) fn has_reached(&self, step: u32) -> bool {
        reached(self.published.load(Ordering::Acquire), step)
    }

    /// Makes `step` known, with all that was written before.
    pub(super) fn publish(&self, step: u32) {
        self.published.store(step, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    /// Sleeps until `step` is published, a moment at most `limit` away, or for no reason. Whether it is published has to
    /// be asked again.
    pub(super) fn sleep(&self, step: u32, limit: Duration) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = self.published.load(Ordering::Acquire);
        if !reached(seen, step) {
            self.sleep_at(seen, limit);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    #[cfg(not(any(loom, miri)))]
    fn sleep_at(&self, seen: u32, limit: Duration) {
        use rustix::thread::futex::{Flags, Timespec, wait};
        let limit = Timespec { tv_sec: limit.as_secs() as _, tv_nsec: limit.subsec_nanos() as _ };
        // Not private: the counter is shared by processes. However it ends, the counter is asked again.
        let _ = wait(&self.published, Flags::empty(), seen, Some(&limit));
    }

    #[cfg(not(any(loom, miri)))]
    fn wake(&self) {
        use rustix::thread::futex::{Flags, wake};
        // The kernel can only refuse an address that is not mapped.
        let _ = wake(&self.published, Flags::empty(), i32::MAX as u32);
    }

    /// Miri refuses the type of pointer by which rustix calls the kernel. A sleep may end for no reason.
    #[cfg(miri)]
    fn sleep_at(&self, _: u32, _: Duration) {
        std::thread::yield_now();
    }

    #[cfg(miri)]
    fn wake(&self) {}

    /// What the kernel does: it compares and goes to bed under the lock that the waker has to take.
    #[cfg(loom)]
    fn sleep_at(&self, seen: u32, _: Duration) {
        let guard = self.bed.0.lock().unwrap();
        if self.published.load(Ordering::Relaxed) == seen {
            drop(self.bed.1.wait(guard).unwrap());
        }
    }

    #[cfg(loom)]
    fn wake(&self) {
        let _guard = self.bed.0.lock().unwrap();
        self.bed.1.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Instant;

    fn line() -> Line {
        Line { published: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    #[test]
    fn counters_wrap_around() {
        assert!(reached(0, u32::MAX) && reached(5, 5) && !reached(u32::MAX, 0));
    }

    #[test]
    fn a_sleeper_is_woken_and_a_limit_ends_a_sleep() {
        let line = line();
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !line.has_reached(1) {
                    line.sleep(1, Duration::from_secs(20));
                }
            });
            while line.sleepers.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            line.publish(1);
        });
        assert!(start.elapsed() < Duration::from_secs(10), "woken by the limit only");
        line.sleep(2, Duration::from_millis(1));
        assert!(!line.has_reached(2));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    fn line() -> Line {
        Line {
            published: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            bed: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }

    fn wait(line: &Line, step: u32) {
        while !line.has_reached(step) {
            line.sleep(step, Duration::ZERO);
        }
    }

    /// Two ranks, each with a counter and two places, in the protocol of a board: write, publish, wait for the other,
    /// read, and the place of two steps ago is written again. Loom finds a sleeper that nobody wakes (a deadlock) and
    /// a place that is read while it is written.
    #[test]
    fn no_wake_up_is_lost_and_no_place_is_torn() {
        struct Two {
            lines: [Line; 2],
            places: [[UnsafeCell<u32>; 2]; 2],
        }
        fn rank(two: &Two, me: usize) {
            for step in 1..=3u32 {
                let parity = (step % 2) as usize;
                two.places[me][parity].with_mut(|place| {
                    #[allow(unsafe_code)]
                    // SAFETY: what loom is here to find wrong.
                    unsafe {
                        *place = step
                    }
                });
                two.lines[me].publish(step);
                wait(&two.lines[1 - me], step);
                let theirs = two.places[1 - me][parity].with(|place| {
                    #[allow(unsafe_code)]
                    // SAFETY: as above.
                    unsafe {
                        *place
                    }
                });
                assert_eq!(theirs, step);
            }
        }
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let cell = || UnsafeCell::new(0);
            let two = Arc::new(Two { lines: [line(), line()], places: [[cell(), cell()], [cell(), cell()]] });
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
            let line = Arc::new(line());
            let sleepers: Vec<_> = (0..2)
                .map(|_| {
                    let line = line.clone();
                    thread::spawn(move || wait(&line, 1))
                })
                .collect();
            line.publish(1);
            for sleeper in sleepers {
                sleeper.join().unwrap();
            }
        });
    }
}
