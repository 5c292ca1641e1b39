//! CUDA tensors of LibTorch as memory.
//!
//! LibTorch gives the address of a tensor away, and it enqueues on the legacy default stream of the tensor's device,
//! whichever thread calls: an event recorded there is behind everything that fills a bucket. Its allocator hands memory
//! on in the order of that stream, which knows nothing of NCCL's; a bucket is dropped only when NCCL is done.
//!
//! Compiled and not run: the tests have no LibTorch.
#![allow(unsafe_code)]

use std::ptr;

use burn::tensor::backend::{Backend, BackendTypes};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{Ddp, Error, ErrorKind, Result};
use burn_tch::{LibTorch, LibTorchDevice, TchElement, TchTensor};
use cudarc::driver::result::{ctx, device, event, primary_ctx};
use cudarc::driver::sys::{CUdevice, CUevent, CUevent_flags};
use cudarc::driver::{DriverError, result};

use crate::NcclBackend;
use crate::device_buffer::{DeviceAccess, DeviceBuffer, Fence};

/// Reaches the tensors of LibTorch on a CUDA device, bare or under [`Ddp`].
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
// behind all that was enqueued for its device by this process.
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
        let event = Event::after_default_stream(ordinal).map_err(failed)?;
        let fence = Fence::new(move || event.wait().map_err(failed));
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

fn failed(error: DriverError) -> Error {
    Error::with_source(ErrorKind::Device, "kernels before a collective", error.to_string())
}

struct Event(CUevent);

// SAFETY: events belong to a context and to no thread.
unsafe impl Send for Event {}

impl Event {
    /// Behind everything on the legacy default stream of the device `ordinal`.
    fn after_default_stream(ordinal: usize) -> Result<Self, DriverError> {
        result::init()?;
        let _context = Context::enter(device::get(ordinal as i32)?)?;
        let event = Self(event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?);
        // SAFETY: the event is of the current context; null is that context's default stream.
        unsafe { event::record(event.0, ptr::null_mut()) }?;
        Ok(event)
    }

    fn wait(self) -> Result<(), DriverError> {
        // SAFETY: the event lives.
        unsafe { event::synchronize(self.0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created above, destroyed here only. CUDA frees it when it is reached.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// The primary context of a device as this thread's current one. LibTorch leaves that of its current device, which need
/// not be the tensor's.
struct Context {
    device: CUdevice,
    before: Option<cudarc::driver::sys::CUcontext>,
}

impl Context {
    fn enter(device: CUdevice) -> Result<Self, DriverError> {
        let before = ctx::get_current()?;
        // SAFETY: the device is one of the driver's; released in the drop.
        let primary = unsafe { primary_ctx::retain(device) }?;
        let this = Self { device, before };
        // SAFETY: retained for as long as `this` lives.
        unsafe { ctx::set_current(primary) }?;
        Ok(this)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: what was current before is LibTorch's, which never ends it; null is no context.
        let _ = unsafe { ctx::set_current(self.before.unwrap_or(ptr::null_mut())) };
        // SAFETY: retained once in `enter`; LibTorch retains it too, so the event outlives this.
        let _ = unsafe { primary_ctx::release(self.device) };
    }
}
