//! [`Ddp`], the backend decorator that makes a training loop data parallel.
//!
//! Burn is extended by decorating a backend: `Autodiff<B>` adds gradients, `Fusion<B>` adds kernel fusion, and
//! `Autodiff<Ddp<B>>` adds the place where gradients are exchanged with the other processes. User code does not notice
//! a decorator, because modules, optimizers and loops are generic over the backend: only the type alias changes. `Ddp`
//! stands *inside* `Autodiff`, where a gradient first exists as a plain tensor and nothing has read it yet.
//!
//! The decorator has no state and no tensors of its own: its primitives are those of `B`, and every operation is `B`'s.
//! Without a process group a program on `Ddp<B>` computes bit for bit what it computes on `B`. So a tensor passes
//! between `B` and `Ddp<B>` without a copy, and any backend whose data can be read can be used.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::backend::{Autodiff, Flex};
//! use burn_ddp::Ddp;
//!
//! type Backend = Autodiff<Ddp<Flex>>; // was: Autodiff<Flex>
//! # fn differentiable<B: burn::tensor::backend::AutodiffBackend>() {}
//! # differentiable::<Backend>();
//! # }
//! ```
//!
//! With the feature `overlap`, `Ddp` also implements Burn's `DistributedBackend`, by which `backward()` announces each
//! gradient as soon as it is complete (`hook.rs`).
//!
//! About 420 functions are forwarded, half of which have a default body in Burn, so a forgotten one would compile. The
//! lint below turns each into an error, now and at the next version of Burn.
#![deny(clippy::missing_trait_methods)]

#[cfg(feature = "overlap")]
mod hook;
mod ops;

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};

/// Backend that adds data-parallel training to the backend `B`.
///
/// Write `Autodiff<Ddp<B>>` where the single-process program has `Autodiff<B>`; the [module documentation](self) has an
/// example. The type has no state and no cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ddp<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Ddp<B> {
    type Device = B::Device;

    type FloatTensorPrimitive = B::FloatTensorPrimitive;
    type FloatElem = B::FloatElem;

    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;

    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;

    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: Backend> Backend for Ddp<B> {
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device)
    }

    fn memory_persistent_allocations<Output, Input, Func>(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output
    where
        Output: Send,
        Input: Send,
        Func: Fn(Input) -> Output + Send,
    {
        B::memory_persistent_allocations(device, input, func)
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device)
    }

    fn name(device: &Self::Device) -> String {
        format!("ddp<{}>", B::name(device))
    }

    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed)
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        B::sync(device)
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device)
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

/// Checks at compile time that decorated GPU backends are differentiable. No test runs them, because their drivers may
/// be absent.
#[cfg(any(feature = "cuda", feature = "tch"))]
const _: () = {
    const fn differentiable<B: burn_backend::AutodiffBackend>() {}

    #[cfg(feature = "cuda")]
    differentiable::<burn::backend::Autodiff<Ddp<burn_cuda::Cuda>>>();
    #[cfg(feature = "tch")]
    differentiable::<burn::backend::Autodiff<Ddp<burn_tch::LibTorch>>>();
};
