//! Objects of the CUDA driver that free themselves, and the driver's errors.
#![allow(unsafe_code)]

use std::ffi::CStr;

use burn_ddp::{Error, ErrorKind, Result};
use cudarc::driver::DriverError;
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::result::{ctx, event, primary_ctx, stream};
use cudarc::driver::sys::{CUdevice, CUevent, CUevent_flags, CUresult, CUstream};

/// The primary context of a device, which the driver counts: it ends when nothing in the process retains it.
#[derive(Debug)]
pub(crate) struct PrimaryContext(CUdevice);

impl PrimaryContext {
    /// Retains the primary context of `device`, which is one of the driver's, and makes it current on this thread.
    pub(crate) fn make_current(device: CUdevice) -> Result<Self> {
        // SAFETY: the device is one of the driver's.
        let raw = unsafe { primary_ctx::retain(device) }
            .map_err(|error| failure("cuDevicePrimaryCtxRetain", error))?;
        let context = Self(device);
        // SAFETY: the context was retained above.
        unsafe { ctx::set_current(raw) }.map_err(|error| failure("cuCtxSetCurrent", error))?;
        Ok(context)
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once by `make_current`.
        log_failure("cuDevicePrimaryCtxRelease", unsafe { primary_ctx::release(self.0) });
    }
}

/// A stream of the current context that does not wait for the legacy default stream.
#[derive(Debug)]
pub(crate) struct OwnedStream(CUstream);

impl OwnedStream {
    pub(crate) fn new() -> Result<Self> {
        stream::create(StreamKind::NonBlocking).map(Self).map_err(|error| failure("cuStreamCreate", error))
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.0
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed here only. CUDA lets work in flight finish.
        log_failure("cuStreamDestroy", unsafe { stream::destroy(self.0) });
    }
}

/// An event of the current context.
#[derive(Debug)]
pub(crate) struct Event(CUevent);

// SAFETY: events belong to a context and to no thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new() -> Result<Self> {
        let created = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        created.map(Self).map_err(|error| failure("cuEventCreate", error))
    }

    /// Records the event behind everything on `stream`.
    ///
    /// # Safety
    ///
    /// `stream` is a living stream of the event's context; null is the default stream of that context.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: of the caller; the event lives as long as `self`.
        unsafe { event::record(self.0, stream) }.map_err(|error| failure("cuEventRecord", error))
    }

    pub(crate) fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        match unsafe { event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failure("cuEventQuery", error)),
        }
    }

    /// Blocks until the event is reached.
    #[cfg(feature = "tch")]
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the event lives as long as `self`.
        unsafe { event::synchronize(self.0) }.map_err(|error| failure("cuEventSynchronize", error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed here only. CUDA frees it when it is reached.
        log_failure("cuEventDestroy", unsafe { event::destroy(self.0) });
    }
}

/// Logs the failure of `call`, for a drop, which cannot return it.
fn log_failure(call: &str, outcome: Result<(), DriverError>) {
    if let Err(error) = outcome {
        tracing::warn!("{}", failure(call, error));
    }
}

/// `error` of the driver's function `call`, with the driver's name and text for it.
pub(crate) fn failure(call: &str, error: DriverError) -> Error {
    let text = |text: Result<&CStr, DriverError>, unknown: &str| {
        text.map_or_else(|_| unknown.to_owned(), |text| text.to_string_lossy().into_owned())
    };
    let name = text(error.error_name(), &format!("code {}", error.0 as u32));
    let meaning = text(error.error_string(), "no text");
    Error::new(ErrorKind::Device, format!("{call} failed: {name}: {meaning}"))
}
