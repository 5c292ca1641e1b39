//! NCCL as a file that is found at run time.
//!
//! Nothing here is linked against NCCL: a machine without it builds, tests and trains on the CPU, and one that has it
//! may have it anywhere. NVIDIA's Python wheels and the runtime packages of distributions install a single name,
//! `libnccl.so.2`; only development packages add `libnccl.so`. Hence a search of our own, over few places and in one
//! order, and a table of functions ([`Symbols`]) which the rest of the crate is built on and which a test can fill with
//! Rust functions.
//!
//! The version is asked for before any other function is looked up: "2.10.3 at this path, 2.18 needed" helps, the name
//! of a function that is missing does not.
//!
//! A library that was opened stays open until the process ends: the table is copied about freely and has to stay valid,
//! and NCCL starts threads of its own (for its network, for calls that do not block), under which their code must not
//! be unloaded. So no handle is kept, counted or closed.
#![allow(unsafe_code)]

use std::error::Error as _;
use std::ffi::{OsString, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use burn_ddp::{Error, Result};

use crate::error::{SUCCESS, one_line};

mod symbols;
mod version;

pub use symbols::{Config, RawComm, RawStream, Symbols};
pub use version::Version;

/// Names the file of NCCL to load; nothing else is tried then.
pub const LIB_VARIABLE: &str = "BURN_DDP_NCCL_LIB";

/// What the linker is asked for: its cache, `LD_LIBRARY_PATH`, and whatever this process has loaded already.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Roots of active Python environments.
const ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];

/// Where NVIDIA's wheels put NCCL, below `lib/python3.x`.
const WHEEL: &str = "site-packages/nvidia/nccl/lib/libnccl.so.2";

/// What the linker of Linux says after the name of a file that is not there.
const ABSENT: &str = ": cannot open shared object file: No such file or directory";

/// NCCL, loaded for the rest of the process's life. See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Library {
    path: PathBuf,
    version: Version,
    symbols: Symbols,
}

impl Library {
    /// Finds NCCL: the file that `BURN_DDP_NCCL_LIB` names, and no other; or else `libnccl.so.2`, `libnccl.so`, and the
    /// wheel in `$VIRTUAL_ENV` and `$CONDA_PREFIX`. The first that can be loaded decides: a later one is not taken in its
    /// place where it is too old.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](burn_ddp::ErrorKind::Config), a line that says what was tried, or which file was found, its
    /// version and what it lacks.
    pub fn load() -> Result<Self> {
        Self::find(|name| std::env::var_os(name))
    }

    /// Loads the library at `path`.
    ///
    /// # Errors
    ///
    /// Like [`Library::load`].
    pub fn open(path: &Path) -> Result<Self> {
        let file = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match Opened::new(&file) {
            Ok(opened) => opened.check(),
            Err(reason) => Err(Error::config(format!("cannot load NCCL from {}: {reason}", file.display()))),
        }
    }

    fn find(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        match lookup(LIB_VARIABLE).filter(|file| !file.is_empty()) {
            Some(file) => Self::open(Path::new(&file)).map_err(|error| error.context(LIB_VARIABLE)),
            None => Self::first(&search(lookup)),
        }
    }

    /// The first of `candidates` that can be loaded.
    fn first(candidates: &[PathBuf]) -> Result<Self> {
        let mut tried = Vec::new();
        for candidate in candidates {
            match Opened::new(candidate) {
                Ok(opened) => return opened.check(),
                // That a file is not there is what "tried" says; any other reason is worth its words.
                Err(reason) if reason == format!("{}{ABSENT}", candidate.display()) => {
                    tried.push(candidate.display().to_string());
                }
                Err(reason) => tried.push(format!("{} ({reason})", candidate.display())),
            }
        }
        Err(Error::config(format!(
            "no NCCL library found: tried {}; install one (pip install nvidia-nccl-cu12 in an active environment, or \
             the system's package libnccl2) or set {LIB_VARIABLE} to its file",
            tried.join(", ")
        )))
    }

