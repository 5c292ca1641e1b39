//! A wait ends although the device has stalled.
//!
//! A host function that blocks stalls NCCL's stream, and a collective is enqueued behind it. NCCL's abort flag, which
//! ends a collective on a real ring, does not end this stall, so `ncclCommAbort` may wait for it: a second thread ends
//! the stall a second after the wait has given up, and the duration of the abort is printed.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn_ddp::{DType, Error, ErrorKind, ReduceOp, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_nccl::library::RawStream;
use burn_ddp_nccl::{NcclComm, Stream};
use cudarc::driver::result::stream::launch_host_function;

use crate::Machine;
use crate::memory::{self, LIMIT, Memory, failed, span};
use crate::report::Report;

const COUNT: usize = 1000;
/// Time after which this process ends itself.
const WATCHDOG: Duration = Duration::from_secs(20);

pub(crate) fn check(machine: &Machine, report: &mut Report) -> Result<()> {
    std::thread::spawn(|| {
        std::thread::sleep(WATCHDOG);
        println!("FAIL abort: not over after {WATCHDOG:?}, the process ends itself");
        std::process::exit(1);
    });
    let timeout = given_up(machine, Duration::from_secs(1), None)?;
    timeout.tell("timeout of 1 s", ErrorKind::Timeout, Duration::from_secs(3), report);
    let cancel = Duration::from_millis(200);
    let aborted = given_up(machine, LIMIT, Some(cancel))?;
    aborted.tell("abort by another thread", ErrorKind::Aborted, cancel + Duration::from_secs(2), report);
    let mut comm = machine.alone(machine.stream()?, Liveness::new(1))?;
    let again = all_reduce(&mut comm).map(|()| format!("{COUNT} elements"));
    report.line("a new communicator afterwards", again);
    comm.finish()
}

/// The end of a wait.
struct End {
    error: Option<Error>,
    /// Time from its start until it gave up and the abort began.
    waited: Duration,
    /// Time of the abort.
    abort: Duration,
    /// True if the second thread had to end the stall before the abort returned.
    released: bool,
}

impl End {
    /// Duration of the wait, without an abort that waited for the stall.
    fn took(&self) -> Duration {
        if self.released { self.waited } else { self.waited + self.abort }
    }

    fn tell(&self, name: &str, kind: ErrorKind, limit: Duration, report: &mut Report) {
        let (waited, abort) = (self.waited.as_secs_f64(), self.abort.as_secs_f64());
        let outcome = match &self.error {
            None => Err("the collective ended, though its stream was stalled".into()),
            Some(error) if error.kind() != kind => Err(format!("{kind:?} was expected, not: {error}")),
            Some(_) if self.took() > limit => {
                Err(format!("it took {:?}, {limit:?} were allowed", self.took()))
            }
            Some(error) => Ok(format!("after {waited:.2} s: {error}")),
        };
        report.line(name, outcome);
        report.note(match self.released {
            true => {
                format!("{name}: ncclCommAbort returned only when the stall was over, after {abort:.2} s")
            }
            false => format!("{name}: ncclCommAbort took {abort:.3} s, beside a stalled stream"),
        });
    }
}

