//! Batches made ahead of time by threads, in the order in which they are used.
//!
//! Worker j of n makes the batches j, j + n, ... and hands them over through a channel of its own, so that the
//! order is that of the arithmetic and not of who was faster. Iterators have no way to return an error: what goes
//! wrong in the user's data set or batcher is carried to the thread that asks for the batch and ends it there, as
//! a panic with the cause.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use crate::error::panic_text;

/// Batches that a worker makes ahead of the one that is asked for.
const AHEAD: usize = 2;

/// Makes the batch of a step.
pub(super) type Make<O> = dyn Fn(usize) -> Result<O, Failure> + Send + Sync;

/// Why a batch could not be made.
pub(super) struct Failure {
    text: String,
    /// Whether the panic hook has already shown it.
    shown: bool,
}

impl Failure {
    /// What the user's code did that it must not do.
    pub(super) fn broken(text: String) -> Self {
        Self { text, shown: false }
    }

    fn panicked(place: &str, payload: &(dyn Any + Send)) -> Self {
        Self { text: format!("{} (in {place})", panic_text(payload)), shown: true }
    }

    /// Panics on the calling thread; the hook shows it unless it already has.
    fn raise(self) -> ! {
        if self.shown { resume_unwind(Box::new(self.text)) } else { panic_any(self.text) }
    }
}

/// Runs the user's `code`; `place` names it if it panics.
pub(super) fn guarded<T>(place: impl FnOnce() -> String, code: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(code)).map_err(|payload| Failure::panicked(&place(), &*payload))
}

/// The batches of consecutive steps.
pub(super) struct Batches<O> {
    make: Arc<Make<O>>,
    first: usize,
    steps: Range<usize>,
    /// Without any, batches are made when they are asked for.
    workers: Vec<Worker<O>>,
}

struct Worker<O> {
    made: Receiver<Result<O, Failure>>,
    thread: JoinHandle<()>,
}

impl<O: Send + 'static> Batches<O> {
    pub(super) fn new(make: Arc<Make<O>>, steps: Range<usize>, workers: usize) -> Self {
        let mut batches = Self { make, first: steps.start, steps, workers: Vec::new() };
        let count = workers.min(batches.steps.len());
        for index in 0..count {
            match batches.start(index, count) {
                Ok(worker) => batches.workers.push(worker),
                Err(error) => {
                    tracing::warn!(
                        "cannot start thread {index} of {count} for data, going on without: {error}"
                    );
                    batches.stop();
                    break;
                }
            }
        }
        batches
    }

    fn start(&self, index: usize, count: usize) -> std::io::Result<Worker<O>> {
        let (hand_over, made) = sync_channel(AHEAD);
        let (make, steps) = (self.make.clone(), self.steps.clone().skip(index).step_by(count));
        let work = move || run(steps, &*make, &hand_over);
        let thread = thread::Builder::new().name(format!("data-{index}")).spawn(work)?;
        Ok(Worker { made, thread })
    }
}

fn run<O>(steps: impl Iterator<Item = usize>, make: &Make<O>, hand_over: &SyncSender<Result<O, Failure>>) {
    for step in steps {
        let batch = make(step);
        let failed = batch.is_err();
        // Nobody listens any more when the iterator is dropped before its end.
        if hand_over.send(batch).is_err() || failed {
            return;
        }
    }
}

impl<O> Batches<O> {
    /// The next step and its batch.
    ///
    /// # Panics
    /// With the cause when the batch could not be made; there are no further batches then.
    pub(super) fn next(&mut self) -> Option<(usize, O)> {
        let step = self.steps.next()?;
        let made = match self.workers.len() {
            0 => (self.make)(step),
            count => self.workers[(step - self.first) % count].made.recv().unwrap_or_else(|_| {
                Err(Failure::broken(format!("the thread that makes batch {step} is gone")))
            }),
        };
        match made {
            Ok(batch) => Some((step, batch)),
            Err(failure) => {
                self.steps = 0..0;
                failure.raise()
            }
        }
    }

    /// Ends the workers: those that wait for room see that nobody listens, the others finish their batch first.
    fn stop(&mut self) {
        let threads: Vec<_> = self.workers.drain(..).map(|worker| worker.thread).collect();
        for thread in threads {
            // What they panic of is caught and handed over; there is nothing else to learn from them.
            let _ = thread.join();
        }
    }
}

impl<O> Drop for Batches<O> {
    fn drop(&mut self) {
        self.stop();
    }
}
