//! The collectives of a communicator.
//!
//! Starting and waiting are two calls because ranks compare in between what they have started: a mismatch, which NCCL
//! would answer with wrong numbers or a hang, becomes an error.

use std::ffi::{c_int, c_void};
use std::ptr;

use burn_ddp::{DType, Error, Rank, ReduceOp, Result};
use burn_ddp_comm::collective::chunk;

use super::{NcclComm, State};
use crate::dtype::{data_type, reduction};
use crate::symbols::{RawComm, RawStream, Symbols};

/// Device memory of a collective: its input and its result.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The input of this rank.
    pub send: *const c_void,
    /// The place of the result. It may be `send`, but not overlap it otherwise.
    pub recv: *mut c_void,
    /// Elements in `send`.
    pub count: usize,
}

/// Each starts one operation and returns before it is done: [`wait`](NcclComm::wait) for it before starting the next.
/// All ranks must start the same operations in the same order with the same counts.
///
/// Errors of all of them: `Config` while another operation is in flight, after [`finish`](NcclComm::finish), and for a
/// root outside of the group (nothing is started then, and the communicator stays usable); `Device` with what NCCL
/// reports; the first cause of an earlier call.
impl NcclComm {
    /// Reduces each span over all ranks; every rank gets all of the result. Several spans are one NCCL group.
    ///
    /// NCCL's mean multiplies floats by 1/world_size before it adds them, and divides the sum of integers. Its order of
    /// summation depends on the machine.
    ///
    /// # Errors
    ///
    /// See above.
    ///
    /// # Safety
    ///
    /// The spans are memory of the communicator's device with room for `count` elements of `dtype`. It is valid, and
    /// nothing else uses it, until [`wait`](NcclComm::wait) has returned or the communicator has failed.
    pub unsafe fn start_all_reduce(&mut self, spans: &[Span], dtype: DType, op: ReduceOp) -> Result<()> {
        let (dtype, op) = (data_type(dtype), reduction(op));
        self.start("all_reduce", spans, |nccl, span, comm, stream| {
            // SAFETY: of the caller.
            unsafe { (nccl.all_reduce)(span.send, span.recv, span.count, dtype, op, comm, stream) }
        })
    }

    /// Copies `send` of `root` to `recv` of all ranks. Several spans are one NCCL group.
    ///
    /// # Errors
    ///
    /// See above.
    ///
    /// # Safety
    ///
    /// Like [`start_all_reduce`](NcclComm::start_all_reduce); `send` is read on `root` only.
    pub unsafe fn start_broadcast(&mut self, spans: &[Span], dtype: DType, root: Rank) -> Result<()> {
        if root.0 >= self.world_size {
            let text = format!("the root of broadcast is {root}, but the group has {}", self.world_size);
            return Err(Error::config(text));
        }
        let (dtype, root) = (data_type(dtype), root.0 as c_int);
        self.start("broadcast", spans, |nccl, span, comm, stream| {
            // SAFETY: of the caller.
            unsafe { (nccl.broadcast)(span.send, span.recv, span.count, dtype, root, comm, stream) }
        })
    }

    /// Reduces `span.send` over all ranks; each rank gets its [`chunk`] of the result in `recv`, which has room for
    /// that chunk only. In place, `recv` is the chunk's place in `send`.
    ///
    /// NCCL's reduce_scatter has equal chunks only; for others one group with a reduce for each rank is started.
    ///
    /// # Errors
    ///
    /// See above.
    ///
    /// # Safety
    ///
    /// Like [`start_all_reduce`](NcclComm::start_all_reduce).
    pub unsafe fn start_reduce_scatter(&mut self, span: Span, dtype: DType, op: ReduceOp) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let (size, world_size, rank) = (dtype.size(), self.world_size, self.rank);
        let (dtype, op) = (data_type(dtype), reduction(op));
        if span.count.is_multiple_of(world_size) {
            let count = span.count / world_size;
            return self.start(NAME, &[span], |nccl, span, comm, stream| {
                // SAFETY: of the caller.
                unsafe { (nccl.reduce_scatter)(span.send, span.recv, count, dtype, op, comm, stream) }
            });
        }
        let roots: Vec<usize> = (0..world_size.min(span.count)).collect();
        self.start(NAME, &roots, |nccl, &root, comm, stream| {
            let chunk = chunk(span.count, world_size, root);
            let send = span.send.wrapping_byte_add(chunk.start * size);
            let recv = if root == rank.0 { span.recv } else { ptr::null_mut() };
            // SAFETY: of the caller; the chunk lies in `send`, and NCCL writes at the root only.
            unsafe { (nccl.reduce)(send, recv, chunk.len(), dtype, op, root as c_int, comm, stream) }
        })
    }

    /// Concatenates all ranks' `span.send`, of `count` elements each, in `recv` of each rank, which has room for all of
    /// them. In place, `send` is this rank's place in `recv`.
    ///
    /// # Errors
    ///
    /// See above.
    ///
    /// # Safety
    ///
    /// Like [`start_all_reduce`](NcclComm::start_all_reduce).
    pub unsafe fn start_all_gather(&mut self, span: Span, dtype: DType) -> Result<()> {
        let dtype = data_type(dtype);
        self.start("all_gather", &[span], |nccl, span, comm, stream| {
            // SAFETY: of the caller.
            unsafe { (nccl.all_gather)(span.send, span.recv, span.count, dtype, comm, stream) }
        })
    }

    /// Starts one NCCL group with one call for each part.
    fn start<T>(
        &mut self,
        what: &'static str,
        parts: &[T],
        call: impl Fn(&Symbols, &T, RawComm, RawStream) -> c_int,
    ) -> Result<()> {
        self.check_ready(what)?;
        let (symbols, comm, stream) = (self.symbols, self.comm, self.stream.raw());
        // SAFETY: takes nothing; the group that it opens is closed below.
        let opened = unsafe { (symbols.group_start)() };
        let mut error = self.call_error(what, opened);
        if error.is_none() {
            error = parts.iter().find_map(|part| self.call_error(what, call(&symbols, part, comm, stream)));
            // After an error too: a group that stays open would absorb every later call of this thread.
            // SAFETY: the group is open.
            let closed = unsafe { (symbols.group_end)() };
            error = error.or_else(|| self.call_error(what, closed));
        }
        match error {
            Some(error) => Err(self.fail(error)),
            None => {
                self.state = State::InFlight(what);
                Ok(())
            }
        }
    }

    fn check_ready(&mut self, what: &str) -> Result<()> {
        match &self.state {
            State::Ready => self.check_peers(what),
            State::Failed(cause) => Err(cause.clone()),
            State::InFlight(other) => {
                Err(Error::config(format!("{what} while {other} is in flight: wait for it first")))
            }
            State::Finished => Err(Error::config(format!("{what} after the communicator was finished"))),
        }
    }
}
