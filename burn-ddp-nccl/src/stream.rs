//! The stream on which NCCL enqueues its work.
//!
//! CUDA can block on a stream without end, which no thread here may do: a collective whose peer has died never
//! finishes. So the trait has no wait. It records an event and polls it, and between two polls the communicator checks
//! everything else that may end the wait.

use burn_ddp::Result;

use crate::symbols::RawStream;

/// A CUDA stream with one event. A trait, so that tests can use host memory and a thread.
pub trait Stream {
    /// The stream that NCCL is given.
    fn raw(&self) -> RawStream;

    /// Records the event behind everything that has been enqueued so far; it replaces the one recorded before.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`](burn_ddp::ErrorKind::Device) when the device has failed.
    fn record(&mut self) -> Result<()>;

    /// Polls the recorded event: true if it is reached. Never blocks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`](burn_ddp::ErrorKind::Device) when the device has failed, also in work before the event.
    fn is_reached(&mut self) -> Result<bool>;
}
