//! Inputs of the ranks, and the sum that must result.
//!
//! Element `i` of rank `r` is a whole number that depends on `i` with a prime period. No chunk, segment or block is a
//! multiple of that period, so an element in a wrong place is found. The sum over ranks is a closed form that each rank
//! computes alone. It is exact in every type in which the sums are (bf16 rounds once, as the library promises).

use burn_ddp::{DType, Error, ErrorKind, Rank, Result};
use half::{bf16, f16};

/// Elements after which a pattern repeats.
const PERIOD: usize = 65521;

/// Element `index` of rank 0; rank `r` has `r + 1` times as much.
fn value(index: usize) -> f64 {
    (((index * 40503) >> 7) % 61 + 1) as f64
}

/// The contents of a buffer, of any length.
#[derive(Clone, Debug)]
pub struct Pattern {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Pattern {
    /// The input of `rank`.
    pub fn of_rank(dtype: DType, rank: Rank) -> Self {
        Self::of(dtype, |index| value(index) * (rank.0 + 1) as f64)
    }

    /// The sum of the inputs of `world_size` ranks.
    pub fn sum(dtype: DType, world_size: usize) -> Self {
        // A type may round or wrap an input: the sum is that of the values that it holds.
        let put_in = |index, rank| decode(dtype, &encode(dtype, value(index) * (rank + 1) as f64));
        Self::of(dtype, |index| (0..world_size).map(|rank| put_in(index, rank)).sum())
    }

    fn of(dtype: DType, value: impl Fn(usize) -> f64) -> Self {
        let element = |index| encode(dtype, value(index)).into_iter().take(dtype.size());
        Self { dtype, bytes: (0..PERIOD).flat_map(element).collect() }
    }

    /// Fills `data` with the pattern.
    pub fn fill(&self, data: &mut [u8]) {
        for block in data.chunks_mut(self.bytes.len()) {
            block.copy_from_slice(&self.bytes[..block.len()]);
        }
    }

    /// Compares every element of `data` with the pattern.
    ///
    /// # Errors
    /// `Diverged` with the first element that differs.
    pub fn check(&self, data: &[u8]) -> Result<()> {
        let (period, size) = (self.bytes.len(), self.dtype.size());
        let blocks = data.chunks(period).enumerate();
        let Some((block, got)) = blocks.into_iter().find(|(_, got)| **got != self.bytes[..got.len()]) else {
            return Ok(());
        };
        let differs = |at: &usize| got[*at..].iter().take(size).ne(self.bytes[*at..].iter().take(size));
        let at = (0..got.len()).step_by(size).find(differs).unwrap_or(0);
        let show = |bytes: &[u8]| decode(self.dtype, bytes);
        let message = format!(
            "element {} of {} is {}, not {}",
            (block * period + at) / size,
            data.len() / size,
            show(&got[at..]),
            show(&self.bytes[at..])
        );
        Err(Error::new(ErrorKind::Diverged, message))
    }
}

/// `value` in the first bytes of the result, in the machine's byte order; integers wrap.
fn encode(dtype: DType, value: f64) -> [u8; 8] {
    let mut bytes = [0; 8];
    let mut put = |element: &[u8]| bytes[..element.len()].copy_from_slice(element);
    match dtype {
        DType::U8 => put(&[value as i64 as u8]),
        DType::I32 => put(&(value as i64 as i32).to_ne_bytes()),
        DType::I64 => put(&(value as i64).to_ne_bytes()),
        DType::F16 => put(&f16::from_f64(value).to_ne_bytes()),
        DType::BF16 => put(&bf16::from_f64(value).to_ne_bytes()),
        DType::F32 => put(&(value as f32).to_ne_bytes()),
        DType::F64 => put(&value.to_ne_bytes()),
    }
    bytes
}

/// The first element of `bytes`.
fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
        std::array::from_fn(|at| bytes[at])
    }
    match dtype {
        DType::U8 => bytes[0].into(),
        DType::I32 => i32::from_ne_bytes(array(bytes)).into(),
        DType::I64 => i64::from_ne_bytes(array(bytes)) as f64,
        DType::F16 => f16::from_ne_bytes(array(bytes)).into(),
        DType::BF16 => bf16::from_ne_bytes(array(bytes)).into(),
        DType::F32 => f32::from_ne_bytes(array(bytes)).into(),
        DType::F64 => f64::from_ne_bytes(array(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_ranks() {
        for dtype in DType::ALL {
            let (of_1, sum) = (Pattern::of_rank(dtype, Rank(1)), Pattern::sum(dtype, 2));
            for index in [0, 1, 77, PERIOD - 1] {
                let at = index * dtype.size();
                assert_eq!(decode(dtype, &of_1.bytes[at..]), 2.0 * value(index), "{dtype}");
                assert_eq!(decode(dtype, &sum.bytes[at..]), 3.0 * value(index), "{dtype}");
            }
        }
    }

    #[test]
    fn one_wrong_element_is_named() {
        let sum = Pattern::sum(DType::F32, 2);
        let mut data = vec![0; (PERIOD + 100) * 4];
        sum.fill(&mut data);
        sum.check(&data).unwrap();
        data[(PERIOD + 9) * 4 + 3] ^= 0x80;
        let error = sum.check(&data).unwrap_err().to_string();
        assert!(error.contains(&format!("element {} of {}", PERIOD + 9, PERIOD + 100)), "{error}");
    }

    #[test]
    fn neighbours_and_chunks_differ() {
        let rank_0 = Pattern::of_rank(DType::U8, Rank(0));
        let mut data = vec![0; 1 << 20];
        rank_0.fill(&mut data);
        for shift in (4..19).map(|bits| 1 << bits) {
            assert!(rank_0.check(&data[shift..]).is_err(), "moved by {shift}");
        }
    }
}
