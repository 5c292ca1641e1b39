//! Panics of the user's code as errors with their cause.
//!
//! Steps, data sets, batchers and metrics are the user's and have no error path, so they panic. On the training
//! thread a panic can be caught, but its place in the source is known to the panic hook alone; on the thread that
//! computes metrics it cannot even be caught, and the training thread only finds a closed channel. So for the length
//! of a launch a hook remembers what panicked where. Hooks are the process's, which makes this one of two places of
//! global state: the hook only holds a weak reference to its launch and passes everything on once that is over.

use std::panic::{AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use crate::error::{Error, ErrorKind, Result, one_line};
use crate::rank::Rank;

/// What panicked during a launch.
#[derive(Clone)]
pub(super) struct Panics(Arc<Seen>);

struct Seen {
    rank: Rank,
    training: ThreadId,
    /// How many guards the training thread is inside of.
    guards: AtomicUsize,
    /// Thread, its name, and the message with its place.
    all: Mutex<Vec<(ThreadId, String, String)>>,
}

impl Panics {
    /// Remembers panics of all threads from now on; the caller's thread is the one that trains.
    pub(super) fn watch(rank: Rank) -> Self {
        let seen = Arc::new(Seen {
            rank,
            training: std::thread::current().id(),
            guards: AtomicUsize::new(0),
            all: Mutex::default(),
        });
        let weak = Arc::downgrade(&seen);
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let returned_as_error = weak.upgrade().is_some_and(|seen| seen.remember(info));
            // Whoever asks for backtraces gets them; otherwise the error says it all.
            if !returned_as_error || std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
                previous(info);
            }
        }));
        Self(seen)
    }

    /// Runs code of the user on the training thread; `what` names it.
    ///
    /// # Errors
    /// Its panic, with rank, place and message.
    pub(super) fn guard<T>(&self, what: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.catch(run).map_err(|payload| match self.first(true) {
            Some((_, text)) => self.error(format!("{what} of {} panicked {text}", self.0.rank)),
            None => Error::panicked(format!("{what} of {}", self.0.rank), payload.as_ref()),
        })
    }

    /// Runs code that talks to threads on which the user's code runs; `what` names them.
    ///
    /// # Errors
    /// The panic of such a thread, or of this one if no other had any.
    pub(super) fn guard_threads<T>(&self, what: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.catch(run).map_err(|payload| match self.first(false) {
            Some((thread, text)) => {
                self.error(format!("{what} of {} (thread `{thread}`) panicked {text}", self.0.rank))
            }
            None => Error::panicked(format!("{what} of {}", self.0.rank), payload.as_ref()),
        })
    }

    /// Runs code that returns a panic of the training thread as an error by itself, which then need not be printed.
    pub(super) fn quietly<T>(&self, run: impl FnOnce() -> T) -> T {
        self.catch(run).unwrap_or_else(|payload| std::panic::resume_unwind(payload))
    }

    fn catch<T>(&self, run: impl FnOnce() -> T) -> std::thread::Result<T> {
        self.0.guards.fetch_add(1, Ordering::SeqCst);
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(run));
        self.0.guards.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Name and text of the first panic of the training thread, or of any other.
    fn first(&self, training: bool) -> Option<(String, String)> {
        let all = self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all.iter().find(|(id, ..)| (*id == self.0.training) == training);
        found.map(|(_, name, text)| (name.clone(), text.clone()))
    }

    fn error(&self, message: String) -> Error {
        Error::new(ErrorKind::Program, message)
    }
}

impl Seen {
    /// Whether the panic will come out of a guard as an error.
    fn remember(&self, info: &PanicHookInfo<'_>) -> bool {
        let thread = std::thread::current();
        let text = one_line(info.payload_as_str().unwrap_or("without a message"));
        let place = info.location().map_or_else(String::new, |place| format!("at {place}: "));
        let name = thread.name().unwrap_or("unnamed").to_owned();
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((thread.id(), name, format!("{place}{text}")));
        thread.id() == self.training && self.guards.load(Ordering::SeqCst) > 0
    }
}
