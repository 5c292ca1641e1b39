//! A CUDA stream in the primary context of a device, which is the context of Burn's tensors.
#![allow(unsafe_code)]

use std::ffi::c_int;

use burn_ddp::{Error, Result};
use cudarc::driver::result::{self, device};

use crate::driver::{Event, OwnedStream, PrimaryContext, failure};
use crate::stream::Stream;
use crate::symbols::RawStream;

/// A CUDA stream that does not wait for the legacy default stream, with an event. It belongs to the thread that made
/// it: the device is current there.
#[derive(Debug)]
pub struct CudaStream {
    // Dropped in this order: the context outlives what was made in it.
    event: Event,
    stream: OwnedStream,
    _context: PrimaryContext,
}

impl CudaStream {
    /// A stream of the device `ordinal` (as CUDA counts after `CUDA_VISIBLE_DEVICES`), which becomes the current device
    /// of this thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](burn_ddp::ErrorKind::Config) for a number that no device has,
    /// [`ErrorKind::Device`](burn_ddp::ErrorKind::Device) with CUDA's name and text when a call fails.
    ///
    /// # Panics
    ///
    /// When no CUDA driver is installed (`cudarc` panics): call [`local_device`](crate::local_device) first, which
    /// returns an error then.
    pub fn new(ordinal: usize) -> Result<CudaStream> {
        let number = c_int::try_from(ordinal)
            .map_err(|_| Error::config(format!("there is no CUDA device {ordinal}")))?;
        result::init().map_err(|error| failure("cuInit", error))?;
        let device = device::get(number).map_err(|error| failure("cuDeviceGet", error))?;
        let context = PrimaryContext::make_current(device)?;
        let stream = OwnedStream::new()?;
        Ok(Self { event: Event::new()?, stream, _context: context })
    }
}

impl Stream for CudaStream {
    fn raw(&self) -> RawStream {
        self.stream.raw().cast()
    }

    fn record(&mut self) -> Result<()> {
        // SAFETY: event and stream live as long as `self`, in the same context.
        unsafe { self.event.record(self.stream.raw()) }
    }

    fn is_reached(&mut self) -> Result<bool> {
        self.event.is_reached()
    }
}
