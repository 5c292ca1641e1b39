//! A library that the system has loaded, and the checks that it is NCCL.
#![allow(unsafe_code)]

use std::error::Error as _;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use burn_ddp::{Error, Result};

use super::{LIB_VARIABLE, Library, Symbols, Version};
use crate::error::{SUCCESS, one_line};

/// A library that the system has loaded and that has not been checked yet.
pub(super) struct Opened {
    handle: ManuallyDrop<libloading::Library>,
    path: PathBuf,
}

impl Opened {
    /// Loads `name`, a path or a name for the linker to search for; the error is the linker's reason.
    pub(super) fn new(name: &Path) -> Result<Self, String> {
        // From a pipe the linker would read until there is a writer.
        if std::fs::metadata(name).is_ok_and(|found| !found.is_file()) {
            return Err(format!("{} is no regular file", name.display()));
        }
        // SAFETY: loading runs the file's initializers. The user asserts, by the file's name or by naming it, that it
        // is NCCL, whose initializers may run on any thread.
        let handle = unsafe { libloading::Library::new(name) }
            // The linker's message is the source of the error.
            .map_err(|error| {
                one_line(&error.source().map_or_else(|| error.to_string(), ToString::to_string))
            })?;
        Ok(Self { handle: ManuallyDrop::new(handle), path: name.to_owned() })
    }

    /// The function `name`, as the prototype `F`.
    ///
    /// # Safety
    ///
    /// `F` is the type of an `extern "C"` function with the prototype that NCCL's header gives to `name`.
    unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: of the caller; the function stays where it is because the handle is never dropped.
        unsafe { self.handle.get::<F>(name) }.ok().map(|symbol| *symbol)
    }

    /// Checks that the library is NCCL and new enough, and looks its functions up.
    pub(super) fn check(mut self) -> Result<Library> {
        // SAFETY: the prototype of nccl.h.
        let get_version =
            unsafe { self.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("ncclGetVersion") };
        let Some(get_version) = get_version else {
            return Err(Error::config(format!(
                "{} is not NCCL: it has no ncclGetVersion",
                self.path.display()
            )));
        };
        self.path = file_of(get_version as usize).unwrap_or(self.path);
        let path = self.path.display();
        let mut number = 0;
        // SAFETY: it writes one integer.
        let code = unsafe { get_version(&mut number) };
        if code != SUCCESS {
            return Err(Error::config(format!("ncclGetVersion of {path} failed with code {code}")));
        }
        let (version, needed) = (Version::from_code(number), Version::NEEDED);
        if version < needed {
            return Err(Error::config(format!(
                "{path} is NCCL {version}, but {needed} or newer is needed: update it or set {LIB_VARIABLE} to another"
            )));
        }
        let symbols = self.symbols().map_err(|name| {
            Error::config(format!(
                "{path}, NCCL {version}, has no {name}: set {LIB_VARIABLE} to a complete library"
            ))
        })?;
        Ok(Library { path: self.path, version, symbols })
    }

    /// All functions, or the name of the first that is missing.
    fn symbols(&self) -> Result<Symbols, &'static str> {
        macro_rules! symbols {
            ($($field:ident: $name:literal,)*) => {
                // SAFETY: the fields of `Symbols` have the prototypes of nccl.h.
                unsafe { Ok(Symbols { $($field: self.function($name).ok_or($name)?,)* }) }
            };
        }
        symbols! {
            get_version: "ncclGetVersion",
            get_unique_id: "ncclGetUniqueId",
            get_error_string: "ncclGetErrorString",
            get_last_error: "ncclGetLastError",
            comm_init_rank_config: "ncclCommInitRankConfig",
            comm_get_async_error: "ncclCommGetAsyncError",
            comm_finalize: "ncclCommFinalize",
            comm_destroy: "ncclCommDestroy",
            comm_abort: "ncclCommAbort",
            group_start: "ncclGroupStart",
            group_end: "ncclGroupEnd",
            all_reduce: "ncclAllReduce",
            reduce: "ncclReduce",
            broadcast: "ncclBroadcast",
            reduce_scatter: "ncclReduceScatter",
            all_gather: "ncclAllGather",
        }
    }
}

/// The file whose code lies at `address`, where the system has a table of such (Linux).
fn file_of(address: usize) -> Option<PathBuf> {
    mapped(&std::fs::read_to_string("/proc/self/maps").ok()?, address)
}

/// The file that `maps`, of the form of proc(5), names for `address`.
fn mapped(maps: &str, address: usize) -> Option<PathBuf> {
    let number = |text| usize::from_str_radix(text, 16).ok();
    let line = maps.lines().find(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        range.is_some_and(|(start, end)| {
            number(start).is_some_and(|start| start <= address)
                && number(end).is_some_and(|end| address < end)
        })
    })?;
    let path = line.splitn(6, ' ').nth(5)?.trim_start();
    path.starts_with('/').then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_address() {
        let maps = "1000-2000 r--p 00000000 08:01 7          /a/lib one.so\n\
                    2000-3000 r-xp 00001000 08:01 7          /a/lib one.so\n\
                    3000-4000 rw-p 00000000 00:00 0 \n\
                    4000-5000 r-xp 00000000 00:00 0          [vdso]\n";
        assert_eq!(mapped(maps, 0x2000), Some("/a/lib one.so".into()));
        assert_eq!([mapped(maps, 0x3000), mapped(maps, 0x4000), mapped(maps, 0x5000)], [None, None, None]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_code_lies_in_this_program() {
        let address = mapped as *const () as usize;
        assert_eq!(file_of(address), std::env::current_exe().ok());
    }
}
