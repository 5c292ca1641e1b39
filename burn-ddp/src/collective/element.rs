//! The arithmetic of each element type.
//!
//! A reduction is only as good as the type it adds in: two half-precision gradients of 40000 have a mean of
//! 40000, but their half-precision sum is infinite, and dividing first loses the smallest ones. So elements
//! are widened to an [`Accumulator`], combined there, and rounded once. Conversions work on slices because
//! half precision is converted several at a time by the processor, and far slower one by one.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::ReduceOp;

/// Runs an expression with `$T` standing for the Rust type of a [`DType`](crate::dtype::DType): the one place
/// where a value becomes a type.
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
pub(super) trait Accumulator: Copy + Default {
    fn add(self, other: Self) -> Self;
    /// The smaller one; the left one of equals (zeros of both signs), NaN if either is.
    fn least(self, other: Self) -> Self;
    /// The larger one; the left one of equals (zeros of both signs), NaN if either is.
    fn greatest(self, other: Self) -> Self;
    /// One `ranks`-th; integers round toward zero.
    fn divided(self, ranks: usize) -> Self;
    /// The value as it leaves: all NaN become one, because which operand's payload an addition passes on is the
    /// compiler's choice and may differ between the vectorized part of a block and its end.
    fn settled(self) -> Self;
}

/// A type that travels.
pub(super) trait Element: Pod {
    type Acc: Accumulator;

    fn widen(values: &[Self], into: &mut [Self::Acc]);

    /// Rounds; integers that do not fit wrap.
    fn narrow(values: &[Self::Acc], into: &mut [Self]);

    /// The values themselves where they need no widening.
    fn as_wide(_values: &[Self]) -> Option<&[Self::Acc]> {
        None
    }
}

/// Combines each element of `left` with its counterpart in `right`; a mean is still a sum here.
pub(super) fn combine<A: Accumulator>(op: ReduceOp, left: &mut [A], right: &[A]) {
    fn each<A: Accumulator>(left: &mut [A], right: &[A], combined: impl Fn(A, A) -> A) {
        for (left, right) in left.iter_mut().zip(right) {
            *left = combined(*left, *right);
        }
    }
    match op {
        ReduceOp::Sum | ReduceOp::Mean => each(left, right, A::add),
        ReduceOp::Min => each(left, right, A::least),
        ReduceOp::Max => each(left, right, A::greatest),
    }
}

/// The last step before rounding.
pub(super) fn finish<A: Accumulator>(op: ReduceOp, ranks: usize, values: &mut [A]) {
    match op {
        ReduceOp::Mean => values.iter_mut().for_each(|value| *value = value.divided(ranks).settled()),
        _ => values.iter_mut().for_each(|value| *value = value.settled()),
    }
}

macro_rules! float_accumulator {
    ($($float:ident),*) => {$(
        impl Accumulator for $float {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn least(self, other: Self) -> Self {
                if self <= other || self.is_nan() { self } else { other }
            }
            fn greatest(self, other: Self) -> Self {
                if self >= other || self.is_nan() { self } else { other }
            }
            fn divided(self, ranks: usize) -> Self {
                self / ranks as $float
            }
            fn settled(self) -> Self {
                if self.is_nan() { $float::NAN } else { self }
            }
        }

        impl Element for $float {
            type Acc = $float;
            fn widen(values: &[Self], into: &mut [$float]) {
                into.copy_from_slice(values);
            }
            fn narrow(values: &[$float], into: &mut [Self]) {
                into.copy_from_slice(values);
            }
            fn as_wide(values: &[Self]) -> Option<&[$float]> {
                Some(values)
            }
        }
    )*};
}
float_accumulator!(f32, f64);

macro_rules! half_element {
    ($($half:ident),*) => {$(
        impl Element for $half {
            type Acc = f32;
            fn widen(values: &[Self], into: &mut [f32]) {
                values.convert_to_f32_slice(into);
            }
            fn narrow(values: &[f32], into: &mut [Self]) {
                into.convert_from_f32_slice(values);
            }
        }
    )*};
}
half_element!(f16, bf16);

macro_rules! integer_accumulator {
    ($($wide:ident),*) => {$(
        impl Accumulator for $wide {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn least(self, other: Self) -> Self {
                self.min(other)
            }
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
            fn divided(self, ranks: usize) -> Self {
                self / ranks as $wide
            }
            fn settled(self) -> Self {
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
            fn widen(values: &[Self], into: &mut [$wide]) {
                into.iter_mut().zip(values).for_each(|(into, value)| *into = (*value).into());
            }
            fn narrow(values: &[$wide], into: &mut [Self]) {
                into.iter_mut().zip(values).for_each(|(into, value)| *into = *value as $narrow);
            }
        }
    )*};
}
integer_element!(u8 -> i64, i32 -> i64, i64 -> i128);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

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
        let mut bytes = [0u8; 1];
        u8::narrow(&[300], &mut bytes);
        assert_eq!(bytes, [44]);
        assert_eq!(((-7i64).divided(2), 7i128.divided(2)), (-3, 3));
    }
}
