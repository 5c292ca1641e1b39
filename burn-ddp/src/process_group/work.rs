//! A collective that was started.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::stats::Counters;
use crate::communicator::Staged;
use crate::error::{Error, ErrorKind, Result};

type Finish<T> = Box<dyn FnOnce(Staged) -> Result<T> + Send>;

/// A collective that was started. It runs whether or not anyone waits; [`Work::wait`] gives its result.
#[must_use = "a collective has no result before `wait`"]
pub struct Work<T>(State<T>);

enum State<T> {
    Ready(Result<T>),
    Pending { reply: Receiver<Result<Staged>>, finish: Finish<T>, counters: Arc<Counters> },
}

impl<T> Work<T> {
    pub(super) fn ready(result: Result<T>) -> Self {
        Self(State::Ready(result))
    }

    pub(super) fn pending(
        reply: Receiver<Result<Staged>>,
        finish: impl FnOnce(Staged) -> Result<T> + Send + 'static,
        counters: Arc<Counters>,
    ) -> Self {
        Self(State::Pending { reply, finish: Box::new(finish), counters })
    }

    pub(super) fn map<U>(self, change: impl FnOnce(T) -> U + Send + 'static) -> Work<U>
    where
        T: 'static,
    {
        Work(match self.0 {
            State::Ready(result) => State::Ready(result.map(change)),
            State::Pending { reply, finish, counters } => {
                State::Pending { reply, finish: Box::new(|staged| finish(staged).map(change)), counters }
            }
        })
    }

    /// Waits for the result. The wait ends by itself: the communication thread answers within the group's
    /// [`timeout`](crate::GroupOptions::timeout) for each operation in front of this one and this one itself.
    ///
    /// # Errors
    /// The first error of the group, which names the rank and the operation.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            State::Ready(result) => result,
            State::Pending { reply, finish, counters } => {
                let answer = counters.waiting(|| reply.recv());
                let gone = |_| Error::new(ErrorKind::Aborted, "the communication thread has ended");
                finish(answer.map_err(gone)??)
            }
        }
    }
}
