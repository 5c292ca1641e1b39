//! The arithmetic of each element type.
//!
//! A reduction is only as good as the type it adds in: two half-precision gradients of 40000 have a mean of
//! 40000, but their half-precision sum is infinite, and dividing first loses the smallest ones. So elements
//! are widened to an [`Accumulator`], combined there, and rounded once. Half precision is converted several at a
//! time by the processor, and far slower one by one; all other types one by one, which compilers make vectors of.

use bytemuck::{Pod, PodCastError};
use half::{bf16, f16};

use super::simd::Simd;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Evaluates an expression with `$T` standing for the Rust type of a [`DType`]: the one place where a value becomes a
/// type.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::U8 => with_element!(@as u8, $T => $body),
            $crate::dtype::DType::I32 => with_element!(@as i32, $T => $body),
            $crate::dtype::DType::I64 => with_element!(@as i64, $T => $body),
            $crate::dtype::DType::F16 => with_element!(@as half::f16, $T => $body),
            $crate::dtype::DType::BF16 => with_element!(@as half::bf16, $T => $body),
            $crate::dtype::DType::F32 => with_element!(@as f32, $T => $body),
            $crate::dtype::DType::F64 => with_element!(@as f64, $T => $body),
        }
    };
    (@as $type:ty, $T:ident => $body:expr) => {{
        type $T = $type;
        $body
    }};
}
pub(super) use with_element;

/// A type in which elements of several ranks are combined.
pub(super) trait Accumulator: Pod + Default {
    fn add(self, other: Self) -> Self;
    /// The smaller one; the left one of equals (zeros of both signs), NaN if either is.
    fn least(self, other: Self) -> Self;
    /// The larger one; the left one of equals (zeros of both signs), NaN if either is.
    fn greatest(self, other: Self) -> Self;
    /// One `ranks`-th; integers round toward zero.
    fn divided(self, ranks: usize) -> Self;
    /// The value with one bit pattern for all NaN. Which operand's payload an addition passes on is the compiler's
    /// choice, and may differ between the vectorized part of a block and its end.
    fn canonical(self) -> Self;
}

/// A type of which data consists.
pub(super) trait Element: Pod {
    type Acc: Accumulator;

    /// True if compilers make fast loops of conversions one by one.
    const CONVERTS_SINGLY: bool = true;

    fn wide(self) -> Self::Acc;

    /// Rounds a canonical value; integers that do not fit wrap.
    fn narrowed(value: Self::Acc) -> Self;

    #[inline(always)]
    fn widen(_: Simd, values: &[Self], into: &mut [Self::Acc]) {
        into.iter_mut().zip(values).for_each(|(into, value)| *into = value.wide());
    }

    #[inline(always)]
    fn narrow(_: Simd, values: &[Self::Acc], into: &mut [Self]) {
        into.iter_mut().zip(values).for_each(|(into, value)| *into = Self::narrowed(*value));
    }
}

macro_rules! float_accumulator {
    ($($float:ident),*) => {$(
        impl Accumulator for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                if self <= other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                if self >= other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn divided(self, ranks: usize) -> Self {
                self / ranks as $float
            }
            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() { $float::NAN } else { self }
            }
        }

        impl Element for $float {
            type Acc = $float;
            #[inline(always)]
            fn wide(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrowed(value: Self) -> Self {
                value
            }
        }
    )*};
}
float_accumulator!(f32, f64);

impl Element for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// To the nearest, ties to even: half of the last place is added, and a little less where that place is even.
    /// Too large values carry into infinity, and a canonical NaN has nothing that could carry.
    #[inline(always)]
    fn narrowed(value: f32) -> Self {
        let bits = value.to_bits();
        let half = 0x7FFF + ((bits >> 16) & 1);
        bf16::from_bits((bits.wrapping_add(half) >> 16) as u16)
    }
}

impl Element for f16 {
    type Acc = f32;
    const CONVERTS_SINGLY: bool = false;
    fn wide(self) -> f32 {
        self.to_f32()
    }
    fn narrowed(value: f32) -> Self {
        f16::from_f32(value)
    }
    #[inline(always)]
    fn widen(simd: Simd, values: &[Self], into: &mut [f32]) {
        simd.widen_f16(values, into);
    }
    #[inline(always)]
    fn narrow(simd: Simd, values: &[f32], into: &mut [Self]) {
        simd.narrow_f16(values, into);
    }
}

