//! The handle of a collective that was started.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use super::memory::Staged;
use super::stats::Counters;
use crate::error::{Error, ErrorKind, Result};

type Finish<T> = Box<dyn FnOnce(Staged) -> Result<T> + Send>;

/// A collective that was started. It runs whether or not the caller waits; [`Work::wait`] returns its result. A group
/// that is dropped before its collectives have finished ends with an error on all ranks.
#[must_use = "a collective has no result before `wait`"]
pub struct Work<T>(State<T>);

enum State<T> {
    Ready(Result<T>),
    Pending {
        reply: Receiver<Result<Staged>>,
        finish: Finish<T>,
        counters: Arc<Counters>,
    },
    /// Its reply has come, and it has not been waited for.
    Finished {
        answer: Result<Staged>,
        finish: Finish<T>,
    },
}

impl<T> Work<T> {
    /// Work that is done, with `result`.
    pub fn ready(result: Result<T>) -> Self {
        Self(State::Ready(result))
    }

    pub(super) fn pending(
        reply: Receiver<Result<Staged>>,
        finish: impl FnOnce(Staged) -> Result<T> + Send + 'static,
        counters: Arc<Counters>,
    ) -> Self {
        Self(State::Pending { reply, finish: Box::new(finish), counters })
    }

    /// The same work with its result changed by `change`.
    pub fn map<U>(self, change: impl FnOnce(T) -> U + Send + 'static) -> Work<U>
    where
        T: 'static,
    {
        Work(match self.0 {
            State::Ready(result) => State::Ready(result.map(change)),
            State::Pending { reply, finish, counters } => {
                State::Pending { reply, finish: Box::new(|staged| finish(staged).map(change)), counters }
            }
            State::Finished { answer, finish } => {
                State::Finished { answer, finish: Box::new(|staged| finish(staged).map(change)) }
            }
        })
    }

    /// True if [`Work::wait`] would return at once, with a result or an error; does not wait.
    pub fn is_finished(&mut self) -> bool {
        let answer = match &mut self.0 {
            State::Ready(_) | State::Finished { .. } => return true,
            State::Pending { reply, .. } => match reply.try_recv() {
                Ok(answer) => answer,
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => Err(thread_ended()),
            },
        };
        let taken = std::mem::replace(&mut self.0, State::Ready(Err(thread_ended())));
        if let State::Pending { finish, .. } = taken {
            self.0 = State::Finished { answer, finish };
        }
        true
    }

    /// Waits for the result. The wait ends by itself: the communication thread answers within the group's
    /// [timeout](crate::GroupOptions::timeout) for this operation and for each operation queued before it.
    ///
    /// # Errors
    /// The first error of the group, which names the rank and the operation.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            State::Ready(result) => result,
            State::Pending { reply, finish, counters } => {
                let answer = counters.waiting(|| reply.recv());
                finish(answer.map_err(|_| thread_ended())??)
            }
            State::Finished { answer, finish } => finish(answer?),
        }
    }
}

fn thread_ended() -> Error {
    Error::new(ErrorKind::Aborted, "the communication thread has ended")
}
