//! Counts of what a group did, for tests ("one reduction per optimizer step") and for users who tune.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::transport::OpKind;
use crate::transport::shm::CallerBusy;

/// What a group did so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Collectives by kind; kinds that were never called are absent. Gradient buckets count as [`OpKind::AllReduce`].
    pub by_kind: BTreeMap<OpKind, OpStats>,
    /// Reductions of gradients among them that were called while a backward pass ran (feature `overlap`).
    pub in_backward: u64,
    /// Time that callers spent in [`Work::wait`](super::Work::wait).
    pub waited: Duration,
}

/// Collectives of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// How many were called.
    pub calls: u64,
    /// Bytes this rank gave to them.
    pub bytes: u64,
}

impl GroupStats {
    /// How many collectives of `kind` were called.
    pub fn calls(&self, kind: OpKind) -> u64 {
        self.by_kind.get(&kind).map_or(0, |stats| stats.calls)
    }

    /// How many collectives were called.
    pub fn total_calls(&self) -> u64 {
        self.by_kind.values().map(|stats| stats.calls).sum()
    }
}

/// The shared counters behind [`GroupStats`].
#[derive(Debug)]
pub(super) struct Counters {
    stats: Mutex<GroupStats>,
    /// Of a group that has a communication thread, which wants to know whether it has a core to itself.
    caller: Option<CallerBusy>,
}

impl Counters {
    pub(super) fn new(caller: Option<CallerBusy>) -> Self {
        if let Some(caller) = &caller {
            caller.set(true);
        }
        Self { stats: Mutex::default(), caller }
    }

    /// Runs `wait`, in which the caller waits for the communication thread and does nothing else.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let busy = |busy| self.caller.iter().for_each(|caller| caller.set(busy));
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

    pub(super) fn count(&self, kind: OpKind, bytes: usize) {
        let kind = if kind == OpKind::ReduceGradients { OpKind::AllReduce } else { kind };
        let mut stats = self.lock();
        let entry = stats.by_kind.entry(kind).or_default();
        entry.calls += 1;
        entry.bytes += bytes as u64;
    }

    pub(super) fn in_backward(&self) {
        self.lock().in_backward += 1;
    }

    pub(super) fn read(&self) -> GroupStats {
        self.lock().clone()
    }
}
