//! The header in front of every frame.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;

/// Which collective a frame belongs to.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpKind {
    /// Every rank ends with the reduction of all ranks' data.
    AllReduce = 1,
    /// Every rank ends with its chunk of the reduction.
    ReduceScatter = 2,
    /// Every rank ends with the data of all ranks.
    AllGather = 3,
    /// Every rank ends with the root's data.
    Broadcast = 4,
    /// Nobody passes before everybody has arrived.
    Barrier = 5,
    /// The root ends with the data of all ranks.
    Gather = 6,
    /// [`AllReduce`](OpKind::AllReduce) of a bucket that a replica sends. Of a kind of its own because overlap lets buckets
    /// leave when they are ready: where a rank's own collective meets one of equal size, the two must not be taken for one.
    ReduceGradients = 7,
}

impl OpKind {
    /// All kinds, in the order of their wire numbers.
    pub const ALL: [OpKind; 7] = [
        OpKind::AllReduce,
        OpKind::ReduceScatter,
        OpKind::AllGather,
        OpKind::Broadcast,
        OpKind::Barrier,
        OpKind::Gather,
        OpKind::ReduceGradients,
    ];

    /// The name users know.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::AllReduce => "all_reduce",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::AllGather => "all_gather",
            OpKind::Broadcast => "broadcast",
            OpKind::Barrier => "barrier",
            OpKind::Gather => "gather",
            OpKind::ReduceGradients => "all_reduce of gradients",
        }
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// First bytes of every header; a stray connection does not have them.
const MAGIC: u16 = 0xDD91;
/// `Header::root` of operations without a root.
const NO_ROOT: u16 = u16::MAX;

/// Says which operation a frame belongs to: 32 bytes, in the byte order of the machine (all ranks of a run
/// have the same architecture; the magic number read in the wrong order refuses anything else).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    magic: u16,
    kind: u8,
    dtype: u8,
    reduce: u8,
    phase: u8,
    root: u16,
    /// Position of the operation in the group's history, from 0 (before that, in which ranks meet, it is negative and
    /// wraps); equal on all ranks.
    pub sequence: u64,
    /// Elements of the whole operation as its caller gave it; equal on all ranks.
    pub count: u64,
    /// Bytes that follow this header.
    pub body: u64,
}

impl Header {
    /// Bytes of a header.
    pub const SIZE: usize = size_of::<Header>();

    /// The header of operation number `sequence` over `count` elements, without a body yet.
    pub fn new(kind: OpKind, sequence: u64, dtype: DType, count: usize) -> Self {
        Self {
            magic: MAGIC,
            kind: kind as u8,
            dtype: dtype as u8,
            reduce: 0,
            phase: 0,
            root: NO_ROOT,
            sequence,
            count: count as u64,
            body: 0,
        }
    }

    /// The same header naming a reduction.
    pub fn with_reduce(self, op: ReduceOp) -> Self {
        Self { reduce: op as u8, ..self }
    }

    /// The same header naming a root.
    pub fn with_root(self, root: Rank) -> Self {
        Self { root: root.0 as u16, ..self }
    }

    /// The same header for `bytes` of body in phase `phase` of its operation.
    pub fn with_body(self, phase: u8, bytes: usize) -> Self {
        Self { phase, body: bytes as u64, ..self }
    }

    /// Whether these are the bytes of a header of this protocol at all.
    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC
    }

    /// Whether a frame with header `other`, found with a rank that is not its turn yet, shows that the rank is out of
    /// step: in another operation of the same number, or still in an earlier one. It may be ahead.
    pub(crate) fn contradicts(&self, other: &Header) -> bool {
        let of_operation = |header: &Header| Self { phase: 0, body: 0, ..*header };
        !other.is_valid()
            || (other.sequence.wrapping_sub(self.sequence) as i64) < 0
            || (other.sequence == self.sequence && of_operation(self) != of_operation(other))
    }

    /// The error for a frame of `peer` that has header `got` where this rank, `me`, expected `self`.
    pub fn mismatch(&self, me: Rank, peer: Rank, got: &Header) -> Error {
        if !got.is_valid() {
            return Error::new(
                ErrorKind::Mismatch,
                format!(
                    "{peer} sent bytes that are not a frame while {me} is in {self}: another version or program"
                ),
            );
        }
        Error::new(
            ErrorKind::Mismatch,
            format!(
                "ranks are in different operations: {me} is in {self}, {peer} is in {got}; \
                 all ranks must call the same collectives in the same order"
            ),
        )
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match OpKind::ALL.into_iter().find(|kind| *kind as u8 == self.kind) {
            Some(kind) => write!(f, "{kind}")?,
            None => write!(f, "unknown operation {}", self.kind)?,
        }
        write!(f, " #{} (", self.sequence as i64)?;
        if let Some(op) = ReduceOp::from_wire(self.reduce) {
            write!(f, "{op}, ")?;
        }
        if self.root != NO_ROOT {
            write!(f, "root {}, ", self.root)?;
        }
        match DType::from_wire(self.dtype) {
            Some(dtype) => write!(f, "{} x {dtype})", self.count),
            None => write!(f, "{} elements)", self.count),
        }
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} phase {} body {}", self.phase, self.body)
    }
}
