//! The identity of a collective operation: its kind, its reduction and its root. Element type, count and sequence
//! number stand beside it in the header of a frame.
//!
//! One type serves every layer. A program's call becomes an [`Operation`]; an engine matches on it; a frame carries its
//! four-byte code, which the receiver compares, and decodes only for messages.

use std::fmt;

use crate::dtype::ReduceOp;
use crate::rank::Rank;

/// A collective operation, equal on all ranks that take part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Every rank ends with the reduction of all ranks' data.
    AllReduce(ReduceOp),
    /// [`AllReduce`](Operation::AllReduce) of a gradient bucket. It is an operation of its own because overlap sends
    /// buckets when they are ready: a bucket that meets an `all_reduce` of the program of equal size is an error.
    ReduceGradients(ReduceOp),
    /// Rank r ends with chunk r of the reduction.
    ReduceScatter(ReduceOp),
    /// Every rank ends with the data of all ranks, which have equal lengths.
    AllGather,
    /// Every rank ends with the bytes of all ranks, whose lengths may differ.
    AllGatherBytes,
    /// The root ends with the bytes of all ranks, whose lengths may differ.
    GatherBytes(Rank),
    /// Every rank ends with the root's data.
    Broadcast(Rank),
    /// No rank passes before all ranks have arrived.
    Barrier,
}

/// An [`Operation`] as a frame carries it: its number, its reduction (0 without one), and its root.
pub(crate) type OperationCode = [u8; 4];

impl Operation {
    /// The name of the call, as users know it and as statistics count it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) | Self::ReduceGradients(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather | Self::AllGatherBytes => "all_gather",
            Self::GatherBytes(_) => "gather",
            Self::Broadcast(_) => "broadcast",
            Self::Barrier => "barrier",
        }
    }

    /// The reduction of an operation that has one.
    pub fn reduction(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceGradients(op) | Self::ReduceScatter(op) => Some(op),
            _ => None,
        }
    }

    /// The rank that gives or gets the data, if it is one rank.
    pub fn root(self) -> Option<Rank> {
        match self {
            Self::GatherBytes(root) | Self::Broadcast(root) => Some(root),
            _ => None,
        }
    }

    pub(crate) fn encode(self) -> OperationCode {
        let number = match self {
            Self::AllReduce(_) => 1,
            Self::ReduceScatter(_) => 2,
            Self::AllGather => 3,
            Self::Broadcast(_) => 4,
            Self::Barrier => 5,
            Self::GatherBytes(_) => 6,
            Self::ReduceGradients(_) => 7,
            Self::AllGatherBytes => 8,
        };
        let [low, high] = self.root().map_or(0, |root| root.0 as u16).to_le_bytes();
        [number, self.reduction().map_or(0, |op| op as u8), low, high]
    }

    /// The operation of `code`; `None` for a code of another version or program.
    pub(crate) fn decode(code: OperationCode) -> Option<Self> {
        let [number, reduction, low, high] = code;
        let (op, root) = (ReduceOp::from_wire(reduction), Rank(u16::from_le_bytes([low, high]).into()));
        Some(match number {
            1 => Self::AllReduce(op?),
            2 => Self::ReduceScatter(op?),
            3 => Self::AllGather,
            4 => Self::Broadcast(root),
            5 => Self::Barrier,
            6 => Self::GatherBytes(root),
            7 => Self::ReduceGradients(op?),
            8 => Self::AllGatherBytes,
            _ => return None,
        })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        f.write_str(if matches!(self, Self::ReduceGradients(_)) { " of gradients" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_back_and_an_unknown_one_is_none() {
        let root = Rank(513);
        for operation in [
            Operation::AllReduce(ReduceOp::Mean),
            Operation::ReduceGradients(ReduceOp::Sum),
            Operation::ReduceScatter(ReduceOp::Max),
            Operation::AllGather,
            Operation::AllGatherBytes,
            Operation::GatherBytes(root),
            Operation::Broadcast(root),
            Operation::Barrier,
        ] {
            assert_eq!(Operation::decode(operation.encode()), Some(operation));
        }
        assert_eq!(Operation::decode([9, 0, 0, 0]), None);
        assert_eq!(Operation::decode([1, 0, 0, 0]), None, "a reduction that is none");
    }
}
