//! Frames between two ranks, and nothing about what they mean.
//!
//! The seam exists because the collectives are the same over any wire: loopback in tests, TCP between hosts. (Inside of
//! one host ranks share memory, and send nothing: [`shm`](crate::shm).) What every wire owes them is fixed here. A frame carries a [`Header`] that says
//! which operation it belongs to, and the receiver says which header it expects: disagreement between ranks
//! is found by the first frame, before a byte of it could be taken for data. Every wait has a deadline, and
//! every wait ends early when [`Liveness`] learns that the group is lost.

use crate::deadline::Deadline;
use crate::error::Result;
use crate::rank::Rank;

pub(crate) mod exchange;
mod frame;
mod liveness;
mod loopback;
mod peer;
pub(crate) mod poll;
pub mod tcp;

pub use frame::{Header, OpKind};
pub use liveness::{Liveness, PeerState};
pub use loopback::{LoopbackTransport, loopback};
pub use peer::PeerInfo;

/// A wire between this rank and each of its peers. Frames between two ranks arrive in order.
///
/// A body is a list of buffers, sent as one run of bytes and received into another list, which may be cut
/// elsewhere: gradients leave from their own memory and arrive in it.
pub trait Transport: Send + 'static {
    /// This process.
    fn rank(&self) -> Rank;

    /// Number of processes.
    fn world_size(&self) -> usize;

    /// Sends one frame to `to`; returns when the bytes may be reused.
    fn send(&mut self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()>;

    /// Receives the next frame of `from`, which must have the header `expect`, into `body`, which has
    /// `expect.body` bytes in all.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`](crate::error::ErrorKind::Mismatch) naming both operations when the header is
    /// another one, `Timeout`, `PeerLost`, or the cause for which the group was aborted.
    fn recv(&mut self, from: Rank, expect: &Header, body: &mut [&mut [u8]], deadline: Deadline)
    -> Result<()>;

    /// [`send`](Transport::send) and [`recv`](Transport::recv) at the same time (full duplex), to and from the
    /// same peer or two different ones, so that a ring or pair of ranks that all send first cannot block.
    #[allow(clippy::too_many_arguments, reason = "one frame out, one frame in")]
    fn send_recv(
        &mut self,
        to: Rank,
        header: &Header,
        body: &[&[u8]],
        from: Rank,
        expect: &Header,
        into: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()>;
}
