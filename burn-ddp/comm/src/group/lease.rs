//! The lease that lets one reducer send gradient buckets while a backward pass runs.
//!
//! The number of buckets that leave during a backward pass depends on timing and differs between ranks. Ranks still
//! match because the reducer that has begun sends its remaining buckets before anything else is sent. So one reducer at
//! a time holds the lease, and from its first gradient on every other collective of the group is refused, because it
//! would meet buckets on other ranks. The refusal begins with the first gradient and not with the first bucket, so that
//! a program that is refused is refused in every run.
//!
//! ```text
//! free --acquire--> leased --drop--> free
//!                     | while_sending: the holder's own collectives pass
//!
//! any state --mark_broken(error)--> broken: every later collective returns the error
//! ```
//!
//! The lease assumes that one thread at a time calls the collectives of a group, as a training loop does; nothing
//! enforces that. Calls from two threads are sound, and all of them are queued, but the refusal is then not complete:
//!
//! - A collective that another thread submits during [`BackwardLease::while_sending`] passes, as if the holder had
//!   submitted it.
//! - A collective that was checked just before [`LeaseState::acquire`] may be queued behind the first bucket.
//!
//! A collective that passes in this way and meets a gradient bucket on another rank is still an error there, because
//! frames carry the operation ([`Operation::ReduceGradients`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{Error, ErrorKind, Result};
use crate::operation::Operation;

/// The exclusive right to send gradient buckets during a backward pass. Dropping it gives it back.
#[derive(Debug)]
pub struct BackwardLease {
    /// Set while the holder sends. What is submitted meanwhile counts as its own.
    sending: Arc<AtomicBool>,
}

impl BackwardLease {
    /// Runs `send`, in which the holder submits its own collectives.
    pub fn while_sending<T>(&self, send: impl FnOnce() -> T) -> T {
        self.sending.store(true, Ordering::Relaxed);
        let sent = send();
        self.sending.store(false, Ordering::Relaxed);
        sent
    }
}

/// The lease of one group: its holder, and the error that broke the group.
#[derive(Debug, Default)]
pub(super) struct LeaseState {
    /// Flag of the [`BackwardLease`] that exists; dangling while the lease is free.
    holder: Mutex<Weak<AtomicBool>>,
    /// Error of a replica whose remaining buckets will not be sent.
    broken: Mutex<Option<Error>>,
}

impl LeaseState {
    /// Returns the lease if it is free.
    pub(super) fn acquire(&self) -> Option<BackwardLease> {
        let mut holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner);
        if holder.strong_count() > 0 {
            return None;
        }
        let sending = Arc::default();
        *holder = Arc::downgrade(&sending);
        Some(BackwardLease { sending })
    }

    /// Refuses all later collectives because of `error`. The first error is kept.
    pub(super) fn mark_broken(&self, error: Error) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Returns the error given to [`mark_broken`](Self::mark_broken).
    pub(super) fn broken(&self) -> Option<Error> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Refuses `operation` if the group is broken, or while the lease is held by a reducer that is not sending.
    pub(super) fn check(&self, operation: Operation) -> Result<()> {
        if let Some(error) = self.broken() {
            return Err(error);
        }
        let holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        if holder.is_none_or(|sending| sending.load(Ordering::Relaxed)) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{operation} was called after gradients of a replica had been taken in its backward pass and before \
                 its `Replica::reduce`: reduce the replica whose backward pass came first before anything else, or \
                 turn overlap off by `ReplicaOptions::with_overlap(false)`"
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reducer_holds_the_lease_and_all_others_are_refused() {
        let state = LeaseState::default();
        state.check(Operation::Barrier).expect("free");
        let lease = state.acquire().expect("free");
        assert!(state.acquire().is_none());
        for _ in 0..2 {
            let refused = state.check(Operation::Barrier).expect_err("held by another").to_string();
            assert!(
                refused.contains("barrier was called") && refused.contains("with_overlap(false)"),
                "{refused}"
            );
            lease.while_sending(|| state.check(Operation::Barrier)).expect("its own");
        }
        drop(lease);
        state.check(Operation::Barrier).expect("free again");
        let lease = state.acquire().expect("free");
        state.mark_broken(Error::config("the rest does not come"));
        state.mark_broken(Error::config("a later cause"));
        let refused =
            lease.while_sending(|| state.check(Operation::Barrier)).expect_err("broken").to_string();
        assert!(refused.contains("the rest does not come"), "{refused}");
    }
}
