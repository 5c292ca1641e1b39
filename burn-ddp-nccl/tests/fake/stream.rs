//! A stream: a thread that runs jobs in order.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use burn_ddp::{Error, ErrorKind, Result};
use burn_ddp_nccl::Stream;
use burn_ddp_nccl::library::RawStream;

use super::{lock, note};

type Job = Box<dyn FnOnce() + Send>;

static STREAMS: Mutex<BTreeMap<usize, Sender<Job>>> = Mutex::new(BTreeMap::new());

/// Stands for a CUDA stream and its event.
pub struct FakeStream {
    number: usize,
    /// Number of the event recorded last.
    recorded: u64,
    reached: Arc<AtomicU64>,
}

impl FakeStream {
    /// A stream with nothing on it.
    pub fn new() -> Self {
        let (jobs, received) = channel::<Job>();
        // The thread ends with the stream. A job that hangs belongs to a communicator, whose abort ends it.
        std::thread::spawn(move || received.into_iter().for_each(|job| job()));
        let mut streams = lock(&STREAMS);
        let number = streams.last_key_value().map_or(1, |(last, _)| last + 1);
        streams.insert(number, jobs);
        Self { number, recorded: 0, reached: Arc::default() }
    }
}

/// Puts `job` on the stream of this number.
pub(super) fn enqueue(number: usize, job: Job) {
    let streams = lock(&STREAMS);
    streams.get(&number).expect("a stream that lives").send(job).expect("its thread lives as long");
}

impl Stream for FakeStream {
    fn raw(&self) -> RawStream {
        ptr::without_provenance_mut(self.number)
    }

    fn record(&mut self) -> Result<()> {
        note("record");
        self.recorded += 1;
        let (event, reached) = (self.recorded, self.reached.clone());
        enqueue(self.number, Box::new(move || reached.store(event, Ordering::SeqCst)));
        Ok(())
    }

    fn is_reached(&mut self) -> Result<bool> {
        match self.recorded {
            0 => Err(Error::new(ErrorKind::Device, "an event was polled that was never recorded")),
            event => Ok(self.reached.load(Ordering::SeqCst) == event),
        }
    }
}

impl Drop for FakeStream {
    fn drop(&mut self) {
        lock(&STREAMS).remove(&self.number);
    }
}
