//! The name under which the ranks of a group find each other in NCCL.

/// Bytes of `ncclUniqueId`.
const BYTES: usize = 128;

/// What rank 0 obtains from NCCL and every rank hands to it: `ncclUniqueId`, 128 opaque bytes. Rank 0's travels to the
/// others through the store of the group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; BYTES]);
