//! The half of the communicator on the communication thread.
//!
//! A bucket goes through four steps, in this order:
//!
//! 1. Wait for the fence. Burn's kernels run on a stream that cannot be reached from outside, so NCCL's stream cannot
//!    wait for them; this thread does. Only kernels of this rank are waited for, and they end without any peer.
//! 2. Start NCCL.
//! 3. While the device works, [`announce`](HostEngine::announce) what was started. NCCL compares nothing: ranks that
//!    disagree on a count would get wrong numbers or wait for ever. The comparison comes after the start because its
//!    round trip costs nothing there; a rank that disagrees has by then written into its own bucket only, within its
//!    bounds.
//! 4. Wait for NCCL, with a deadline.
//!
//! After an error or a panic in any step the bucket holds no result, and its memory must not return to the allocator
//! while NCCL may still write there: first the communicator is aborted, then the bucket is dropped. If NCCL does not
//! return from the abort, the bucket is leaked. The group is told the cause before the abort, which would otherwise be
//! taken for it.
//!
//! When a group has ended, every rank aborts, also one that is busy elsewhere (`abandon`): NCCL lets no rank of a host
//! finish its abort before the others have begun theirs.
//!
//! Operations on host memory (bytes, barriers, boolean tensors) use the [`HostEngine`].
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn_ddp::communicator::{Deadline, Engine, HostEngine, Liveness, Memory, Operation, Segment, Staged};
use burn_ddp::{DType, Error, ErrorKind, Result};

use crate::bucket::Bucket;
use crate::comm::NcclComm;

/// Runs collectives on the buckets of an [`NcclCommunicator`](crate::communicator::NcclCommunicator) by NCCL.
pub(crate) struct NcclEngine {
    comm: NcclComm,
    host: HostEngine,
    liveness: Liveness,
    timeout: Duration,
}

impl NcclEngine {
    /// An engine over `comm`, on whose device all buckets must lie. Each collective may last `timeout`; `liveness` is
    /// that of the group.
    pub(crate) fn new(comm: NcclComm, host: HostEngine, liveness: Liveness, timeout: Duration) -> Self {
        Self { comm, host, liveness, timeout }
    }

    fn collective(&mut self, operation: Operation, dtype: DType, bucket: &mut Bucket) -> Result<()> {
        bucket.wait_for_fence()?;
        self.start(operation, dtype, bucket)?;
        let deadline = Deadline::after(self.timeout);
        self.host.announce(operation, dtype, bucket.elements(), bucket.division(), deadline)?;
        self.comm.wait(deadline)
    }

    /// Ends the group with the cause `error`, aborts NCCL, and returns the error.
    fn fail(&mut self, error: Error) -> Error {
        self.liveness.fail(error.clone());
        self.comm.abort();
        error
    }

    /// Starts `operation`, unless the bucket has no elements.
    fn start(&mut self, operation: Operation, dtype: DType, bucket: &Bucket) -> Result<()> {
        let Some(span) = bucket.span() else { return Ok(()) };
        // SAFETY: `DeviceAccess` promises the memory, of at least the plan's size, for as long as the bucket lives, to
        // us alone now that the fence is reached. `run` keeps the bucket until NCCL is done or aborted.
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
            let error = self.fail(error);
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