/// Waits with `limit` for a collective that cannot end; another thread ends the group after `cancel`.
fn given_up(machine: &Machine, limit: Duration, cancel: Option<Duration>) -> Result<End> {
    let (stream, liveness) = (machine.stream()?, Liveness::new(1));
    let raw_stream = stream.raw();
    let mut comm = machine.alone(stream, liveness.clone())?;
    all_reduce(&mut comm)?;
    let (send, recv) = (Memory::of(&[0; COUNT * 4])?, Memory::new(COUNT * 4)?);
    let stall = Stall::begin(raw_stream)?;
    // SAFETY: both are kept until the stall is over and the stream is done: freeing waits for that.
    unsafe {
        let span = span(send.address(0), recv.address(0), COUNT);
        comm.start_all_reduce(&[span], DType::F32, ReduceOp::Sum)?;
    }
    let started = Instant::now();
    let over = Arc::new(Signal::default());
    let end = std::thread::scope(|scope| {
        let gave_up = Arc::new(Signal::default());
        let tell = gave_up.clone();
        liveness.subscribe(move || tell.set());
        if let Some(after) = cancel {
            let liveness = liveness.clone();
            scope.spawn(move || {
                std::thread::sleep(after);
                liveness.fail(Error::new(ErrorKind::Aborted, "another thread ended the group"));
            });
        }
        let (over_there, stall_there) = (over.clone(), &stall);
        let releaser = scope.spawn(move || {
            gave_up.wait();
            let gave_up = Instant::now();
            let released = !over_there.wait_for(Duration::from_secs(1));
            if released {
                stall_there.end();
            }
            (gave_up, released)
        });
        let error = comm.wait(Deadline::after(limit)).err();
        let returned = Instant::now();
        over.set();
        // A wait that succeeded has not set `gave_up`.
        liveness.fail(Error::new(ErrorKind::Aborted, "the wait is over"));
        let (gave_up, released) = releaser.join().unwrap_or((returned, false));
        let (waited, abort) = (gave_up - started, returned.saturating_duration_since(gave_up));
        End { error, waited, abort, released }
    });
    stall.end();
    Ok(end)
}

fn all_reduce(comm: &mut NcclComm) -> Result<()> {
    let values = [1.5f32; COUNT].map(f32::to_ne_bytes).concat();
    let (send, recv) = (Memory::of(&values)?, Memory::of(&vec![0; values.len()])?);
    // SAFETY: both have that many elements and are kept until the end of the call.
    unsafe { memory::all_reduce(comm, send.address(0), recv.address(0), COUNT) }?;
    let right = recv.read()? == values;
    right
        .then_some(())
        .ok_or_else(|| Error::new(ErrorKind::Diverged, "the sum of one rank is not its values"))
}

/// A flag that is set once and can be waited for.
#[derive(Default)]
struct Signal {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    fn set(&self) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        self.wait_for(Duration::MAX);
    }

    /// Waits up to `limit`; returns whether the flag is set.
    fn wait_for(&self, limit: Duration) -> bool {
        let set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(set, limit, |set| !*set);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A stalled stream, which continues when this is dropped.
struct Stall(Arc<Signal>);

impl Stall {
    fn begin(stream: RawStream) -> Result<Self> {
        unsafe extern "C" fn wait(signal: *mut c_void) {
            // SAFETY: `begin` made the pointer from an `Arc`, and CUDA calls this once.
            unsafe { Arc::from_raw(signal.cast_const().cast::<Signal>()) }.wait();
        }
        let stall = Self(Arc::default());
        let signal = Arc::into_raw(stall.0.clone()).cast_mut().cast();
        // SAFETY: the stream lives, and the function owns its argument.
        unsafe { launch_host_function(stream.cast(), wait, signal) }.map_err(failed("cuLaunchHostFunc"))?;
        Ok(stall)
    }

    fn end(&self) {
        self.0.set();
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_counts_without_what_only_the_end_of_the_stall_ended() {
        let end = |error: Option<ErrorKind>, abort, released| {
            let error = error.map(|kind| Error::new(kind, "x"));
            let end =
                End { error, waited: Duration::from_secs(2), abort: Duration::from_secs(abort), released };
            let mut report = Report::new(false);
            end.tell("a", ErrorKind::Timeout, Duration::from_secs(3), &mut report);
            report.passed()
        };
        assert!(end(Some(ErrorKind::Timeout), 0, false));
        assert!(end(Some(ErrorKind::Timeout), 9, true));
        assert!(!end(Some(ErrorKind::Timeout), 9, false));
        assert!(!end(Some(ErrorKind::Aborted), 0, false));
        assert!(!end(None, 0, false));
    }

    #[test]
    fn a_signal_is_waited_for_and_stays() {
        let signal = Arc::new(Signal::default());
        assert!(!signal.wait_for(Duration::from_millis(1)));
        let other = signal.clone();
        let setter = std::thread::spawn(move || other.set());
        signal.wait();
        setter.join().unwrap();
        assert!(signal.wait_for(Duration::ZERO));
    }
}
