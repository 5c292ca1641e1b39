//! Device memory and communicators without Burn.
#![allow(unsafe_code)]

use std::time::Duration;

use burn_ddp::{DType, Error, ErrorKind, Rank, ReduceOp, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_nccl::{CudaStream, NcclComm, Span, UniqueId};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{DriverError, result};

use crate::Machine;

/// Longest wait for an operation that should succeed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn failed(call: &str) -> impl Fn(DriverError) -> Error {
    move |error| Error::new(ErrorKind::Device, format!("{call} failed: {error:?}"))
}

/// Bytes on the current device of this thread.
pub(crate) struct Memory {
    address: CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// A copy of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Result<Self> {
        let this = Self::new(bytes.len())?;
        // SAFETY: the memory has room for `bytes`.
        unsafe { result::memcpy_htod_sync(this.address, bytes) }.map_err(failed("cuMemcpyHtoD"))?;
        // The copy may only be staged when the call returns, and NCCL's stream does not wait for it.
        result::ctx::synchronize().map_err(failed("cuCtxSynchronize"))?;
        Ok(this)
    }

    /// Memory with undefined contents.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        // SAFETY: freed once, by the drop.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(failed("cuMemAlloc"))?;
        Ok(Self { address, bytes })
    }

    /// The contents, after everything that the thread's context has started on blocking streams.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: `bytes` is as long as the memory.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address) }.map_err(failed("cuMemcpyDtoH"))?;
        Ok(bytes)
    }

    /// Copies the contents to `other`, and waits for the copy.
    pub(crate) fn copy_to(&self, other: &Memory) -> Result<()> {
        let bytes = self.bytes.min(other.bytes);
        // SAFETY: both have that many bytes.
        unsafe { result::memcpy_dtod_sync(other.address, self.address, bytes) }
            .map_err(failed("cuMemcpyDtoD"))?;
        // The call may return before a copy on the device has ended.
        result::ctx::synchronize().map_err(failed("cuCtxSynchronize"))
    }

    /// The address of the byte `at`.
    pub(crate) fn address(&self, at: usize) -> usize {
        self.address as usize + at
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; CUDA lets work in flight finish first.
        if let Err(error) = unsafe { result::free_sync(self.address) } {
            println!("NOTE {}", failed("cuMemFree")(error));
        }
    }
}

/// A span of `count` elements that NCCL reads at `send` and whose result it writes at `recv`.
pub(crate) fn span(send: usize, recv: usize, count: usize) -> Span {
    Span {
        send: std::ptr::with_exposed_provenance(send),
        recv: std::ptr::with_exposed_provenance_mut(recv),
        count,
    }
}

/// Sums `count` f32 elements over the ranks of `comm` and waits for the sum.
///
/// # Safety
///
/// Both addresses are device memory with room for `count` elements, which nothing else writes during the call.
pub(crate) unsafe fn all_reduce(comm: &mut NcclComm, send: usize, recv: usize, count: usize) -> Result<()> {
    // SAFETY: of the caller.
    unsafe { comm.start_all_reduce(&[span(send, recv, count)], DType::F32, ReduceOp::Sum) }?;
    comm.wait(Deadline::after(LIMIT))
}

impl Machine {
    /// A new stream. The device is the current one of this thread from here on.
    pub(crate) fn stream(&self) -> Result<CudaStream> {
        CudaStream::new(self.device.index)
    }

    /// Connects with the ranks that have the same `id`.
    pub(crate) fn connect(
        &self,
        id: &UniqueId,
        (rank, world_size): (Rank, usize),
        stream: CudaStream,
        liveness: Liveness,
    ) -> Result<NcclComm> {
        let (symbols, stream, deadline) = (self.library.symbols(), Box::new(stream), Deadline::after(LIMIT));
        // SAFETY: the symbols are those of a checked library; the stream is of this thread's current device.
        unsafe { NcclComm::connect(symbols, id, rank, world_size, stream, liveness, deadline) }
    }

    /// Connects a world of one, whatever the environment says.
    pub(crate) fn alone(&self, stream: CudaStream, liveness: Liveness) -> Result<NcclComm> {
        let id = UniqueId::new(&self.library.symbols())?;
        self.connect(&id, (Rank(0), 1), stream, liveness)
    }
}
