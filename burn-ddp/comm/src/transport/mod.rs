//! Frames between two ranks.
//!
//! The collectives are the same over any [`Transport`]: loopback in tests, TCP between hosts. (Within one host ranks
//! share memory instead: [`shm`](crate::shm).) Every transport guarantees two things. A frame carries a [`Header`] of
//! its operation and the receiver states the header that it expects, so the first frame reveals that ranks are in
//! different operations, before any byte of it is taken for data. And every wait ends at its deadline, or as soon as
//! [`Liveness`] learns that the group has failed.

use crate::deadline::Deadline;
use crate::error::Result;
use crate::rank::Rank;

pub(crate) mod exchange;
mod frame;
mod liveness;
mod loopback;
pub mod tcp;

pub use frame::Header;
pub use liveness::Liveness;
pub(crate) use liveness::PeerState;
pub use loopback::{LoopbackTransport, loopback};

/// Connections between this rank and each of its peers. Frames between two ranks arrive in order.
///
/// The body of a frame is a list of buffers, so that gradients are sent from, and received into, their own memory. It
/// travels as one run of bytes; the receiver's list may have other lengths.
pub trait Transport: Send + 'static {
    /// The rank of this process.
    fn rank(&self) -> Rank;

    /// Number of processes.
    fn world_size(&self) -> usize;

    /// Sends one frame to `to`; returns when the bytes may be reused.
    ///
    /// # Errors
    /// `Timeout`, `PeerLost`, `PeerFinished`, or the cause for which the group has failed.
    fn send(&mut self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()>;

    /// Receives the next frame of `from`, which must have the header `expect`, into `body`, which has `expect.body`
    /// bytes in all.
    ///
    /// # Errors
    /// Those of [`send`](Transport::send), and [`ErrorKind::Mismatch`](crate::error::ErrorKind::Mismatch) naming both
    /// operations when the frame has another header.
    fn recv(&mut self, from: Rank, expect: &Header, body: &mut [&mut [u8]], deadline: Deadline)
    -> Result<()>;

    /// [`send`](Transport::send) and [`recv`](Transport::recv) at the same time (full duplex), with one peer or two, so
    /// that a ring or pair of ranks that all send first cannot block.
    ///
    /// # Errors
    /// Those of [`recv`](Transport::recv).
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
