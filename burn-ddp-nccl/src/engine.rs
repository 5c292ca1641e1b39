//! The communication thread's half of the communicator.
//!
//! A bucket goes through four steps, and their order is what makes a result right or an error soon:
//!
//! 1. Wait for the fence. Burn's kernels run on a stream that cannot be reached from outside, so NCCL's stream cannot be
//!    made to wait for them and this thread does. Only kernels of this rank are waited for, which end without any peer.
//! 2. Start NCCL.
//! 3. While the device works, [`announce`](HostEngine::announce) what was started. NCCL compares nothing: ranks
//!    that disagree on a count would get wrong numbers or wait for ever. After NCCL has been started, because comparing
//!    takes a round trip that costs nothing there; a rank that disagrees has by then written into its own bucket only,
//!    and no more of it than it holds.
//! 4. Wait for NCCL, with a deadline.
//!
//! After an error in any of them, or a panic, the bucket is nobody's result, and its memory must not return to the allocator
//! while NCCL may still write there: first the communicator is aborted, then the bucket is dropped. If NCCL does not come
//! back from the abort, the bucket stays for ever. The cause is told to the group before that, since an abort alone would
//! be taken for the cause.
//!
//! A group that has ended is aborted by every rank, also by one that is busy elsewhere (`abandon`): NCCL lets no rank of
//! a host finish its abort before the others have begun theirs.
//!
//! What is in host memory (bytes, barriers, boolean tensors) goes the host's way.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn_ddp::communicator::{
    Deadline, Engine, HostEngine, Liveness, Memory, Operation, Segment, Staged,
};
use burn_ddp::{DType, Error, ErrorKind, Result};

use crate::NcclComm;
use crate::device_buffer::Bucket;

/// Runs collectives of an [`NcclCommunicator`](crate::NcclCommunicator)'s buckets on NCCL. See the
/// [module documentation](self).
pub struct NcclEngine {
    comm: NcclComm,
    host: HostEngine,
    liveness: Liveness,
    timeout: Duration,
}

impl NcclEngine {
    /// An engine over `comm`, on whose device all buckets must lie. Each collective may last `timeout`; `liveness` is
    /// that of the group.
    pub fn new(comm: NcclComm, host: HostEngine, liveness: Liveness, timeout: Duration) -> Self {
        Self { comm, host, liveness, timeout }
    }

    fn collective(&mut self, operation: Operation, dtype: DType, bucket: &mut Bucket) -> Result<()> {
        bucket.wait_for_fence()?;
        self.start(operation, dtype, bucket)?;
        let deadline = Deadline::after(self.timeout);
        self.host.announce(operation, dtype, bucket.elements(), bucket.division(), deadline)?;
        self.comm.wait(deadline)
    }

    /// Ends the group because of `error`, which it returns; NCCL writes nowhere any more.
    fn end(&mut self, error: Error) -> Error {
        self.liveness.fail(error.clone());
        self.comm.abort();
        error
    }

    /// Starts `operation`, unless there is nothing to move.
    fn start(&mut self, operation: Operation, dtype: DType, bucket: &Bucket) -> Result<()> {
        let Some(span) = bucket.span() else { return Ok(()) };
        // SAFETY: `DeviceAccess` promises the memory, of at least the plan's size, for as long as the bucket lives, to us
        // alone now that the fence is reached. `run` keeps the bucket until NCCL is done or aborted.
        unsafe {
            match operation {
                Operation::AllReduce(op) | Operation::ReduceGradients(op) => {
                    self.comm.start_all_reduce(&[span], dtype, op)
                }
                Operation::Broadcast(root) => self.comm.start_broadcast(&[span], dtype, root),
                Operation::ReduceScatter(op) => self.comm.start_reduce_scatter(span, dtype, op),
                Operation::AllGather => self.comm.start_all_gather(span, dtype),
                Operation::AllGatherBytes | Operation::GatherBytes(_) | Operation::Barrier => {
                    Err(Error::new(ErrorKind::Config, format!("{operation} of a device's memory")))
                }
            }
        }
    }
}

impl Engine for NcclEngine {
    fn run(&mut self, operation: Operation, mut staged: Staged) -> Result<Staged> {
        if staged.iter().all(|segment| matches!(segment.memory, Memory::Host(_))) {
            return self.host.run(operation, staged);
        }
        let (dtype, mut bucket) = Bucket::take(&mut staged)?;
        let ran = catch_unwind(AssertUnwindSafe(|| self.collective(operation, dtype, &mut bucket)))
            .unwrap_or_else(|panic| Err(Error::panicked("the communication thread", &*panic)));
        if let Err(error) = ran {
            let error = self.end(error);
            if !self.comm.is_released() {
                std::mem::forget(bucket);
            }
            return Err(error);
        }
        bucket.set_done();
        Ok(vec![Segment { dtype, memory: Memory::Device(bucket) }])
    }

    fn abandon(&mut self) {
        self.comm.abort();
    }
}
