//! Whose collectives may leave while a backward pass runs.
//!
//! How many buckets leave in a backward pass is a matter of timing, and not the same on all ranks. They match because the
//! reducer that has begun sends the rest before anybody else sends anything. So one reducer at a time has the turn, and
//! from its first bucket on everybody else's collectives are refused: they would meet buckets of other ranks, and where
//! sizes agree nobody would notice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::communicator::Operation;
use crate::error::{Error, ErrorKind, Result};

/// The turn of one reducer, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Whether everybody else has to wait.
    begun: Arc<AtomicBool>,
}

impl Turn {
    /// Runs `send`, which sends what the turn is for; from then on everybody else's collectives are refused.
    pub(super) fn send<T>(&self, send: impl FnOnce() -> T) -> T {
        self.begun.store(false, Ordering::Relaxed);
        let sent = send();
        self.begun.store(true, Ordering::Relaxed);
        sent
    }
}

/// Whose turn it is, if it is anybody's.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Weak<AtomicBool>>);

impl Turns {
    /// The turn, unless another has it.
    pub(super) fn take(&self) -> Option<Turn> {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if current.strong_count() > 0 {
            return None;
        }
        let begun = Arc::default();
        *current = Arc::downgrade(&begun);
        Some(Turn { begun })
    }

    /// Refuses `operation` while buckets of a turn have left and others have not.
    pub(super) fn check(&self, operation: Operation) -> Result<()> {
        let current = self.0.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        if !current.is_some_and(|begun| begun.load(Ordering::Relaxed)) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{} was called after gradient buckets of a replica had left in its backward pass and before its \
                 `Replica::reduce`: reduce the replica whose backward pass came first before anything else, or turn \
                 overlap off by `ReplicaOptions::with_overlap(false)`",
                operation.kind()
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_one_reducers_and_refuses_all_others_once_it_has_begun() {
        let turns = Turns::default();
        let turn = turns.take().expect("nobody's");
        assert!(turns.take().is_none());
        turns.check(Operation::Barrier).expect("nothing has left");
        for _ in 0..2 {
            turn.send(|| turns.check(Operation::Barrier)).expect("its own");
            let refused = turns.check(Operation::Barrier).expect_err("buckets have left").to_string();
            assert!(
                refused.contains("barrier was called") && refused.contains("with_overlap(false)"),
                "{refused}"
            );
        }
        drop(turn);
        turns.check(Operation::Barrier).expect("the turn is over");
        assert!(turns.take().is_some());
    }
}
