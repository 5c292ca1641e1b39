//! The memory of LibTorch's CUDA tensors.
//!
//! LibTorch has a function for the address of a tensor. It enqueues on the legacy default stream of the tensor's
//! device, whichever thread calls, so an event recorded there is behind everything that fills a bucket. Its allocator
//! reuses memory in the order of that stream, without regard to NCCL's; a bucket is dropped only when NCCL is done.
//!
//! The module is compiled but not run: the tests have no LibTorch.
#![allow(unsafe_code)]

use std::ptr;

use burn::tensor::backend::{Backend, BackendTypes};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{Ddp, Error, ErrorKind, Result};
use burn_tch::{LibTorch, LibTorchDevice, TchElement, TchTensor};
use cudarc::driver::result::{self, ctx, device};
use cudarc::driver::sys::CUcontext;

use crate::device_buffer::{DeviceAccess, DeviceBuffer, Fence};
use crate::driver::{Event, PrimaryContext, failure};
use crate::process_group::NcclBackend;

/// Access to the tensors of LibTorch on a CUDA device, bare or under [`Ddp`].
#[derive(Clone, Copy, Debug, Default)]
pub struct TchAccess;

impl<E: TchElement> NcclBackend for LibTorch<E> {
    type Access = TchAccess;

    fn ordinal(device: &LibTorchDevice) -> Option<usize> {
        match device {
            LibTorchDevice::Cuda(ordinal) => Some(*ordinal),
            _ => None,
        }
    }

    fn device(ordinal: usize) -> LibTorchDevice {
        LibTorchDevice::Cuda(ordinal)
    }
}

impl<E: TchElement> NcclBackend for Ddp<LibTorch<E>> {
    type Access = TchAccess;

    fn ordinal(device: &LibTorchDevice) -> Option<usize> {
        LibTorch::<E>::ordinal(device)
    }

    fn device(ordinal: usize) -> LibTorchDevice {
        LibTorch::<E>::device(ordinal)
    }
}

// SAFETY: the tensor keeps its storage allocated and shared, so that no operation of Burn writes in place; the fence is
// behind everything that this process has enqueued for its device.
unsafe impl<B> DeviceAccess<B> for TchAccess
where
    B: Backend
        + BackendTypes<
            Device = LibTorchDevice,
            FloatTensorPrimitive = TchTensor,
            IntTensorPrimitive = TchTensor,
            BoolTensorPrimitive = TchTensor,
        >,
{
    type Kept = AnyTensor<B>;

    fn open(&self, tensor: AnyTensor<B>) -> Result<DeviceBuffer<AnyTensor<B>>> {
        let place = tensor.device();
        let ordinal = LibTorch::<f32>::ordinal(&place)
            .ok_or_else(|| Error::config(format!("NCCL reaches CUDA devices only, not {place:?}")))?;
        let (AnyTensor::Float(raw) | AnyTensor::Int(raw) | AnyTensor::Bool(raw)) = &tensor;
        if raw.tensor.dim() != 1 || !raw.tensor.is_contiguous() {
            let text = format!("a bucket of shape {:?} is not contiguous", tensor.shape());
            return Err(Error::new(ErrorKind::Device, text));
        }
        let (address, bytes) = (raw.tensor.data_ptr() as usize, raw.tensor.numel() * tensor.dtype().size());
        let before = |error: Error| error.context("kernels before a collective");
        let event = event_after_default_stream(ordinal).map_err(before)?;
        let fence = Fence::new(move || event.wait().map_err(before));
        Ok(DeviceBuffer { address, bytes, kept: tensor, fence })
    }

    fn close(&self, kept: AnyTensor<B>) -> Result<AnyTensor<B>> {
        Ok(kept)
    }
}

const _: () = {
    const fn reached<B: Backend>()
    where
        TchAccess: DeviceAccess<B>,
    {
    }

    reached::<LibTorch>();
    reached::<Ddp<LibTorch>>();
};

/// An event behind everything on the legacy default stream of the device `ordinal`.
fn event_after_default_stream(ordinal: usize) -> Result<Event> {
    result::init().map_err(|error| failure("cuInit", error))?;
    let _context = ScopedContext::enter(ordinal)?;
    let event = Event::new()?;
    // SAFETY: null is the default stream of the current context, which is the event's.
    unsafe { event.record(ptr::null_mut()) }?;
    Ok(event)
}

/// The primary context of a device as this thread's current one, until it is dropped. LibTorch leaves that of its
/// current device, which need not be the tensor's.
struct ScopedContext {
    before: Option<CUcontext>,
    // LibTorch retains it too, so the event outlives this.
    _primary: PrimaryContext,
}

impl ScopedContext {
    fn enter(ordinal: usize) -> Result<Self> {
        let before = ctx::get_current().map_err(|error| failure("cuCtxGetCurrent", error))?;
        let device = device::get(ordinal as i32).map_err(|error| failure("cuDeviceGet", error))?;
        Ok(Self { before, _primary: PrimaryContext::make_current(device)? })
    }
}

impl Drop for ScopedContext {
    fn drop(&mut self) {
        // SAFETY: the context before is LibTorch's, which never ends it; null is no context.
        let _ = unsafe { ctx::set_current(self.before.unwrap_or(ptr::null_mut())) };
    }
}
