//! The communication thread of a group.
//!
//! All collectives of a group run on it, one after the other, in the order of the program's calls: equal order is what
//! makes them match on all ranks. The first error ends the group, and every later job is answered with it. The thread
//! ends when the group is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::engine::{Engine, MakeEngine};
use super::memory::Staged;
use crate::error::{Error, ErrorKind, Result};
use crate::operation::Operation;
use crate::transport::Liveness;

struct Job {
    operation: Operation,
    staged: Staged,
    reply: Sender<Result<Staged>>,
}

enum Message {
    Run(Job),
    /// The group has failed; an idle thread would not notice.
    Failed,
    /// The group is dropped.
    Stop,
}

pub(super) struct CommunicationThread {
    messages: Sender<Message>,
    unfinished: Arc<AtomicUsize>,
    liveness: Liveness,
    handle: Option<JoinHandle<()>>,
}

impl CommunicationThread {
    /// Starts the thread and returns once it has made its engine.
    pub(super) fn spawn(make_engine: MakeEngine, liveness: Liveness) -> Result<Self> {
        let (messages, queue) = channel();
        let (made, engine_made) = channel();
        let unfinished = Arc::new(AtomicUsize::new(0));
        let (counter, life) = (unfinished.clone(), liveness.clone());
        let run = move || {
            let _guard = FailOnPanic(&life);
            match make_engine() {
                Ok(engine) => {
                    let _ = made.send(Ok(()));
                    run_jobs(engine, &queue, &life, &counter);
                }
                Err(error) => drop(made.send(Err(error))),
            }
        };
        let handle = std::thread::Builder::new()
            .name("burn-ddp-comm".into())
            .spawn(run)
            .map_err(|error| Error::io("cannot start the communication thread", error))?;
        let failed = messages.clone();
        liveness.subscribe(move || drop(failed.send(Message::Failed)));
        let thread = Self { messages, unfinished, liveness, handle: Some(handle) };
        match engine_made.recv() {
            Ok(made) => made.map(|()| thread),
            Err(_) => Err(Error::new(ErrorKind::Aborted, "the communication thread panicked at its start")),
        }
    }

    /// Queues `operation`; the receiver gets its single result.
    pub(super) fn submit(&self, operation: Operation, staged: Staged) -> Receiver<Result<Staged>> {
        let (reply, result) = channel();
        self.unfinished.fetch_add(1, Ordering::SeqCst);
        // A thread that has ended drops the job and with it `reply`, which the waiter reports.
        let _ = self.messages.send(Message::Run(Job { operation, staged, reply }));
        result
    }
}

/// Ends the group, here and on all ranks, if the thread panics.
struct FailOnPanic<'a>(&'a Liveness);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::new(ErrorKind::Aborted, "the communication thread panicked"));
        }
    }
}

fn run_jobs(
    mut engine: Box<dyn Engine>,
    queue: &Receiver<Message>,
    liveness: &Liveness,
    unfinished: &AtomicUsize,
) {
    for message in queue {
        let Job { operation, staged, reply } = match message {
            Message::Run(job) => job,
            Message::Failed => {
                engine.abandon();
                continue;
            }
            Message::Stop => return,
        };
        let result = match liveness.check() {
            Ok(()) => engine.run(operation, staged).inspect_err(|error| {
                liveness.fail(error.clone());
            }),
            Err(cause) => Err(cause.context(format!("{} after the group failed", operation))),
        };
        unfinished.fetch_sub(1, Ordering::SeqCst);
        // The receiver is gone if the work was dropped.
        let _ = reply.send(result);
    }
}

impl Drop for CommunicationThread {
    fn drop(&mut self) {
        let left = self.unfinished.load(Ordering::SeqCst);
        if left > 0 {
            self.liveness.fail(Error::new(
                ErrorKind::Aborted,
                format!("the group was dropped with {left} unfinished collectives: wait for each `Work`"),
            ));
        }
        let _ = self.messages.send(Message::Stop);
        if let Some(handle) = self.handle.take() {
            // A panic of that thread has already shown itself as an error of every waiter.
            let _ = handle.join();
        }
    }
}
