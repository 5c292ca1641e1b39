//! NCCL without Burn: device memory and a communicator.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::time::Duration;

use burn::tensor::backend::Backend;
use burn_ddp::communicator::{Deadline, Liveness};
use burn_ddp::{DType, Error, ErrorKind, ProcessGroup, ReduceOp, Result};
use burn_ddp_nccl::library::Library;
use burn_ddp_nccl::{CudaStream, NcclComm, Span, UniqueId};
use cudarc::driver::result::{
    ctx, free_sync, malloc_sync, memcpy_dtoh_sync, memcpy_htod_sync, memset_d8_sync,
};
use cudarc::driver::{DriverError, sys::CUdeviceptr};

use crate::table::ELEMENT;

/// Longest wait for the other ranks. This communicator has no control channel, so a peer's death is noticed by it.
const LIMIT: Duration = Duration::from_secs(60);

/// A communicator with memory to reduce from and to.
pub(crate) struct Raw {
    // Memory goes before the communicator, whose stream keeps the device's context.
    send: Memory,
    recv: Memory,
    comm: NcclComm,
}

impl Raw {
    /// Connects the ranks of `group`, on device `ordinal` of this process, for up to `bytes`.
    pub(crate) fn connect<B: Backend>(
        group: &ProcessGroup<B>,
        library: &Library,
        ordinal: usize,
        bytes: usize,
    ) -> Result<Self> {
        let symbols = library.symbols();
        // Every rank gets all ids; rank 0's is used.
        let mine = match group.rank().is_root() {
            true => UniqueId::new(&symbols)?.as_bytes().to_vec(),
            false => Vec::new(),
        };
        let id = UniqueId::from_bytes(&group.all_gather_bytes(mine)?[0])?;
        // From here on this thread has the context of the device.
        let stream = Box::new(CudaStream::new(ordinal)?);
        let (send, recv) = (Memory::new(bytes)?, Memory::new(bytes)?);
        let world_size = group.world_size();
        let (liveness, deadline) = (Liveness::new(world_size), Deadline::after(LIMIT));
        // SAFETY: the table is NCCL's own, and the stream is of the device that is current on this thread.
        let comm =
            unsafe { NcclComm::connect(symbols, &id, group.rank(), world_size, stream, liveness, deadline)? };
        Ok(Self { send, recv, comm })
    }

    /// Writes `values` into the input, and bytes that are no number into the output.
    pub(crate) fn fill(&mut self, values: &[f32]) -> Result<()> {
        self.send.holds(values.len())?;
        // SAFETY: both have room for `values`, and nothing is in flight.
        unsafe { memcpy_htod_sync(self.send.address, values) }
            .map_err(|error| failed("cuMemcpyHtoD", error))?;
        // SAFETY: the same.
        unsafe { memset_d8_sync(self.recv.address, 0xff, values.len() * ELEMENT) }
            .map_err(|error| failed("cuMemsetD8", error))?;
        // Neither call has to be done when it returns, and NCCL's stream does not wait for theirs.
        ctx::synchronize().map_err(|error| failed("cuCtxSynchronize", error))
    }

    /// Sums `count` elements over all ranks and waits for them.
    pub(crate) fn all_reduce(&mut self, count: usize) -> Result<()> {
        self.send.holds(count)?;
        let (send, recv) = (self.send.address as *const c_void, self.recv.address as *mut c_void);
        // SAFETY: memory of this device with room for `count` elements, which nothing else uses before the wait is
        // over. On an error the communicator has been aborted.
        unsafe {
            self.comm.start_all_reduce(&[Span { send, recv, count }], DType::F32, ReduceOp::Sum)?;
        }
        self.comm.wait(Deadline::after(LIMIT))
    }

    /// The first `count` elements of the sum.
    pub(crate) fn sum(&self, count: usize) -> Result<Vec<f32>> {
        self.recv.holds(count)?;
        let mut values = vec![0.0; count];
        // SAFETY: the memory has so many elements, and nothing is in flight. The call returns when the copy is done.
        unsafe { memcpy_dtoh_sync(&mut values, self.recv.address) }
            .map_err(|error| failed("cuMemcpyDtoH", error))?;
        Ok(values)
    }

    /// Finalizes the communicator.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.comm.finish()
    }
}

/// Memory of the device.
struct Memory {
    address: CUdeviceptr,
    bytes: usize,
}

impl Memory {
    fn new(bytes: usize) -> Result<Self> {
        // SAFETY: read only where it has been written.
        let address = unsafe { malloc_sync(bytes) };
        address
            .map(|address| Self { address, bytes })
            .map_err(|error| failed(&format!("cuMemAlloc of {bytes} bytes"), error))
    }

    fn holds(&self, count: usize) -> Result<()> {
        if count * ELEMENT > self.bytes {
            return Err(Error::config(format!("{count} elements do not fit into {} bytes", self.bytes)));
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The process is about to end, so an error does not matter.
        // SAFETY: allocated by `new`, freed here only, and not in use: each all-reduce is waited for or aborted.
        let _ = unsafe { free_sync(self.address) };
    }
}

fn failed(call: &str, error: DriverError) -> Error {
    Error::new(ErrorKind::Device, format!("{call} failed: {error:?}"))
}
