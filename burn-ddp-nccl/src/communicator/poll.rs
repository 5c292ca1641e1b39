//! How a wait ends: by NCCL, by the device, by the deadline or by the group.

use std::ffi::c_int;
use std::ptr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use burn_ddp_comm::deadline::Deadline;
use burn_ddp::{Error, ErrorKind, Result};

use super::{NcclComm, State};
use crate::error::{IN_PROGRESS, SUCCESS, failure};
use crate::symbols::RawComm;

/// `ncclRemoteError`: a peer died or its network is gone, and NCCL does not know which.
const REMOTE_ERROR: c_int = 6;
/// For a call of NCCL that has no way to be interrupted.
const LAST_CALL: Duration = Duration::from_secs(3);
/// How long a rank that only knows that it waits in vain waits for somebody to say why.
const EXPLANATION: Duration = Duration::from_secs(1);

impl NcclComm {
    /// Ends in failure when the group has.
    pub(super) fn check_peers(&mut self, what: &str) -> Result<()> {
        match self.liveness.cause() {
            None => Ok(()),
            Some(cause) => Err(self.fail(self.blame(what, &cause))),
        }
    }

    /// Whether NCCL has finished the call before, whatever that call was about.
    pub(super) fn settled(&self, what: &str) -> Result<bool> {
        let mut state = IN_PROGRESS;
        // SAFETY: the communicator is there: only an open one is asked.
        let code = unsafe { (self.symbols.comm_get_async_error)(self.comm, &mut state) };
        let error = if code == SUCCESS { state } else { code };
        match error {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            REMOTE_ERROR => Err(self.explained(self.failure(what, error), what, EXPLANATION)),
            _ => Err(self.failure(what, error)),
        }
    }

    /// The error of a call that did not even begin.
    pub(super) fn refused(&self, what: &str, code: c_int) -> Option<Error> {
        (code != SUCCESS && code != IN_PROGRESS).then(|| self.failure(what, code))
    }

    fn failure(&self, what: &str, code: c_int) -> Error {
        failure(&self.symbols, &format!("{what} on {}", self.rank), code, self.comm)
    }

    pub(super) fn blame(&self, what: &str, cause: &Error) -> Error {
        cause.context(format!("{what} on {}", self.rank))
    }

    /// [`poll`](Self::poll), at the end of which an error fails the communicator on all ranks.
    pub(super) fn until(
        &mut self,
        what: &str,
        deadline: Deadline,
        done: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        self.poll(what, deadline, done).map_err(|error| {
            let vague = error.kind() == ErrorKind::Timeout;
            let patience = if vague { EXPLANATION } else { Duration::ZERO };
            self.fail(self.explained(error, what, patience))
        })
    }

    /// Asks `done` again and again until it, the deadline or the group ends.
    pub(super) fn poll(
        &mut self,
        what: &str,
        deadline: Deadline,
        mut done: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let mut pause = Pause::new();
        while !done(self)? {
            if let Some(cause) = self.liveness.cause() {
                return Err(self.blame(what, &cause));
            }
            if deadline.passed() {
                let limit = deadline.limit();
                let text = format!("{what} on {} has not ended within {limit:?}", self.rank);
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            pause.rest();
        }
        Ok(())
    }

    /// The cause for which the group has ended, or ends within `patience`; else `error`.
    fn explained(&self, error: Error, what: &str, patience: Duration) -> Error {
        let (deadline, mut pause) = (Deadline::after(patience), Pause::new());
        loop {
            if let Some(cause) = self.liveness.cause() {
                return self.blame(what, &cause);
            }
            if deadline.passed() {
                return error;
            }
            pause.rest();
        }
    }

    /// Makes `error` the first cause: tells the others, aborts, and returns it.
    pub(super) fn fail(&mut self, error: Error) -> Error {
        // First the others: NCCL's abort takes its time.
        self.liveness.fail(error.clone());
        self.free();
        self.state = State::Failed(error.clone());
        error
    }

    /// Aborts the communicator, once.
    pub(super) fn free(&mut self) {
        let abort = self.symbols.comm_abort;
        if let Some(error) = self.let_go("abort", abort) {
            tracing::warn!("{error}");
        }
    }

    /// Hands the communicator to `last`, the last call that it sees, and waits for that call as long as a peer may be
    /// expected to take: within a host NCCL joins threads that serve peers, which end when these let go as well. A call
    /// that takes longer goes on by itself, with the stream that it may still use. Returns what went wrong.
    pub(super) fn let_go(
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
        // SAFETY: it was neither aborted nor destroyed before: whoever does either leaves a null behind. NCCL takes the call
        // from any thread, and no other call is made meanwhile.
        let call = move || unsafe { last(ptr::with_exposed_provenance_mut(address)) };
        let started = std::thread::Builder::new().name("burn-ddp-nccl".into()).spawn(move || {
            let _ = done.send(call());
        });
        let code = match started {
            Ok(_) => outcome.recv_timeout(LAST_CALL).ok(),
            Err(_) => Some(call()),
        };
        match code {
            Some(code) => self.refused(what, code),
            None => {
                self.released = false;
                let text = format!("{what} on {} has not ended within {LAST_CALL:?}; left behind", self.rank);
                Some(Error::new(ErrorKind::Timeout, text))
            }
        }
    }
}

/// Breaks between two questions: none at first, since a small collective takes microseconds, later a sixteenth of the
/// time that has passed.
struct Pause {
    start: Instant,
    rounds: u32,
}

impl Pause {
    const SPINS: u32 = 300;
    const YIELDS: u32 = 300;
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);

    fn new() -> Self {
        Self { start: Instant::now(), rounds: 0 }
    }

    fn rest(&mut self) {
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
