//! NCCL's communicator, of which every wait ends.
//!
//! NCCL by itself waits for ever: for a rank that ran out of memory in its start, for a peer that died in a collective,
//! for an abort that one rank alone has called. So it is used in its non-blocking mode only. Each call is begun here and
//! then polled, and between two polls this module looks at the deadline and at [`Liveness`], where the control channel
//! says over TCP what NCCL does not notice. Whatever goes wrong first is the cause: it is told to the other ranks through
//! `Liveness` (never through NCCL, which may be what is stuck), it aborts the communicator, and each later call returns
//! it.
//!
//! A communicator lives on one thread. That thread begins, waits and aborts, so no two calls of NCCL ever meet on one
//! communicator, and nothing here has to be `Send`. Others end a wait by [`Liveness::fail`].
//!
//! Two calls of NCCL cannot be polled: abort and destroy, which within a host wait for the peers to let go as well. They
//! are given a thread and three seconds, and what they may still use is then left to them for ever
//! ([`is_released`](NcclComm::is_released)).
//!
//! | state | what it holds | next |
//! | --- | --- | --- |
//! | ready | a communicator | in flight, failed, finished |
//! | in flight | and a collective that was started | ready by [`wait`](NcclComm::wait), failed |
//! | failed | the first cause; the communicator is aborted | |
//! | finished | nothing; the communicator is destroyed | |
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr;
use std::time::Duration;

use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp::{Error, ErrorKind, Rank, Result};

use crate::UniqueId;
use crate::queue::Queue;
use crate::symbols::{Config, RawComm, Symbols};

mod poll;
mod start;

pub use start::Span;

/// Time for NCCL to clean up in a drop.
const FINALIZE: Duration = Duration::from_secs(5);

/// One rank's end of an NCCL communicator. See the [module documentation](self).
pub struct NcclComm {
    symbols: Symbols,
    /// Null when there is nothing to abort or to destroy.
    comm: RawComm,
    rank: Rank,
    world_size: usize,
    queue: ManuallyDrop<Box<dyn Queue>>,
    liveness: Liveness,
    state: State,
    /// NCCL uses nothing of ours any more once the communicator is gone.
    released: bool,
}

