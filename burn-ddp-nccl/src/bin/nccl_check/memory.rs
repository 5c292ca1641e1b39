//! Memory of a device, and a communicator that is handed it: what lies below Burn.
#![allow(unsafe_code)]

use std::time::Duration;

use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp::{Error, ErrorKind, Rank, Result};
use burn_ddp_nccl::{CudaQueue, NcclComm, Span, UniqueId};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{DriverError, result};

use crate::Machine;

/// Longest wait for what is meant to succeed.
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
    /// As long as `bytes` and with the same in it.
    pub(crate) fn of(bytes: &[u8]) -> Result<Self> {
        let this = Self::new(bytes.len())?;
        // SAFETY: it has room for `bytes`.
        unsafe { result::memcpy_htod_sync(this.address, bytes) }.map_err(failed("cuMemcpyHtoD"))?;
        // The copy may only be staged when the call returns, and NCCL's stream does not wait for it.
        result::ctx::synchronize().map_err(failed("cuCtxSynchronize"))?;
        Ok(this)
    }

    /// With anything in it.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        // SAFETY: it is freed once, by the drop.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(failed("cuMemAlloc"))?;
        Ok(Self { address, bytes })
    }

    /// What is in it, when all that the thread's context has begun on blocking streams is done.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: `bytes` is as long as it.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address) }.map_err(failed("cuMemcpyDtoH"))?;
        Ok(bytes)
    }

    /// Copies all of it to `other`, and waits for it.
    pub(crate) fn copy_to(&self, other: &Memory) -> Result<()> {
        let bytes = self.bytes.min(other.bytes);
        // SAFETY: both have that many bytes.
        unsafe { result::memcpy_dtod_sync(other.address, self.address, bytes) }
            .map_err(failed("cuMemcpyDtoD"))?;
        // A copy on a device may return before its end.
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

/// What NCCL reads at `send` and writes at `recv`.
pub(crate) fn span(send: usize, recv: usize, count: usize) -> Span {
    Span {
        send: std::ptr::with_exposed_provenance(send),
        recv: std::ptr::with_exposed_provenance_mut(recv),
        count,
    }
}

impl Machine {
    /// A stream of its own; the device is the current one of this thread from here on.
    pub(crate) fn queue(&self) -> Result<CudaQueue> {
        CudaQueue::new(self.device.index)
    }

    /// Meets the ranks that have the same `id`.
    pub(crate) fn connect(
        &self,
        id: &UniqueId,
        (rank, world_size): (Rank, usize),
        queue: CudaQueue,
        liveness: Liveness,
    ) -> Result<NcclComm> {
        let (symbols, queue, deadline) = (self.library.symbols(), Box::new(queue), Deadline::after(LIMIT));
        // SAFETY: the symbols are those of a library that was looked into; the queue is of this thread's current device.
        unsafe { NcclComm::connect(symbols, id, rank, world_size, queue, liveness, deadline) }
    }

    /// A world of one, whatever the environment says.
    pub(crate) fn alone(&self, queue: CudaQueue, liveness: Liveness) -> Result<NcclComm> {
        let id = UniqueId::new(&self.library.symbols())?;
        self.connect(&id, (Rank(0), 1), queue, liveness)
    }
}
