//! Stand-in for `connect.rs` and `mapping.rs` on systems without anonymous files, abstract sockets or futexes.
//!
//! A rank there cannot listen and cannot connect, so it talks over TCP. [`Unsupported`] has no values: functions that
//! take one are compiled and never run.

use std::ptr::NonNull;

use super::{RegionLayout, ShmAddress};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::transport::Liveness;

pub(crate) enum Unsupported {}

pub(crate) type Mapping = Unsupported;
pub(crate) type ShmConnection = Unsupported;
pub(crate) type ShmListener = Unsupported;

impl Unsupported {
    pub fn bind(_: usize) -> Result<Self> {
        Err(Error::config("shared memory between processes is there on Linux only"))
    }

    pub fn connect(_: &ShmAddress) -> Result<Self> {
        Self::bind(0)
    }

    pub fn address(&self) -> &ShmAddress {
        match *self {}
    }

    pub fn share(self, _: &RegionLayout, _: &Liveness, _: Deadline) -> Result<Mapping> {
        match self {}
    }

    pub fn receive(self, _: &RegionLayout, _: &Liveness, _: Deadline) -> Result<Mapping> {
        match self {}
    }

    pub(super) fn start(&self, _: usize) -> NonNull<u8> {
        match *self {}
    }
}
