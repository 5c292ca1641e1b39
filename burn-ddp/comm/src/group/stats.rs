//! Counts of a group's collectives, for tests ("one reduction per optimizer step") and for users who tune.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::operation::Operation;
use crate::shm::ComputeHint;

/// Collectives of a group so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Counts by [name](Operation::name); operations that were never called are absent. Gradient buckets count as
    /// `all_reduce`.
    pub by_name: BTreeMap<&'static str, OpStats>,
    /// Number of gradient buckets among them that were sent while a backward pass ran.
    pub in_backward: u64,
    /// Time that callers spent in [`Work::wait`](super::Work::wait).
    pub waited: Duration,
}

/// Collectives of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// Number of calls.
    pub calls: u64,
    /// Bytes that this rank handed over; 0 for tensors in a world of one.
    pub bytes: u64,
}

impl GroupStats {
    /// Number of calls of the operation `name`, such as `"all_reduce"`.
    pub fn calls(&self, name: &str) -> u64 {
        self.by_name.get(name).map_or(0, |stats| stats.calls)
    }

    /// Number of calls of all operations.
    pub fn total_calls(&self) -> u64 {
        self.by_name.values().map(|stats| stats.calls).sum()
    }
}

/// The counters behind [`GroupStats`], shared by a group and its pending work.
#[derive(Debug)]
pub(super) struct Counters {
    stats: Mutex<GroupStats>,
    /// The flag that [`Counters::waiting`] clears; `None` in a group without a communication thread.
    compute: Option<ComputeHint>,
}

impl Counters {
    pub(super) fn new(compute: Option<ComputeHint>) -> Self {
        if let Some(compute) = &compute {
            compute.set(true);
        }
        Self { stats: Mutex::default(), compute }
    }

    /// Runs `wait`, in which the caller only waits for the communication thread, and adds its duration to
    /// [`GroupStats::waited`]. Meanwhile the [`ComputeHint`] is false.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let busy = |busy| self.compute.iter().for_each(|compute| compute.set(busy));
        busy(false);
        let value = wait();
        busy(true);
        self.lock().waited += start.elapsed();
        value
    }

    // Counters are only added to: a panic leaves none half-written.
    fn lock(&self) -> MutexGuard<'_, GroupStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self, operation: Operation, bytes: usize) {
        let mut stats = self.lock();
        let entry = stats.by_name.entry(operation.name()).or_default();
        entry.calls += 1;
        entry.bytes += bytes as u64;
    }

    pub(super) fn count_in_backward(&self) {
        self.lock().in_backward += 1;
    }

    pub(super) fn read(&self) -> GroupStats {
        self.lock().clone()
    }
}
