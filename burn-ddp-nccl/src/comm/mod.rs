//! NCCL's communicator, of which every wait ends.
//!
//! NCCL by itself waits for ever: for a rank that ran out of memory at its start, for a peer that died in a collective,
//! for the abort of the other ranks. So it is used in its non-blocking mode only. A call is started here and then
//! polled, and between two polls this module checks the deadline and [`Liveness`], in which the control channel reports
//! over TCP what NCCL does not notice.
//!
//! The first error is the cause. It is told to the other ranks through `Liveness` (never through NCCL, which may be
//! what is stuck), the communicator is aborted, and each later call returns the same error.
//!
//! ```text
//! connect --> ready --start_*--> in flight --wait--> ready
//!               |                    |
//!               |                    +--- first error or abort() --> failed: holds the cause, communicator aborted
//!               +---- first error or abort() ---------------------->
//!               +---- finish() -------------------------------------> finished: communicator destroyed
//! ```
//!
//! A communicator lives on one thread. That thread starts, waits and aborts, so no two calls of NCCL overlap on one
//! communicator, and nothing here has to be `Send`. Other threads end a wait by [`Liveness::fail`].
//!
//! Two calls of NCCL cannot be polled: abort and destroy, which within a host wait for the peers to do the same. Each
//! runs on a thread of its own and is waited for three seconds. After that the memory that it may still use is leaked
//! ([`is_released`](NcclComm::is_released)).
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr;
use std::time::Duration;

