//! Panics of the user's code as errors with their cause.
//!
//! Steps, data sets, batchers and metrics are the user's code and have no error path, so they panic. On the training
//! thread a panic can be caught, but only the panic hook knows its place in the source. On the metrics thread it cannot
//! be caught at all, and the training thread finds a closed channel.
//!
//! ```text
//! any thread panics  -> hook: records thread, place and message
//! training thread    -> guard catches the payload -> error with the recorded place
//! other thread       -> its channel closes -> the training thread panics in a guard -> error of the first other panic
//! ```
//!
//! The process has one panic hook, so this is global state. The hook holds a weak reference to its launch and passes
//! every panic on once the launch is over.

use std::any::Any;
use std::panic::{AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use burn_ddp_comm::error::{one_line, panic_text};
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};

/// Panics during a launch.
#[derive(Clone)]
pub(super) struct Panics(Arc<Record>);

struct Record {
    rank: Rank,
    training: ThreadId,
    /// Number of guards that the training thread is inside of.
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
    /// Records the panics of all threads from now on; the calling thread is the training thread.
    pub(super) fn watch(rank: Rank) -> Self {
        let record = Arc::new(Record {
            rank,
            training: std::thread::current().id(),
            guards: AtomicUsize::new(0),
            unwinding: AtomicBool::new(false),
            all: Mutex::default(),
        });
        let weak = Arc::downgrade(&record);
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let returned_as_error = weak.upgrade().is_some_and(|record| record.add(info));
            // The error holds place and message, so the panic is printed only if backtraces are requested.
            if !returned_as_error || std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
                previous(info);
            }
        }));
        Self(record)
    }

    /// Runs the user's code on the training thread; `what` names it in the error.
    ///
    /// # Errors
    /// A panic of the code, with rank, place and message.
    pub(super) fn guard<T>(&self, what: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.catch(run).map_err(|payload| self.of_training(what, payload.as_ref()))
    }

    /// Runs code that waits for threads of the user's code; `what` names it in the error.
    ///
    /// # Errors
    /// The first panic of another thread, or else the panic of this one.
    pub(super) fn guard_threads<T>(&self, what: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.catch(run).map_err(|payload| match self.of_others() {
            Some(Panic { name, place, text, .. }) => {
                self.error(format!("{what} of {} (thread `{name}`) panicked{place}: {text}", self.0.rank))
            }
            None => self.of_training(what, payload.as_ref()),
        })
    }

    /// Runs code that turns panics into errors itself, so that the hook does not print them.
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

    /// Makes an error of the training thread's panic with `payload`. The record may hold other panics, which the user's
    /// code caught, and lacks one that was resumed without a call of the hook.
    fn of_training(&self, what: &str, payload: &(dyn Any + Send)) -> Error {
        let message = one_line(panic_text(payload));
        let all = self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all.iter().rfind(|panic| panic.thread == self.0.training && panic.text == message);
        let place = found.map_or("", |panic| panic.place.as_str());
        self.error(format!("{what} of {} panicked{place}: {message}", self.0.rank))
    }

    /// Describes the panic of another thread that caused a panic with `message`, unless `message` contains it.
    pub(super) fn cause_of(&self, message: &str) -> Option<String> {
        let Panic { name, place, text, .. } =
            self.of_others().filter(|panic| !message.contains(&panic.text))?;
        Some(format!("thread `{name}` panicked{place}: {text}"))
    }

    /// The first panic of any other thread; later ones follow from it.
    fn of_others(&self) -> Option<Panic> {
        let all = self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|panic| panic.thread != self.0.training).cloned()
    }

    fn error(&self, message: String) -> Error {
        Error::new(ErrorKind::Program, message)
    }
}

impl Record {
    /// Adds a panic, and returns true if a guard will return it as an error. A second panic while the first unwinds
    /// (from a destructor) ends the process instead, and then both are printed.
    fn add(&self, info: &PanicHookInfo<'_>) -> bool {
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
