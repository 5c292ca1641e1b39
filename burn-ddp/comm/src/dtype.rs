//! Element types and reductions that travel between ranks.
//!
//! This package has enumerations of its own because it knows no type of Burn. Their numbers are part of the wire
//! format.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Element type of a buffer.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// 8-bit unsigned integer; also raw bytes.
    U8 = 1,
    /// 32-bit signed integer.
    I32 = 2,
    /// 64-bit signed integer.
    I64 = 3,
    /// IEEE half precision.
    F16 = 4,
    /// Brain float.
    BF16 = 5,
    /// IEEE single precision.
    F32 = 6,
    /// IEEE double precision.
    F64 = 7,
}

impl DType {
    /// All types, in the order of their wire numbers.
    pub const ALL: [DType; 7] =
        [DType::U8, DType::I32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// The type with wire number `number`.
    pub(crate) fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u8 == number)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        })
    }
}

/// Operation that makes one element of those of all ranks.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum; integers wrap.
    Sum = 1,
    /// The sum divided by the number of ranks, once, before rounding; integers round toward zero.
    #[default]
    Mean = 2,
    /// The smallest; NaN if any rank has NaN.
    Min = 3,
    /// The largest; NaN if any rank has NaN.
    Max = 4,
}

impl ReduceOp {
    /// The operation with wire number `number`.
    pub(crate) fn from_wire(number: u8) -> Option<Self> {
        [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max]
            .into_iter()
            .find(|op| *op as u8 == number)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        })
    }
}
