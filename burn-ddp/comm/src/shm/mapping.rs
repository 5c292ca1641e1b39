//! Memory that several processes of a host map.
//!
//! It is an anonymous file (`memfd_create`), which has no name to collide or to leak: the kernel frees it with the last
//! process that holds it, however that process ends. All of it is reserved before a peer hears of it, so that a host
//! without room is an error at start-up and not a bus error in the middle of a step. Its size is sealed, so that no
//! process can truncate it under another.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::io::retry_on_intr;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::{Error, Result};
use crate::net::host::memory;

/// A shared anonymous file, mapped into this process.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    file: OwnedFd,
}

// SAFETY: it owns a mapping, which belongs to the process and not to a thread, and only gives out a pointer: its users
// answer for reads and writes.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Reserves and maps `bytes` zeroed bytes.
    pub(super) fn reserve(bytes: usize) -> Result<Self> {
        let available = memory().available;
        let failed = |error: rustix::io::Errno| {
            let free = available.map_or(String::new(), |free| format!(", {free} are available"));
            Error::io(format!("cannot reserve {bytes} bytes of shared memory{free}"), error)
        };
        // The kernel would not refuse: it would take memory from other processes until it kills one.
        if available.is_some_and(|free| free < bytes as u64) {
            return Err(failed(rustix::io::Errno::NOSPC));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("burn-ddp", flags).map_err(failed)?;
        let reserve = || fallocate(&file, FallocateFlags::empty(), 0, bytes as u64);
        retry_on_intr(reserve).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        Self::map(file, bytes)
    }

    /// Maps `file`, which must have exactly `bytes` bytes.
    pub(super) fn map(file: OwnedFd, bytes: usize) -> Result<Self> {
        let failed =
            |error: rustix::io::Errno| Error::io(format!("cannot map {bytes} bytes of shared memory"), error);
        let size = fstat(&file).map_err(failed)?.st_size;
        if u64::try_from(size).ok() != Some(bytes as u64) {
            return Err(Error::config(format!(
                "the shared memory has {size} bytes, but {bytes} were agreed on"
            )));
        }
        let seals = fcntl_get_seals(&file).map_err(failed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(Error::config(
                "the shared memory that was handed out is not sealed: its size could change",
            ));
        }
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping where the kernel finds room, of a file of that size, which cannot shrink.
        let start =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, &file, 0) };
        match NonNull::new(start.map_err(failed)?.cast()) {
            Some(start) => Ok(Self { start, bytes, file }),
            None => Err(failed(rustix::io::Errno::NOMEM)),
        }
    }

    /// Address of the first of `bytes` bytes, which is the size of the mapping.
    pub(super) fn start(&self, bytes: usize) -> NonNull<u8> {
        assert_eq!(self.bytes, bytes, "bytes of a mapping");
        self.start
    }

    /// The file, to be sent to peers.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; nothing that borrows from it outlives it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn what_one_writes_the_other_reads_and_the_size_is_fixed() {
        let one = Mapping::reserve(8192).unwrap();
        let other = Mapping::map(one.file().try_clone_to_owned().unwrap(), 8192).unwrap();
        assert_ne!(one.start(8192), other.start(8192));
        // SAFETY: inside of both mappings, which nothing else uses.
        unsafe {
            one.start(8192).add(8191).write(7);
            assert_eq!((other.start(8192).add(8191).read(), other.start(8192).read()), (7, 0));
        }
        assert!(rustix::fs::ftruncate(one.file(), 4096).is_err());
        assert!(Mapping::map(one.file().try_clone_to_owned().unwrap(), 4096).is_err());
    }

    #[test]
    fn what_cannot_be_reserved_is_an_error_with_the_numbers() {
        let error = Mapping::reserve(1 << 60).err().expect("no machine has so much").to_string();
        assert!(error.contains(&(1u64 << 60).to_string()) && error.contains("available"), "{error}");
    }
}
