//! Panics of the user's code as errors with their cause.
//!
//! Steps, data sets, batchers and metrics are the user's and have no error path, so they panic. On the training
//! thread a panic can be caught, but its place in the source is known to the panic hook alone; on the thread that
//! computes metrics it cannot even be caught, and the training thread only finds a closed channel. So for the length
//! of a launch a hook remembers what panicked where. Hooks are the process's, which makes this one of the places of
//! global state: the hook only holds a weak reference to its launch and passes everything on once that is over.

use std::any::Any;
use std::panic::{AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use crate::error::{Error, ErrorKind, Result, one_line, panic_text};
use crate::rank::Rank;

/// What panicked during a launch.
#[derive(Clone)]
pub(super) struct Panics(Arc<Seen>);

struct Seen {
    rank: Rank,
    training: ThreadId,
    /// How many guards the training thread is inside of.
    guards: AtomicUsize,
    /// The training thread has panicked and no guard has caught it yet.
    unwinding: AtomicBool,
    all: Mutex<Vec<Panic>>,
}

/// One panic.
#[derive(Clone)]
struct Panic {
    thread: ThreadId,
    name: String,
    /// ` at file:line:column`, or nothing.
    place: String,
    text: String,
}

impl Panics {
    /// Remembers panics of all threads from now on; the caller's thread is the one that trains.
    pub(super) fn watch(rank: Rank) -> Self {
        let seen = Arc::new(Seen {
            rank,
            training: std::thread::current().id(),
            guards: AtomicUsize::new(0),
            unwinding: AtomicBool::new(false),
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
        self.catch(run).map_err(|payload| self.of_training(what, payload.as_ref()))
    }

    /// Runs code that talks to threads on which the user's code runs; `what` names them.
    ///
    /// # Errors
    /// The panic of such a thread, or of this one if no other had any.
    pub(super) fn guard_threads<T>(&self, what: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.catch(run).map_err(|payload| match self.of_others() {
            Some(Panic { name, place, text, .. }) => {
                self.error(format!("{what} of {} (thread `{name}`) panicked{place}: {text}", self.0.rank))
            }
            None => self.of_training(what, payload.as_ref()),
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
        self.0.unwinding.store(false, Ordering::SeqCst);
        outcome
    }

    /// The panic of the training thread that came with `payload`. There may have been others, which the user's
    /// code has caught, and one that was only passed on was not seen here.
    fn of_training(&self, what: &str, payload: &(dyn Any + Send)) -> Error {
        let message = one_line(panic_text(payload));
        let all = self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all.iter().rfind(|panic| panic.thread == self.0.training && panic.text == message);
        let place = found.map_or("", |panic| panic.place.as_str());
        self.error(format!("{what} of {} panicked{place}: {message}", self.0.rank))
    }

    /// The panic of another thread, if `message` does not hold it already.
    pub(super) fn behind(&self, message: &str) -> Option<String> {
        let Panic { name, place, text, .. } =
            self.of_others().filter(|panic| !message.contains(&panic.text))?;
        Some(format!("thread `{name}` panicked{place}: {text}"))
    }

    /// The first panic of any other thread: later ones follow from it.
    fn of_others(&self) -> Option<Panic> {
        let all = self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|panic| panic.thread != self.0.training).cloned()
    }

    fn error(&self, message: String) -> Error {
        Error::new(ErrorKind::Program, message)
    }
}

impl Seen {
    /// Whether the panic will come out of a guard as an error. One that meets another still on its way, as from a
    /// destructor, ends the process instead: then both are shown.
    fn remember(&self, info: &PanicHookInfo<'_>) -> bool {
        let thread = std::thread::current();
        let panic = Panic {
            thread: thread.id(),
            name: thread.name().unwrap_or("unnamed").to_owned(),
            place: info.location().map_or_else(String::new, |place| format!(" at {place}")),
            text: one_line(info.payload_as_str().unwrap_or("no message")),
        };
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.iter().rfind(|panic| panic.thread == self.training).cloned();
        all.push(panic);
        if thread.id() != self.training || self.guards.load(Ordering::SeqCst) == 0 {
            return false;
        }
        let still_unwinding = self.unwinding.swap(true, Ordering::SeqCst);
        match before.filter(|_| still_unwinding) {
            None => true,
            Some(Panic { place, text, .. }) => {
                eprintln!("before that the training of {} panicked{place}: {text}", self.rank);
                false
            }
        }
    }
}
