//! Waits of a communicator: they end by NCCL, the device, the deadline or the group.

use std::ffi::c_int;
use std::ptr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use burn_ddp::{Error, ErrorKind, Result};
use burn_ddp_comm::deadline::Deadline;

use super::{NcclComm, State};
use crate::error::{IN_PROGRESS, SUCCESS, failure};
use crate::symbols::RawComm;

/// `ncclRemoteError`: a peer died or its network is gone; NCCL does not say which peer.
const REMOTE_ERROR: c_int = 6;
/// Longest wait for an abort or destroy, which cannot be interrupted.
const LAST_CALL_LIMIT: Duration = Duration::from_secs(3);
/// Time for the control channel to report the cause, after an error that does not name one.
const CAUSE_LIMIT: Duration = Duration::from_secs(1);

impl NcclComm {
    /// Fails if the group has failed.
    pub(super) fn check_peers(&mut self, what: &str) -> Result<()> {
        match self.liveness.cause() {
            None => Ok(()),
            Some(cause) => Err(self.fail(self.in_context(what, &cause))),
        }
    }

    /// Polls NCCL: true if it has finished the call that was started last.
    pub(super) fn is_settled(&self, what: &str) -> Result<bool> {
        let mut state = IN_PROGRESS;
        // SAFETY: the communicator exists: only an open one is polled.
        let code = unsafe { (self.symbols.comm_get_async_error)(self.comm, &mut state) };
        let error = if code == SUCCESS { state } else { code };
        match error {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            REMOTE_ERROR => Err(self.cause_or(self.failure(what, error), what, CAUSE_LIMIT)),
            _ => Err(self.failure(what, error)),
        }
    }

    /// The error of a call that returned `code`, unless it has ended well or is in progress.
    pub(super) fn call_error(&self, what: &str, code: c_int) -> Option<Error> {
        (code != SUCCESS && code != IN_PROGRESS).then(|| self.failure(what, code))
    }

    fn failure(&self, what: &str, code: c_int) -> Error {
        failure(&self.symbols, &format!("{what} on {}", self.rank), code, self.comm)
    }

    /// `cause` with the name of the call and this rank in front.
    pub(super) fn in_context(&self, what: &str, cause: &Error) -> Error {
        cause.context(format!("{what} on {}", self.rank))
    }

    /// Like [`poll`](Self::poll); an error fails the communicator on all ranks.
    pub(super) fn poll_or_fail(
        &mut self,
        what: &str,
        deadline: Deadline,
        done: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        self.poll(what, deadline, done).map_err(|error| {
            let limit = if error.kind() == ErrorKind::Timeout { CAUSE_LIMIT } else { Duration::ZERO };
            self.fail(self.cause_or(error, what, limit))
        })
    }

    /// Calls `done` until it returns true or an error, the deadline passes or the group fails.
    pub(super) fn poll(
        &mut self,
        what: &str,
        deadline: Deadline,
        mut done: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let mut backoff = Backoff::new();
        while !done(self)? {
            if let Some(cause) = self.liveness.cause() {
                return Err(self.in_context(what, &cause));
            }
            if deadline.passed() {
                let limit = deadline.limit();
                let text = format!("{what} on {} has not ended within {limit:?}", self.rank);
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            backoff.pause();
        }
        Ok(())
    }

    /// The cause for which the group has failed, or fails within `limit`; else `error`.
    fn cause_or(&self, error: Error, what: &str, limit: Duration) -> Error {
        let (deadline, mut backoff) = (Deadline::after(limit), Backoff::new());
        loop {
            if let Some(cause) = self.liveness.cause() {
                return self.in_context(what, &cause);
            }
            if deadline.passed() {
                return error;
            }
            backoff.pause();
        }
    }

    /// Makes `error` the first cause: tells the other ranks, aborts the communicator, and returns the error.
    pub(super) fn fail(&mut self, error: Error) -> Error {
        // The other ranks first: NCCL's abort may take seconds.
        self.liveness.fail(error.clone());
        self.abort_comm();
        self.state = State::Failed(error.clone());
        error
    }

    /// Aborts the communicator, once.
    pub(super) fn abort_comm(&mut self) {
        let abort = self.symbols.comm_abort;
        if let Some(error) = self.run_last_call("abort", abort) {
            tracing::warn!("{error}");
        }
    }

    /// Gives the communicator to `last`, an abort or destroy, and waits for that call up to its limit: within a host
    /// NCCL joins threads that serve peers, which end when the peers do the same. A call that takes longer goes on in
    /// the background, and the stream that it may still use is leaked. Returns the error.
    pub(super) fn run_last_call(
        &mut self,
        what: &str,
        last: unsafe extern "C" fn(RawComm) -> c_int,
    ) -> Option<Error> {
        let comm = std::mem::replace(&mut self.comm, ptr::null_mut());
        if comm.is_null() {
            return None;
        }
        let address = comm.expose_provenance();
        let (done, outcome) = channel();
        // SAFETY: the communicator was neither aborted nor destroyed before: both go through here, which leaves a null.
        // NCCL takes the call from any thread, and no other call is made meanwhile.
        let call = move || unsafe { last(ptr::with_exposed_provenance_mut(address)) };
        let started = std::thread::Builder::new().name("burn-ddp-nccl".into()).spawn(move || {
            let _ = done.send(call());
        });
        let code = match started {
            Ok(_) => outcome.recv_timeout(LAST_CALL_LIMIT).ok(),
            Err(_) => Some(call()),
        };
        match code {
            Some(code) => self.call_error(what, code),
            None => {
                self.released = false;
                let text =
                    format!("{what} on {} has not ended within {LAST_CALL_LIMIT:?}; left behind", self.rank);
                Some(Error::new(ErrorKind::Timeout, text))
            }
        }
    }
}

/// Pauses between two polls: none at first, since a small collective takes microseconds, later a sixteenth of the time
/// that has passed.
struct Backoff {
    start: Instant,
    rounds: u32,
}

impl Backoff {
    const SPINS: u32 = 300;
    const YIELDS: u32 = 300;
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);

    fn new() -> Self {
        Self { start: Instant::now(), rounds: 0 }
    }

    fn pause(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds <= Self::SPINS {
            std::hint::spin_loop();
        } else if self.rounds <= Self::SPINS + Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep((self.start.elapsed() / 16).clamp(Self::SHORTEST, Self::LONGEST));
        }
    }
}
