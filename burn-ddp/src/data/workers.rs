//! Batches that threads make in advance, in the order of their steps.
//!
//! ```text
//! worker 0:  batches 0, n, 2n, ..      --channel 0--.
//! worker 1:  batches 1, n + 1, ..      --channel 1--+-->  next(): batch s from channel s % n
//! ```
//!
//! The order does not depend on the speed of the threads. An iterator cannot return an error, so a panic in the user's
//! data set or batcher travels through the channel as a [`Failure`], and `next()` panics with its cause.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use burn_ddp_comm::error::panic_text;

/// Capacity of a worker's channel, in batches.
const CAPACITY: usize = 2;

/// Function that makes the batch of a step.
pub(super) type MakeBatch<O> = dyn Fn(usize) -> Result<O, Failure> + Send + Sync;

/// Error of a batch that could not be made.
pub(super) struct Failure {
    text: String,
    /// True if the panic hook has printed it already.
    shown: bool,
}

impl Failure {
    pub(super) fn new(text: String) -> Self {
        Self { text, shown: false }
    }

    fn from_panic(place: &str, payload: &(dyn Any + Send)) -> Self {
        Self { text: format!("{} (in {place})", panic_text(payload)), shown: true }
    }

    /// Panics on the calling thread, through the hook unless it has printed the panic already.
    fn raise(self) -> ! {
        if self.shown { resume_unwind(Box::new(self.text)) } else { panic_any(self.text) }
    }
}

/// Runs the user's `code` and turns its panic into a failure that names the `place`.
pub(super) fn guard<T>(place: impl FnOnce() -> String, code: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(code)).map_err(|payload| Failure::from_panic(&place(), &*payload))
}

/// Batches of consecutive steps.
pub(super) struct Batches<O> {
    make: Arc<MakeBatch<O>>,
    first: usize,
    steps: Range<usize>,
    /// Without workers, `next` makes the batch itself.
    workers: Vec<Worker<O>>,
}

struct Worker<O> {
    batches: Receiver<Result<O, Failure>>,
    thread: JoinHandle<()>,
}

impl<O: Send + 'static> Batches<O> {
    pub(super) fn new(make: Arc<MakeBatch<O>>, steps: Range<usize>, workers: usize) -> Self {
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
        let (sender, batches) = sync_channel(CAPACITY);
        let (make, steps) = (self.make.clone(), self.steps.clone().skip(index).step_by(count));
        let work = move || make_batches(steps, &*make, &sender);
        let thread = thread::Builder::new().name(format!("data-{index}")).spawn(work)?;
        Ok(Worker { batches, thread })
    }
}

fn make_batches<O>(
    steps: impl Iterator<Item = usize>,
    make: &MakeBatch<O>,
    sender: &SyncSender<Result<O, Failure>>,
) {
    for step in steps {
        let batch = make(step);
        let failed = batch.is_err();
        // The receiver is gone if the iterator was dropped before its end.
        if sender.send(batch).is_err() || failed {
            return;
        }
    }
}

impl<O> Batches<O> {
    /// Returns the next step and its batch.
    ///
    /// # Panics
    /// If the batch could not be made, with the cause; no batches follow.
    pub(super) fn next(&mut self) -> Option<(usize, O)> {
        let step = self.steps.next()?;
        let made = match self.workers.len() {
            0 => (self.make)(step),
            count => self.workers[(step - self.first) % count].batches.recv().unwrap_or_else(|_| {
                Err(Failure::new(format!("the thread that makes batch {step} has ended")))
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

    /// Ends the workers: those that wait for capacity see the closed channel, the others finish their batch first.
    fn stop(&mut self) {
        let threads: Vec<_> = self.workers.drain(..).map(|worker| worker.thread).collect();
        for thread in threads {
            // Panics of the user's code were caught and sent, so the result carries no information.
            let _ = thread.join();
        }
    }
}

impl<O> Drop for Batches<O> {
    fn drop(&mut self) {
        self.stop();
    }
}
