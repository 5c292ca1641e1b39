//! A value that threads share, and the wait for its change.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::deadline::Deadline;

/// A value behind a lock, with a way to wait until it has changed.
///
/// Every update is one assignment or insertion, so a thread that panics under the lock leaves a whole value behind, and
/// the others go on with it.
#[derive(Default)]
pub(crate) struct Watched<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Watched<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Locks the value. Changes made through this guard wake no thread.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value and wakes all threads that wait for a change.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `ready` finds what it looks for in the value; `None` when it has not by `deadline`.
    pub(crate) fn wait_for<R>(
        &self,
        deadline: Deadline,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut value = self.lock();
        loop {
            if let Some(found) = ready(&mut value) {
                return Some(found);
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return None;
            }
            value = self.changed.wait_timeout(value, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
