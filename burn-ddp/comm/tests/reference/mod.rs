//! The inputs of the cases, and what they must reduce to: a plain fold, element by element, that shares no
//! code with the library.

use burn_ddp_comm::dtype::{DType, ReduceOp};
use half::{bf16, f16};

/// Bytes that are aligned for every type.
#[derive(Clone)]
pub struct Buffer {
    words: Vec<u128>,
    /// Length in bytes.
    pub bytes: usize,
}

impl Buffer {
    /// Zeros.
    pub fn zeroed(bytes: usize) -> Self {
        Self { words: vec![0; bytes.div_ceil(16)], bytes }
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// The content.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    /// The content.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// One element in the type it is combined in.
#[derive(Clone, Copy)]
enum Wide {
    F32(f32),
    F64(f64),
    Int(i128),
}

impl Wide {
    fn read(dtype: DType, bytes: &[u8]) -> Self {
        use bytemuck::pod_read_unaligned as read;
        match dtype {
            DType::U8 => Wide::Int(bytes[0].into()),
            DType::I32 => Wide::Int(read::<i32>(bytes).into()),
            DType::I64 => Wide::Int(read::<i64>(bytes).into()),
            DType::F16 => Wide::F32(read::<f16>(bytes).to_f32()),
            DType::BF16 => Wide::F32(read::<bf16>(bytes).to_f32()),
            DType::F32 => Wide::F32(read(bytes)),
            DType::F64 => Wide::F64(read(bytes)),
        }
    }

    fn write(self, dtype: DType, into: &mut Vec<u8>) {
        match (dtype, self) {
            (DType::U8, Wide::Int(value)) => into.push(value as u8),
            (DType::I32, Wide::Int(value)) => into.extend((value as i32).to_ne_bytes()),
            (DType::I64, Wide::Int(value)) => into.extend((value as i64).to_ne_bytes()),
            (DType::F16, Wide::F32(value)) => into.extend(f16::from_f32(value).to_ne_bytes()),
            (DType::BF16, Wide::F32(value)) => into.extend(bf16::from_f32(value).to_ne_bytes()),
            (DType::F32, Wide::F32(value)) => into.extend(value.to_ne_bytes()),
            (DType::F64, Wide::F64(value)) => into.extend(value.to_ne_bytes()),
            _ => unreachable!("{dtype} is not combined in this type"),
        }
    }

    fn combined(self, other: Self, op: ReduceOp) -> Self {
        macro_rules! float {
            ($wide:path, $a:ident, $b:ident) => {
                $wide(match op {
                    ReduceOp::Sum | ReduceOp::Mean => $a + $b,
                    _ if $a.is_nan() || $b.is_nan() => $a + $b,
                    ReduceOp::Min if $b < $a => $b,
                    ReduceOp::Max if $b > $a => $b,
                    ReduceOp::Min | ReduceOp::Max => $a,
                })
            };
        }
        match (self, other) {
            (Wide::F32(a), Wide::F32(b)) => float!(Wide::F32, a, b),
            (Wide::F64(a), Wide::F64(b)) => float!(Wide::F64, a, b),
            (Wide::Int(a), Wide::Int(b)) => Wide::Int(match op {
                ReduceOp::Sum | ReduceOp::Mean => a + b,
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
            }),
            _ => unreachable!("both are of one type"),
        }
    }

    /// The mean of a sum; and one NaN for all, since NaN compares by bits here.
    fn finished(self, op: ReduceOp, world: usize) -> Self {
        let mean = op == ReduceOp::Mean;
        match self {
            Wide::F32(value) if value.is_nan() => Wide::F32(f32::NAN),
            Wide::F64(value) if value.is_nan() => Wide::F64(f64::NAN),
            Wide::F32(value) if mean => Wide::F32(value / world as f32),
            Wide::F64(value) if mean => Wide::F64(value / world as f64),
            Wide::Int(value) if mean => Wide::Int(value / world as i128),
            other => other,
        }
    }
}

/// The reduction of the ranks' inputs, element by element.
pub fn reference(op: ReduceOp, dtype: DType, inputs: &[Buffer]) -> Vec<u8> {
    fn tree(op: ReduceOp, values: &[Wide]) -> Wide {
        match values {
            [value] => *value,
            _ => {
                let (left, right) = values.split_at(values.len() - values.len() / 2);
                tree(op, left).combined(tree(op, right), op)
            }
        }
    }
    let size = dtype.size();
    let mut out = Vec::with_capacity(inputs[0].bytes);
    for at in (0..inputs[0].bytes).step_by(size) {
        let values: Vec<Wide> =
            inputs.iter().map(|input| Wide::read(dtype, &input.bytes()[at..at + size])).collect();
        tree(op, &values).finished(op, inputs.len()).write(dtype, &mut out);
    }
    out
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Values of many magnitudes, and now and then one with a trap in it.
    fn float(&mut self) -> f64 {
        const TRAPS: [f64; 8] =
            [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 5.96e-8, 65504.0, f64::MIN_POSITIVE];
        let bits = self.next();
        if bits.is_multiple_of(32) {
            return TRAPS[(bits >> 8) as usize % TRAPS.len()];
        }
        let unit = (bits >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        unit * 10f64.powi((bits % 9) as i32 - 4)
    }
}

/// The input of `rank`.
pub fn input(dtype: DType, count: usize, rank: usize) -> Buffer {
    let mut random = Random((dtype as u64) << 48 | (count as u64) << 8 | rank as u64);
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        let value = match dtype {
            DType::F16 | DType::BF16 | DType::F32 => Wide::F32(random.float() as f32),
            DType::F64 => Wide::F64(random.float()),
            DType::U8 | DType::I32 | DType::I64 => Wide::Int(random.next() as i64 as i128),
        };
        value.write(dtype, &mut bytes);
    }
    Buffer::from_bytes(&bytes)
}
