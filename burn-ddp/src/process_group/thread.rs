//! The one thread of a group on which collectives run, in the order in which they were called.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::communicator::{Engine, Operation, Staged};
use crate::error::{Error, ErrorKind, Result};
use crate::transport::Liveness;

struct Job {
    operation: Operation,
    staged: Staged,
    reply: Sender<Result<Staged>>,
}

enum Message {
    Run(Job),
    /// The group has ended, which an idle thread would not notice.
    Ended,
    Leave,
}

pub(super) struct CommunicationThread {
    messages: Sender<Message>,
    unfinished: Arc<AtomicUsize>,
    liveness: Liveness,
    handle: Option<JoinHandle<()>>,
}

impl CommunicationThread {
    /// Starts the thread, which makes its engine by `open` first; returns when it has.
    pub(super) fn spawn(
        open: impl FnOnce() -> Result<Box<dyn Engine>> + Send + 'static,
        liveness: Liveness,
    ) -> Result<Self> {
        let (messages, queue) = channel();
        let (opened, open_result) = channel();
        let unfinished = Arc::new(AtomicUsize::new(0));
        let (counter, life) = (unfinished.clone(), liveness.clone());
        let run = move || {
            let _guard = Guard(&life);
            match open() {
                Ok(engine) => {
                    let _ = opened.send(Ok(()));
                    serve(engine, &queue, &life, &counter);
                }
                Err(error) => drop(opened.send(Err(error))),
            }
        };
        let handle = std::thread::Builder::new()
            .name("burn-ddp-comm".into())
            .spawn(run)
            .map_err(|error| Error::io("cannot start the communication thread", error))?;
        let ended = messages.clone();
        liveness.subscribe(move || drop(ended.send(Message::Ended)));
        let thread = Self { messages, unfinished, liveness, handle: Some(handle) };
        match open_result.recv() {
            Ok(opened) => opened.map(|()| thread),
            Err(_) => Err(Error::new(ErrorKind::Aborted, "the communication thread panicked at its start")),
        }
    }

    /// Queues `operation`; the receiver gets its one result.
    pub(super) fn submit(&self, operation: Operation, staged: Staged) -> Receiver<Result<Staged>> {
        let (reply, result) = channel();
        self.unfinished.fetch_add(1, Ordering::SeqCst);
        // A thread that is gone drops the job and with it `reply`, which the waiter reports.
        let _ = self.messages.send(Message::Run(Job { operation, staged, reply }));
        result
    }
}

/// A panic on the thread is an error of the group, here and on all ranks.
struct Guard<'a>(&'a Liveness);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::new(ErrorKind::Aborted, "the communication thread panicked"));
        }
    }
}

fn serve(
    mut engine: Box<dyn Engine>,
    queue: &Receiver<Message>,
    liveness: &Liveness,
    unfinished: &AtomicUsize,
) {
    for message in queue {
        let Job { operation, staged, reply } = match message {
            Message::Run(job) => job,
            Message::Ended => {
                engine.abandon();
                continue;
            }
            Message::Leave => return,
        };
        let result = match liveness.check() {
            Ok(()) => engine.run(operation, staged).inspect_err(|error| {
                liveness.fail(error.clone());
            }),
            Err(cause) => Err(cause.context(format!("{} after the group failed", operation.kind()))),
        };
        unfinished.fetch_sub(1, Ordering::SeqCst);
        // Nobody waits for work that was dropped.
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
        let _ = self.messages.send(Message::Leave);
        if let Some(handle) = self.handle.take() {
            // A panic of that thread has already shown itself as an error of every waiter.
            let _ = handle.join();
        }
    }
}
