//! A stream: a thread that does what it is given, in order.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use burn_ddp::{Error, ErrorKind, Result};
use burn_ddp_nccl::Queue;
use burn_ddp_nccl::library::RawStream;

use super::{lock, note};

type Job = Box<dyn FnOnce() + Send>;

static QUEUES: Mutex<BTreeMap<usize, Sender<Job>>> = Mutex::new(BTreeMap::new());

/// What a CUDA stream and its event are to the real communicator.
pub struct FakeQueue {
    number: usize,
    marks: u64,
    reached: Arc<AtomicU64>,
}

impl FakeQueue {
    /// A stream with nothing on it.
    pub fn new() -> Self {
        let (jobs, received) = channel::<Job>();
        // It ends with the queue; a job that hangs is the communicator's, and ends by its abort.
        std::thread::spawn(move || received.into_iter().for_each(|job| job()));
        let mut queues = lock(&QUEUES);
        let number = queues.last_key_value().map_or(1, |(last, _)| last + 1);
        queues.insert(number, jobs);
        Self { number, marks: 0, reached: Arc::default() }
    }
}

/// Puts `job` on the queue of this number.
pub(super) fn enqueue(number: usize, job: Job) {
    let queues = lock(&QUEUES);
    queues.get(&number).expect("a queue that lives").send(job).expect("its thread lives as long");
}

impl Queue for FakeQueue {
    fn raw(&self) -> RawStream {
        ptr::without_provenance_mut(self.number)
    }

    fn mark(&mut self) -> Result<()> {
        note("mark");
        self.marks += 1;
        let (mark, reached) = (self.marks, self.reached.clone());
        enqueue(self.number, Box::new(move || reached.store(mark, Ordering::SeqCst)));
        Ok(())
    }

    fn reached(&mut self) -> Result<bool> {
        match self.marks {
            0 => Err(Error::new(ErrorKind::Device, "a mark that was never set was asked for")),
            mark => Ok(self.reached.load(Ordering::SeqCst) == mark),
        }
    }
}

impl Drop for FakeQueue {
    fn drop(&mut self) {
        lock(&QUEUES).remove(&self.number);
    }
}
