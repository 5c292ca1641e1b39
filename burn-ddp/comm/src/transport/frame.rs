//! The header in front of every frame.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::operation::{Operation, OperationCode};
use crate::rank::Rank;

/// First bytes of every header; a stray connection does not have them.
const MAGIC: u16 = 0xDD91;

/// Says which operation a frame belongs to: 32 bytes, in the byte order of the machine (all ranks of a run
/// have the same architecture; the magic number read in the wrong order refuses anything else).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    magic: u16,
    operation: OperationCode,
    dtype: u8,
    phase: u8,
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

    /// The header of `operation`, the group's number `sequence`, over `count` elements, without a body yet.
    pub fn new(operation: Operation, sequence: u64, dtype: DType, count: usize) -> Self {
        Self {
            magic: MAGIC,
            operation: operation.encode(),
            dtype: dtype as u8,
            phase: 0,
            sequence,
            count: count as u64,
            body: 0,
        }
    }

    /// The same header for `bytes` of body in phase `phase` of its operation.
    pub fn with_body(self, phase: u8, bytes: usize) -> Self {
        Self { phase, body: bytes as u64, ..self }
    }

    /// True if these are the bytes of a header of this protocol at all.
    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC
    }

    /// True if a frame with header `other`, found with a rank that is not its turn yet, shows that the rank is out of
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
        let operation = Operation::decode(self.operation);
        match operation {
            Some(operation) => write!(f, "{operation}")?,
            None => write!(f, "unknown operation {:?}", self.operation)?,
        }
        write!(f, " #{} (", self.sequence as i64)?;
        if let Some(op) = operation.and_then(Operation::reduction) {
            write!(f, "{op}, ")?;
        }
        if let Some(root) = operation.and_then(Operation::root) {
            write!(f, "root {}, ", root.0)?;
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
