//! Whose collectives may leave while a backward pass runs.
//!
//! How many buckets leave in a backward pass is a matter of timing, and not the same on all ranks. They match because the
//! reducer that has begun sends the rest before anybody else sends anything. So one reducer at a time has the turn, and
//! from its first gradient on everybody else's collectives are refused: they would meet buckets of other ranks. From the
//! first gradient and not the first bucket, because a program that is refused should be so every time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::communicator::Operation;
use crate::error::{Error, ErrorKind, Result};

/// The turn of one reducer, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Whether it is used right now: what is sent meanwhile is its own.
    sending: Arc<AtomicBool>,
}

impl Turn {
    /// Runs `send`, which sends what the turn is for.
    pub(super) fn send<T>(&self, send: impl FnOnce() -> T) -> T {
        self.sending.store(true, Ordering::Relaxed);
        let sent = send();
        self.sending.store(false, Ordering::Relaxed);
        sent
    }
}

/// Whose turn it is, if it is anybody's.
#[derive(Debug, Default)]
pub(super) struct Turns {
    current: Mutex<Weak<AtomicBool>>,
    /// Why nobody can have one any more: buckets of one have left, and the rest will not.
    broken: Mutex<Option<Error>>,
}

impl Turns {
    /// The turn, unless another has it.
    pub(super) fn take(&self) -> Option<Turn> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.strong_count() > 0 {
            return None;
        }
        let sending = Arc::default();
        *current = Arc::downgrade(&sending);
        Some(Turn { sending })
    }

    /// Nothing can be sent any more, because of `error`.
    pub(super) fn end(&self, error: Error) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// What [`end`](Self::end) was called with.
    pub(super) fn broken(&self) -> Option<Error> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Refuses `operation` while somebody has the turn and does not send.
    pub(super) fn check(&self, operation: Operation) -> Result<()> {
        if let Some(error) = self.broken() {
            return Err(error);
        }
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        if current.is_none_or(|sending| sending.load(Ordering::Relaxed)) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{} was called after gradients of a replica had been taken in its backward pass and before its \
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
    fn a_turn_is_one_reducers_and_refuses_all_others() {
        let turns = Turns::default();
        turns.check(Operation::Barrier).expect("nobody's turn");
        let turn = turns.take().expect("nobody's");
        assert!(turns.take().is_none());
        for _ in 0..2 {
            let refused = turns.check(Operation::Barrier).expect_err("another's turn").to_string();
            assert!(
                refused.contains("barrier was called") && refused.contains("with_overlap(false)"),
                "{refused}"
            );
            turn.send(|| turns.check(Operation::Barrier)).expect("its own");
        }
        drop(turn);
        turns.check(Operation::Barrier).expect("the turn is over");
        let turn = turns.take().expect("nobody's");
        turns.end(Error::config("the rest does not come"));
        turns.end(Error::config("a later cause"));
        let refused = turn.send(|| turns.check(Operation::Barrier)).expect_err("broken").to_string();
        assert!(refused.contains("the rest does not come"), "{refused}");
    }
}