enum State {
    Ready,
    /// The name of what was started.
    InFlight(&'static str),
    Failed(Error),
    Finished,
}

impl NcclComm {
    /// Connects with the `world_size` ranks that have the same `id` (`ncclCommInitRankConfig`). All of them must call it.
    /// The device is the current one of this thread.
    ///
    /// # Errors
    ///
    /// `Config` for a rank outside of its world. All others begin with "connect": `Timeout` at `deadline`, `Device` with
    /// what NCCL reports, and the cause for which `liveness` ends the group.
    ///
    /// # Safety
    ///
    /// `symbols` are NCCL's or keep its contract, and `queue` is a stream of this thread's current device, which NCCL may
    /// use for as long as the communicator lives.
    pub unsafe fn connect(
        symbols: Symbols,
        id: &UniqueId,
        rank: Rank,
        world_size: usize,
        queue: Box<dyn Queue>,
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
        let (comm, queue) = (ptr::null_mut(), ManuallyDrop::new(queue));
        let mut this = Self { symbols, comm, rank, world_size, queue, liveness, state, released: true };
        this.check_peers(CONNECT)?;
        let (mut comm, mut config) = (ptr::null_mut(), Config::new());
        // SAFETY: of the caller; both places that NCCL writes to live until it has connected or was aborted.
        let code = unsafe { (symbols.comm_init_rank_config)(&mut comm, ranks, *id, number, &mut config) };
        this.comm = comm;
        if let Some(error) = this.refused(CONNECT, code) {
            // NCCL 2.23 to 2.30 leave the group open that the call makes for itself. Without one this call is refused.
            // SAFETY: no group of ours is open.
            unsafe { (symbols.group_end)() };
            return Err(this.fail(error));
        }
        this.until(CONNECT, deadline, |this| this.settled(CONNECT))?;
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

    /// Waits until the collective that was started is done and its memory may be used. Without one it returns at once.
    ///
    /// # Errors
    ///
    /// `Timeout` at `deadline` (a second later, in which a peer may have said who is late), `Device` with what NCCL or
    /// the device reports, the cause for which [`Liveness`] ends the group, or the first cause of an earlier call.
    pub fn wait(&mut self, deadline: Deadline) -> Result<()> {
        let what = match &self.state {
            State::InFlight(what) => *what,
            State::Failed(cause) => return Err(cause.clone()),
            State::Ready | State::Finished => return Ok(()),
        };
        let mut marked = false;
        self.until(what, deadline, |this| {
            if !this.settled(what)? {
                return Ok(false);
            }
            // Not before: NCCL enqueues behind the call's back, and a mark in front of its work is reached too early.
            if !marked {
                this.queue.mark().map_err(|error| this.blame(what, &error))?;
                marked = true;
            }
            this.queue.reached().map_err(|error| this.blame(what, &error))
        })?;
        self.state = State::Ready;
        Ok(())
    }

    /// Gives up, here and, by [`Liveness`], on all ranks: what is in flight ends, its memory is free. Does nothing after
    /// an error, after another abort, or after [`finish`](NcclComm::finish).
    pub fn abort(&mut self) {
        if self.is_open() {
            let cause = Error::new(ErrorKind::Aborted, format!("{} aborted its communicator", self.rank));
            self.fail(cause);
        }
    }

    /// The first cause, after an error. Asks NCCL and [`Liveness`] before it says that there is none.
    pub fn error(&mut self) -> Option<Error> {
        let what = match &self.state {
            State::Failed(cause) => return Some(cause.clone()),
            State::Finished => return None,
            State::InFlight(what) => *what,
            State::Ready => "the communicator",
        };
        let found = self.check_peers(what).err();
        found.or_else(|| self.settled(what).err().map(|error| self.fail(error)))
    }

    /// Takes leave of NCCL: `ncclCommFinalize`, then `ncclCommDestroy`. All ranks should call it; a drop does.
    ///
    /// # Errors
    ///
    /// The first cause of an earlier call; what NCCL reports; `Timeout` after five seconds, three more for the last call. The communicator is then
    /// aborted, but the other ranks are not told: all results are there. `Aborted`, on all ranks, while a collective is
    /// in flight.
    pub fn finish(&mut self) -> Result<()> {
        const FINALIZE_CALL: &str = "finalize";
        match &self.state {
            State::Finished => return Ok(()),
            State::Failed(cause) => return Err(cause.clone()),
            State::InFlight(what) => {
                let text = format!("{} left while {what} was in flight: wait for it first", self.rank);
                return Err(self.fail(Error::new(ErrorKind::Aborted, text)));
            }
            State::Ready => self.check_peers(FINALIZE_CALL)?,
        }
        // SAFETY: the communicator is there and has nothing in flight.
        let code = unsafe { (self.symbols.comm_finalize)(self.comm) };
        let outcome = self.refused(FINALIZE_CALL, code).map_or(Ok(()), Err).and_then(|()| {
            let settled = |this: &mut Self| this.settled(FINALIZE_CALL);
            self.poll(FINALIZE_CALL, Deadline::after(FINALIZE), settled)
        });
        if let Err(error) = outcome {
            self.free();
            self.state = State::Failed(error.clone());
            return Err(error);
        }
        self.state = State::Finished;
        let destroy = self.symbols.comm_destroy;
        self.let_go("destroy", destroy).map_or(Ok(()), Err)
    }

    /// Whether memory that was given to a collective may be used again after an error. Not so when NCCL has not come back
    /// from an abort: then it must stay as it is until the process ends.
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
            unsafe { ManuallyDrop::drop(&mut self.queue) };
        }
    }
}