    /// The file that was loaded, as far as the system tells; else the name that it was found by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its functions, which stay valid: the file is never unloaded.
    pub fn symbols(&self) -> Symbols {
        self.symbols
    }
}

/// Names and paths to try, in this order. An environment without the wheel is in it as a pattern that no file has, so
/// that the error says where it was looked for.
fn search(lookup: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut candidates: Vec<_> = NAMES.into_iter().map(PathBuf::from).collect();
    for root in ENVIRONMENTS.into_iter().filter_map(lookup).filter(|root| !root.is_empty()) {
        let root = Path::new(&root);
        // lib64 is a link to lib in most environments: one of them is enough.
        let wheels =
            ["lib", "lib64"].map(|lib| wheels(&root.join(lib))).into_iter().find(|found| !found.is_empty());
        candidates.extend(wheels.unwrap_or_else(|| vec![root.join("lib/python3*").join(WHEEL)]));
    }
    candidates
}

/// NCCL's files in the Python installations below `lib`.
fn wheels(lib: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let mut files: Vec<_> = folders
        .filter(|folder| folder.file_name().to_string_lossy().starts_with("python3"))
        .map(|folder| folder.path().join(WHEEL))
        .filter(|file| file.exists())
        .collect();
    files.sort();
    files
}

/// A file that the system has loaded and nobody has asked yet what it is.
struct Opened {
    handle: ManuallyDrop<libloading::Library>,
    path: PathBuf,
}

impl Opened {
    fn new(name: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the file's initializers; that this file is NCCL, whose initializers may run on any
        // thread, is what its user says by its name or by naming it.
        let handle = unsafe { libloading::Library::new(name) }
            // The linker's own words are the source of the error.
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

    /// The library, if it is NCCL and new enough.
    fn check(mut self) -> Result<Library> {
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
    use burn_ddp::ErrorKind;

    use super::*;

    fn environment(name: &str, root: &Path) -> impl Fn(&str) -> Option<OsString> {
        move |asked| (asked == name).then(|| root.into())
    }

    #[test]
    fn names_first_then_the_wheels_of_active_environments() {
        assert_eq!(search(|_| None), [Path::new("libnccl.so.2"), Path::new("libnccl.so")]);
        assert_eq!(search(|_| Some(OsString::new())).len(), 2, "empty counts as unset");

        let root = tempfile::tempdir().unwrap();
        let found = |name| search(environment(name, root.path())).split_off(2);
        assert_eq!(found("VIRTUAL_ENV"), [root.path().join("lib/python3*").join(WHEEL)]);
        let place = |python: &str| {
            let file = root.path().join(python).join(WHEEL);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, "").unwrap();
            file
        };
        let newer = place("lib64/python3.13");
        assert_eq!(found("CONDA_PREFIX"), [newer]);
        place("lib/python2.7");
        let (older, newer) = (place("lib/python3.11"), place("lib/python3.13"));
        assert_eq!(found("VIRTUAL_ENV"), [older, newer]);
    }

    #[test]
    fn nothing_found_names_all_that_was_tried_and_what_to_install() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, "no library at all, and long enough to be read as the head of one").unwrap();
        let error = Library::first(&["libnccl-none.so.2".into(), "/none/libnccl.so".into(), text.clone()])
            .unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Config, 2));
        let error = error.to_string();
        let tried = format!("tried libnccl-none.so.2, /none/libnccl.so, {} (", text.display());
        assert!(error.contains(&tried) && !error.contains('\n'), "{error}");
        for word in ["nvidia-nccl-cu12", "libnccl2", LIB_VARIABLE] {
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_file_that_the_variable_names_is_the_only_one_tried() {
        let error = Library::find(environment(LIB_VARIABLE, Path::new("/none/libnccl.so.2"))).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let expected = "BURN_DDP_NCCL_LIB: cannot load NCCL from /none/libnccl.so.2: ";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(!error.to_string().contains("tried"), "{error}");
    }

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
        let address = wheels as *const () as usize;
        assert_eq!(file_of(address), std::env::current_exe().ok());
    }
}
