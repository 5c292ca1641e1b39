//! A stream of its own in the primary context of a device, which is the context that Burn's tensors live in.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};

use burn_ddp::{Error, ErrorKind, Result};
use cudarc::driver::DriverError;
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::result::{self, ctx, device, event, primary_ctx, stream};
use cudarc::driver::sys::{CUdevice, CUevent, CUevent_flags, CUresult, CUstream};

use crate::queue::Queue;
use crate::symbols::RawStream;

/// A CUDA stream that does not wait for the legacy default stream, and an event to mark it with. It belongs to the
/// thread that made it: the device is current there.
#[derive(Debug)]
pub struct CudaQueue {
    // Dropped in this order: the context outlives what was made in it.
    event: Event,
    stream: Stream,
    _context: Context,
}

impl CudaQueue {
    /// A queue of the device `ordinal` (as CUDA counts after `CUDA_VISIBLE_DEVICES`), which becomes the current device
    /// of this thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for a number that no device has, [`ErrorKind::Device`] with CUDA's name and text when a
    /// call fails.
    ///
    /// # Panics
    ///
    /// Where no CUDA driver is installed (`cudarc` does): look for one first.
    pub fn new(ordinal: usize) -> Result<CudaQueue> {
        let number = c_int::try_from(ordinal)
            .map_err(|_| Error::config(format!("there is no CUDA device {ordinal}")))?;
        result::init().map_err(|error| failure("cuInit", error))?;
        let device = device::get(number).map_err(|error| failure("cuDeviceGet", error))?;
        let context = Context::current(device)?;
        let stream = stream::create(StreamKind::NonBlocking)
            .map(Stream)
            .map_err(|error| failure("cuStreamCreate", error))?;
        let event = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map(Event)
            .map_err(|error| failure("cuEventCreate", error))?;
        Ok(Self { event, stream, _context: context })
    }
}

impl Queue for CudaQueue {
    fn raw(&self) -> RawStream {
        self.stream.0.cast()
    }

    fn mark(&mut self) -> Result<()> {
        // SAFETY: event and stream live as long as `self`, in the same context.
        unsafe { event::record(self.event.0, self.stream.0) }.map_err(|error| failure("cuEventRecord", error))
    }

    fn reached(&mut self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        match unsafe { event::query(self.event.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failure("cuEventQuery", error)),
        }
    }
}

/// The primary context, which is counted: it goes when nobody in the process retains it.
#[derive(Debug)]
struct Context(CUdevice);

impl Context {
    /// Retains the primary context of `device` and makes it current on this thread.
    fn current(device: CUdevice) -> Result<Self> {
        // SAFETY: `device` came from `cuDeviceGet`.
        let raw = unsafe { primary_ctx::retain(device) }
            .map_err(|error| failure("cuDevicePrimaryCtxRetain", error))?;
        let context = Self(device);
        // SAFETY: the context was retained above.
        unsafe { ctx::set_current(raw) }.map_err(|error| failure("cuCtxSetCurrent", error))?;
        Ok(context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `Context::current`.
        let released = unsafe { primary_ctx::release(self.0) };
        regret("cuDevicePrimaryCtxRelease", released);
    }
}

#[derive(Debug)]
struct Stream(CUstream);

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `CudaQueue::new` and destroyed here only. CUDA lets work in flight finish.
        let destroyed = unsafe { stream::destroy(self.0) };
        regret("cuStreamDestroy", destroyed);
    }
}

#[derive(Debug)]
struct Event(CUevent);

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `CudaQueue::new` and destroyed here only.
        let destroyed = unsafe { event::destroy(self.0) };
        regret("cuEventDestroy", destroyed);
    }
}

/// A drop has nobody to return an error to.
fn regret(call: &str, outcome: Result<(), DriverError>) {
    if let Err(error) = outcome {
        tracing::warn!("{}", failure(call, error));
    }
}

/// What the driver says of `call`.
pub(crate) fn failure(call: &str, error: DriverError) -> Error {
    let text = |text: Result<&CStr, DriverError>, unknown: &str| {
        text.map_or_else(|_| unknown.to_owned(), |text| text.to_string_lossy().into_owned())
    };
    let name = text(error.error_name(), &format!("code {}", error.0 as u32));
    let meaning = text(error.error_string(), "no text");
    Error::new(ErrorKind::Device, format!("{call} failed: {name}: {meaning}"))
}
