//! Loops compiled twice: for every processor that a build runs on, and for the one at hand.
//!
//! A build for x86-64 may use only what the first such processors had: no conversion of half precision, and half as
//! many numbers at a time. So the loops of this module's callers are compiled a second time with AVX2 and F16C, and the
//! choice is made once per process. Code inside of [`run_vectorized`] is only compiled so if it is inlined, hence the
//! attributes there. The bits are the same: no loop adds in another order, and Rust contracts nothing.
//!
//! All `unsafe` here calls what was compiled for processor features that have been found to be there. The crate
//! `multiversion` would replace the choice but not the conversion of half precision, which `half` does at half the
//! speed.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Features of the processor. Only this module makes it, so `avx2` is proof of AVX2 and F16C.
#[derive(Clone, Copy)]
pub(super) struct Simd {
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has two versions"))]
    avx2: bool,
}

/// Runs `loops`, which has to be `#[inline(always)]`, as compiled for the processor at hand.
#[inline(always)]
#[allow(unsafe_code, reason = "see the module")]
pub(super) fn run_vectorized<R>(loops: impl FnOnce(Simd) -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
        // SAFETY: the processor has just been found to have both features, which is all that `with_avx2` needs.
        return unsafe { x86::with_avx2(loops) };
    }
    loops(Simd { avx2: false })
}

/// Runs `loops` as compiled for every processor, to compare with.
#[cfg(test)]
pub(super) fn run_portable<R>(loops: impl FnOnce(Simd) -> R) -> R {
    loops(Simd { avx2: false })
}

impl Simd {
    /// Widens each of `values`.
    #[inline(always)]
    #[allow(unsafe_code, reason = "see the module")]
    pub(super) fn widen_f16(self, values: &[f16], into: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.avx2 {
            // SAFETY: `avx2` says that the processor has AVX2 and F16C.
            return unsafe { x86::widen_f16(values, into) };
        }
        values.convert_to_f32_slice(into);
    }

    /// Rounds each of `values` to the nearest, ties to even.
    #[inline(always)]
    #[allow(unsafe_code, reason = "see the module")]
    pub(super) fn narrow_f16(self, values: &[f32], into: &mut [f16]) {
        #[cfg(target_arch = "x86_64")]
        if self.avx2 {
            // SAFETY: `avx2` says that the processor has AVX2 and F16C.
            return unsafe { x86::narrow_f16(values, into) };
        }
        into.convert_from_f32_slice(values);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph};

    use half::f16;

    use super::Simd;

    /// Numbers converted by one instruction.
    const EIGHT: usize = 8;

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn with_avx2<R>(loops: impl FnOnce(Simd) -> R) -> R {
        loops(Simd { avx2: true })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn widen_f16(values: &[f16], into: &mut [f32]) {
        let (values, last) = values.as_chunks::<EIGHT>();
        let (into, last_into) = into.as_chunks_mut::<EIGHT>();
        for (values, into) in values.iter().zip(into) {
            *into = widened(*values);
        }
        let mut padded = [f16::ZERO; EIGHT];
        padded[..last.len()].copy_from_slice(last);
        last_into.copy_from_slice(&widened(padded)[..last.len()]);
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn narrow_f16(values: &[f32], into: &mut [f16]) {
        let (values, last) = values.as_chunks::<EIGHT>();
        let (into, last_into) = into.as_chunks_mut::<EIGHT>();
        for (values, into) in values.iter().zip(into) {
            *into = narrowed(*values);
        }
        let mut padded = [0.0; EIGHT];
        padded[..last.len()].copy_from_slice(last);
        last_into.copy_from_slice(&narrowed(padded)[..last.len()]);
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn widened(values: [f16; EIGHT]) -> [f32; EIGHT] {
        let values: __m128i = bytemuck::cast(values);
        bytemuck::cast(_mm256_cvtph_ps(values))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn narrowed(values: [f32; EIGHT]) -> [f16; EIGHT] {
        let values: __m256 = bytemuck::cast(values);
        bytemuck::cast(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values))
    }
}