use burn_ddp::{Error, ErrorKind, Rank, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;

use crate::stream::Stream;
use crate::symbols::{Config, RawComm, Symbols};
use crate::unique_id::UniqueId;

mod collectives;
mod poll;

pub use collectives::Span;

/// Longest wait for `ncclCommFinalize`.
const FINALIZE_LIMIT: Duration = Duration::from_secs(5);

/// One rank's end of an NCCL communicator, of which every wait ends. It stays on the thread that connected it.
pub struct NcclComm {
    symbols: Symbols,
    /// Null when there is nothing to abort or to destroy.
    comm: RawComm,
    rank: Rank,
    world_size: usize,
    stream: ManuallyDrop<Box<dyn Stream>>,
    liveness: Liveness,
    state: State,
    /// Cleared when an abort or destroy has not returned in time, so that NCCL may still use stream and memory.
    released: bool,
}

enum State {
    Ready,
    /// A call was started; its name.
    InFlight(&'static str),
    Failed(Error),
    Finished,
}

impl NcclComm {
    /// Connects with the `world_size` ranks that have the same `id` (`ncclCommInitRankConfig`). All of them must call
    /// it. The device is the current one of this thread.
    ///
    /// # Errors
    ///
    /// `Config` for a rank outside of its world. All others begin with "connect": `Timeout` at `deadline`, `Device`
    /// with what NCCL reports, and the cause for which `liveness` ends the group.
    ///
    /// # Safety
    ///
    /// `symbols` are NCCL's or keep its contract, and `stream` is one of this thread's current device.
    pub unsafe fn connect(
        symbols: Symbols,
        id: &UniqueId,
        rank: Rank,
        world_size: usize,
        stream: Box<dyn Stream>,
        liveness: Liveness,
        deadline: Deadline,
    ) -> Result<Self> {
        const CONNECT: &str = "connect";
        let (Ok(ranks), Ok(number)) = (c_int::try_from(world_size), c_int::try_from(rank.0)) else {
            return Err(Error::config(format!("{rank} of {world_size}: NCCL counts up to {}", c_int::MAX)));
        };
        if number >= ranks {
            return Err(Error::config(format!("{rank} of {world_size}: ranks go from 0 to {}", ranks - 1)));
        }
        let state = State::InFlight(CONNECT);
        let (comm, stream) = (ptr::null_mut(), ManuallyDrop::new(stream));
        let mut this = Self { symbols, comm, rank, world_size, stream, liveness, state, released: true };
        this.check_peers(CONNECT)?;
        let (mut comm, mut config) = (ptr::null_mut(), Config::new());
        // SAFETY: of the caller; both places that NCCL writes to live until it has connected or was aborted.
        let code = unsafe { (symbols.comm_init_rank_config)(&mut comm, ranks, *id, number, &mut config) };
        this.comm = comm;
        if let Some(error) = this.call_error(CONNECT, code) {
            // NCCL 2.23 to 2.30 leave the group open that the call makes for itself. If none is open, NCCL refuses this
            // end. SAFETY: no group of ours is open.
            unsafe { (symbols.group_end)() };
            return Err(this.fail(error));
        }
        this.poll_or_fail(CONNECT, deadline, |this| this.is_settled(CONNECT))?;
        this.state = State::Ready;
        Ok(this)
    }

    /// This process.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Waits until the collective in flight is done and its memory may be used. Returns at once if there is none.
    ///
    /// # Errors
    ///
    /// `Timeout` at `deadline` (a second later, for a peer to report who is late), `Device` with what NCCL or
    /// the device reports, the cause for which [`Liveness`] ends the group, or the first cause of an earlier call.
    pub fn wait(&mut self, deadline: Deadline) -> Result<()> {
        let what = match &self.state {
            State::InFlight(what) => *what,
            State::Failed(cause) => return Err(cause.clone()),
            State::Ready | State::Finished => return Ok(()),
        };
        let mut recorded = false;
        self.poll_or_fail(what, deadline, |this| {
            if !this.is_settled(what)? {
                return Ok(false);
            }
            // Not before: NCCL enqueues in the background, and an event in front of its work would be reached too
            // early.
            if !recorded {
                this.stream.record().map_err(|error| this.in_context(what, &error))?;
                recorded = true;
            }
            this.stream.is_reached().map_err(|error| this.in_context(what, &error))
        })?;
        self.state = State::Ready;
        Ok(())
    }

    /// Aborts the communicator and, by [`Liveness`], the group on all ranks. A collective in flight ends, and its
    /// memory may be used. Does nothing after an error, after another abort, or after [`finish`](NcclComm::finish).
    pub fn abort(&mut self) {
        if self.is_open() {
            let cause = Error::new(ErrorKind::Aborted, format!("{} aborted its communicator", self.rank));
            self.fail(cause);
        }
    }

    /// The first cause, if the communicator has failed. Checks NCCL and [`Liveness`] before it returns `None`.
    pub fn error(&mut self) -> Option<Error> {
        let what = match &self.state {
            State::Failed(cause) => return Some(cause.clone()),
            State::Finished => return None,
            State::InFlight(what) => *what,
            State::Ready => "the communicator",
        };
        let found = self.check_peers(what).err();
        found.or_else(|| self.is_settled(what).err().map(|error| self.fail(error)))
    }

    /// Finalizes and destroys NCCL's communicator. All ranks should call it; a drop does.
    ///
    /// # Errors
    ///
    /// The first cause of an earlier call, an error that NCCL reports, or `Timeout`: five seconds for
    /// `ncclCommFinalize`, three more for `ncclCommDestroy`. The communicator is then aborted, but the other ranks are
    /// not told, since no result is missing. `Aborted`, on all ranks, while a collective is in flight.
    pub fn finish(&mut self) -> Result<()> {
        const FINALIZE: &str = "finalize";
        match &self.state {
            State::Finished => return Ok(()),
            State::Failed(cause) => return Err(cause.clone()),
            State::InFlight(what) => {
                let text = format!("{} left while {what} was in flight: wait for it first", self.rank);
                return Err(self.fail(Error::new(ErrorKind::Aborted, text)));
            }
            State::Ready => self.check_peers(FINALIZE)?,
        }
        // SAFETY: the communicator is there and has nothing in flight.
        let code = unsafe { (self.symbols.comm_finalize)(self.comm) };
        let outcome = self.call_error(FINALIZE, code).map_or(Ok(()), Err).and_then(|()| {
            let settled = |this: &mut Self| this.is_settled(FINALIZE);
            self.poll(FINALIZE, Deadline::after(FINALIZE_LIMIT), settled)
        });
        if let Err(error) = outcome {
            self.abort_comm();
            self.state = State::Failed(error.clone());
            return Err(error);
        }
        self.state = State::Finished;
        let destroy = self.symbols.comm_destroy;
        self.run_last_call("destroy", destroy).map_or(Ok(()), Err)
    }

    /// True if memory that was given to a collective may be used again after an error. It is false when NCCL has not
    /// returned from an abort: the memory must then stay valid until the process ends.
    pub fn is_released(&self) -> bool {
        self.released
    }

    fn is_open(&self) -> bool {
        matches!(self.state, State::Ready | State::InFlight(_))
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if self.is_open()
            && let Err(error) = self.finish()
        {
            tracing::warn!("{error}");
        }
        if self.released {
            // SAFETY: dropped once, here, and the communicator that used it is gone.
            unsafe { ManuallyDrop::drop(&mut self.stream) };
        }
    }
}