macro_rules! integer_accumulator {
    ($($wide:ident),*) => {$(
        impl Accumulator for $wide {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn divided(self, ranks: usize) -> Self {
                self / ranks as $wide
            }
            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }
        }
    )*};
}
integer_accumulator!(i64, i128);

macro_rules! integer_element {
    ($($narrow:ident -> $wide:ident),*) => {$(
        impl Element for $narrow {
            type Acc = $wide;
            #[inline(always)]
            fn wide(self) -> $wide {
                self.into()
            }
            #[inline(always)]
            fn narrowed(value: $wide) -> Self {
                value as $narrow
            }
        }
    )*};
}
integer_element!(u8 -> i64, i32 -> i64, i64 -> i128);

/// True if `data` is aligned to elements of `dtype`.
pub(crate) fn is_aligned(dtype: DType, data: &[u8]) -> bool {
    // The pointer of an empty slice may be anything.
    data.is_empty() || with_element!(dtype, T => data.as_ptr().cast::<T>().is_aligned())
}

/// `bytes` as elements of `dtype`, or as its accumulators.
pub(super) fn elements<T: Pod>(dtype: DType, bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|error| unusable(dtype, error))
}

/// Like [`elements`], for writing.
pub(super) fn elements_mut<T: Pod>(dtype: DType, bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| unusable(dtype, error))
}

fn unusable(dtype: DType, error: PodCastError) -> Error {
    Error::config(format!("a buffer cannot be read as {dtype}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduction::simd::{run_portable, run_vectorized};

    #[test]
    fn dispatch_knows_the_size_of_every_type() {
        for dtype in DType::ALL {
            assert_eq!(with_element!(dtype, T => size_of::<T>()), dtype.size());
        }
    }

    #[test]
    fn min_and_max_pass_nan_on_from_either_side() {
        for (left, right) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            assert!(left.least(right).is_nan() && left.greatest(right).is_nan());
        }
        assert_eq!((1.0f64.least(2.0), 1.0f64.greatest(2.0)), (1.0, 2.0));
        assert!(0.0f32.least(-0.0).is_sign_positive() && (-0.0f32).greatest(0.0).is_sign_negative());
    }

    #[test]
    fn integers_wrap_when_narrowed_and_round_toward_zero() {
        assert_eq!(u8::narrowed(300), 44);
        assert_eq!(((-7i64).divided(2), 7i128.divided(2)), (-3, 3));
    }

    #[test]
    fn brain_floats_round_like_those_of_the_library() {
        let mut bits = 1u32;
        for step in 0..300_000u32 {
            // Every pattern near a tie, and scattered ones.
            bits =
                if step < 0x2_0000 { (step << 15) | (step & 1) } else { bits.wrapping_mul(747_796_405) + 1 };
            let value = f32::from_bits(bits).canonical();
            let (got, expected) = (bf16::narrowed(value), bf16::from_f32(value));
            assert_eq!(got.to_bits(), expected.to_bits(), "{value} ({bits:#x})");
            assert_eq!(got.wide().to_bits(), expected.to_f32().to_bits());
        }
    }

    #[test]
    fn half_precision_is_converted_alike_with_and_without_simd() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut expected: Vec<f32> = halves.iter().map(|half| half.to_f32()).collect();
        for count in [0, 1, 7, 8, 9, halves.len()] {
            let mut wide = vec![0.0; count];
            run_vectorized(|simd| f16::widen(simd, &halves[..count], &mut wide));
            let same = |wide: &[f32]| wide.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same(&wide));
            run_portable(|simd| f16::widen(simd, &halves[..count], &mut wide));
            assert!(same(&wide));
        }
        // Values between the halves, where rounding matters.
        for value in &mut expected {
            *value = f32::from_bits(value.to_bits() + (value.to_bits() >> 7) % 0x2001).canonical();
        }
        for count in [0, 1, 7, 8, 9, halves.len()] {
            let (mut narrow, mut slow) = (vec![f16::ZERO; count], vec![f16::ZERO; count]);
            run_vectorized(|simd| f16::narrow(simd, &expected[..count], &mut narrow));
            run_portable(|simd| f16::narrow(simd, &expected[..count], &mut slow));
            assert!(narrow.iter().zip(slow).all(|(a, b)| a.to_bits() == b.to_bits()));
            for (got, value) in narrow.iter().zip(&expected) {
                assert_eq!(got.to_bits(), f16::from_f32(*value).to_bits(), "{value}");
            }
        }
    }
}
