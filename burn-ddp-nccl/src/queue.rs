//! Where NCCL enqueues, as seen by the one who waits for it.
//!
//! A CUDA stream can be waited for without end, and that is what nobody here may do: a collective whose peer has died
//! never finishes. So the seam has no wait. It has a mark that is set and asked for, and between two questions the
//! communicator looks at everything else that may end the wait.

use burn_ddp::Result;

use crate::symbols::RawStream;

/// A CUDA stream. A trait so that a test can put host memory and a thread in its place.
pub trait Queue {
    /// The stream that NCCL is handed.
    fn raw(&self) -> RawStream;

    /// Records the point after everything that has been enqueued so far, in place of the one before.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`](burn_ddp::ErrorKind::Device) when the device has failed.
    fn mark(&mut self) -> Result<()>;

    /// Whether the last mark is reached. Never blocks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`](burn_ddp::ErrorKind::Device) when the device has failed, also in work before the mark.
    fn reached(&mut self) -> Result<bool>;
}
