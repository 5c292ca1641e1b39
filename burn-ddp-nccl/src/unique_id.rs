//! NCCL's id of a communicator, by which its ranks find each other.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr;

use burn_ddp::{Error, Result};

use crate::error::{SUCCESS, failure};
use crate::symbols::Symbols;

/// Bytes of `ncclUniqueId`.
const BYTES: usize = 128;

/// `ncclUniqueId`, 128 opaque bytes: rank 0 obtains it from NCCL, sends it to the others over the connections of the
/// group, and every rank connects with it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; BYTES]);

impl UniqueId {
    /// A new id (`ncclGetUniqueId`). NCCL opens a socket in this process, from which the ranks will get each other's
    /// addresses, so this process must be one of the ranks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Device`](burn_ddp::ErrorKind::Device) if NCCL finds no network interface.
    pub fn new(symbols: &Symbols) -> Result<Self> {
        let mut id = Self([0; BYTES]);
        // SAFETY: NCCL writes the 128 bytes of an ncclUniqueId.
        let code = unsafe { (symbols.get_unique_id)(&mut id) };
        if code != SUCCESS {
            return Err(failure(symbols, "ncclGetUniqueId", code, ptr::null_mut()));
        }
        Ok(id)
    }

    /// The 128 bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The id of these bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](burn_ddp::ErrorKind::Config) unless there are 128 of them.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = |_| Error::config(format!("an id of NCCL has {BYTES} bytes, got {}", bytes.len()));
        bytes.try_into().map(Self).map_err(wrong)
    }
}

// Shortened: with the whole id anyone could connect to the group.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(")?;
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_there_and_back() {
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
        let bytes: Vec<u8> = (0..128).collect();
        let id = UniqueId::from_bytes(&bytes).unwrap();
        assert_eq!(id.as_bytes(), bytes);
        assert_eq!(format!("{id:?}"), "UniqueId(0001020304050607..)");
    }

    #[test]
    fn another_length_is_an_error() {
        let error = UniqueId::from_bytes(&[0; 127]).unwrap_err();
        assert_eq!(error.to_string(), "an id of NCCL has 128 bytes, got 127");
    }
}
