//! NCCL, found and loaded at run time.
//!
//! Nothing is linked against NCCL: a machine without it builds, tests and trains on the CPU, and one that has it may
//! have it anywhere. NVIDIA's Python wheels and the runtime packages of distributions install only `libnccl.so.2`;
//! development packages add `libnccl.so`. So the search is this crate's own, over few places in a fixed order. Its
//! result is a table of functions ([`Symbols`]), on which the rest of the crate is built and which a test can fill with
//! Rust functions.
//!
//! The version is checked before any other function is looked up: "2.10.3 at this path, 2.18 needed" helps a user, the
//! name of a missing function does not.
//!
//! A library stays loaded until the process ends: copies of the table have to stay valid, and NCCL starts threads of
//! its own (for its network, for calls that do not block), whose code must not be unloaded. So no handle is kept or
//! closed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use burn_ddp::{Error, Result};

mod opened;
mod version;

pub use crate::symbols::{Config, RawComm, RawStream, Symbols};
use opened::Opened;
pub use version::Version;

/// Environment variable with the file of NCCL to load; nothing else is tried then.
pub(crate) const LIB_VARIABLE: &str = "BURN_DDP_NCCL_LIB";

/// Names that the system's linker searches: in its cache, `LD_LIBRARY_PATH`, and what this process has loaded already.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Roots of active Python environments.
const ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];

/// NCCL's file in NVIDIA's wheels, below `lib/python3.x`.
const WHEEL: &str = "site-packages/nvidia/nccl/lib/libnccl.so.2";

/// End of the linker's message for a file that does not exist (Linux).
const ABSENT: &str = ": cannot open shared object file: No such file or directory";

/// NCCL, loaded until the process ends. See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Library {
    path: PathBuf,
    version: Version,
    symbols: Symbols,
}

impl Library {
    /// Finds and loads NCCL: the file of `BURN_DDP_NCCL_LIB` and no other, or else the first that can be loaded of
    /// `libnccl.so.2`, `libnccl.so`, and the wheel in `$VIRTUAL_ENV` and `$CONDA_PREFIX`. If that one is too old, no
    /// later one replaces it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](burn_ddp::ErrorKind::Config): one line with everything that was tried, or with the file
    /// that was found, its version and what it lacks.
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
                // A missing file needs no reason beside "tried"; any other failure does.
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

    /// The file that was loaded, if the system tells; else the name by which it was found.
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

/// Names and paths to try, in this order. For an environment without the wheel the list has a pattern that matches no
/// file, so that the error names the place.
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
}
