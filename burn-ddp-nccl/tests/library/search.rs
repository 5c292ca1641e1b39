//! The places where NCCL is found, and the libraries that are refused.

use std::path::Path;

use burn_ddp_nccl::library::Library;

use super::{child, stub};

/// The path of a library like this, and why it is refused.
fn refused(version: i32, functions: &[&str]) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    stub::build(&file, version, functions);
    let error = Library::open(&file).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    (file.canonicalize().unwrap().display().to_string(), error.to_string())
}

#[test]
fn an_old_library_is_refused_with_both_versions_before_its_functions_are_looked_up() {
    for (number, version) in [(21003, "2.10.3"), (2804, "2.8.4"), (21706, "2.17.6")] {
        let (path, error) = refused(number, &[]);
        let expected = format!("{path} is NCCL {version}, but 2.18.0 or newer is needed");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn a_missing_function_is_named_with_path_and_version() {
    let (path, error) = refused(22005, &[]);
    assert!(error.starts_with(&format!("{path}, NCCL 2.20.5, has no ncclGetUniqueId")), "{error}");
    let (path, error) = refused(22005, &stub::FUNCTIONS[..14]);
    assert!(error.starts_with(&format!("{path}, NCCL 2.20.5, has no ncclAllGather")), "{error}");
}

#[test]
fn the_versioned_name_alone_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    stub::build(&file, 21800, &stub::FUNCTIONS);
    let path = file.canonicalize().unwrap().display().to_string();
    assert_eq!(child::load(&[("LD_LIBRARY_PATH", folder.path())]), Ok((path, "2.18.0".into())));
}

#[test]
fn the_versioned_name_comes_before_the_other_and_the_variable_before_both() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["libnccl.so.2", "libnccl.so"].map(|name| folder.path().join(name));
    stub::build(&first, 21801, &stub::FUNCTIONS);
    stub::build(&second, 21802, &stub::FUNCTIONS);
    let version = |environment: &[(&str, &Path)]| child::load(environment).unwrap().1;
    assert_eq!(version(&[("LD_LIBRARY_PATH", folder.path())]), "2.18.1");
    assert_eq!(version(&[("LD_LIBRARY_PATH", folder.path()), ("BURN_DDP_NCCL_LIB", &second)]), "2.18.2");
}

/// A folder in which both names are texts, so that the linker finds no NCCL, whatever this machine has installed.
fn without_nccl() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libnccl.so.2", "libnccl.so"] {
        std::fs::write(folder.path().join(name), "no library, but long enough to be read as one: ".repeat(4))
            .unwrap();
    }
    folder
}

#[test]
fn the_wheel_of_the_active_environment_comes_last() {
    let names = without_nccl();
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    stub::build(&file, 23203, &stub::FUNCTIONS);
    let path = file.canonicalize().unwrap().display().to_string();
    let environment = [("LD_LIBRARY_PATH", names.path()), ("CONDA_PREFIX", root.path())];
    assert_eq!(child::load(&environment), Ok((path, "2.32.3".into())));
}

#[test]
fn no_library_is_a_line_with_everything_that_was_tried() {
    let names = without_nccl();
    let environment = [("LD_LIBRARY_PATH", names.path()), ("VIRTUAL_ENV", Path::new("/none"))];
    let (code, error) = child::load(&environment).unwrap_err();
    assert_eq!(code, 2);
    assert_eq!(error.lines().count(), 1);
    let parts = [
        "tried libnccl.so.2 (",
        ", libnccl.so (",
        ", /none/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2; ",
        "nvidia-nccl-cu12",
        "BURN_DDP_NCCL_LIB",
    ];
    let places = parts.map(|part| error.find(part).unwrap_or_else(|| panic!("{part} is not in: {error}")));
    assert!(places.is_sorted(), "{error}");
}

#[test]
fn a_variable_that_names_no_library_is_the_error() {
    let names = without_nccl();
    // From a pipe the linker would read until there is a writer.
    let pipe = names.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    for file in [Path::new("/none/libnccl.so.2"), &names.path().join("libnccl.so.2"), names.path(), &pipe] {
        let (code, error) = child::load(&[("BURN_DDP_NCCL_LIB", file)]).unwrap_err();
        assert_eq!(code, 2);
        let expected = format!("BURN_DDP_NCCL_LIB: cannot load NCCL from {}: ", file.display());
        assert!(error.starts_with(&expected) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn a_library_that_is_not_nccl_is_called_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libother.so");
    stub::compile(&file, String::new(), &stub::FUNCTIONS);
    let error = Library::open(&file).unwrap_err().to_string();
    assert_eq!(error, format!("{} is not NCCL: it has no ncclGetVersion", file.display()));
}
