//! A real NCCL on a machine without a device; `BURN_DDP_TEST_NCCL` names its file.

use std::ffi::c_int;
use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use burn_ddp_nccl::UniqueId;
use burn_ddp_nccl::library::{Config, Library, Version};

use super::child;

const CUDA_ERROR: c_int = 1;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

fn file() -> PathBuf {
    std::env::var_os("BURN_DDP_TEST_NCCL").expect("BURN_DDP_TEST_NCCL").into()
}

#[test]
#[ignore = "needs NCCL: set BURN_DDP_TEST_NCCL to a libnccl.so.2"]
fn version_functions_and_ids() {
    let library = Library::open(&file()).unwrap();
    println!("{}: NCCL {}", library.path().display(), library.version());
    assert_eq!(library.path(), file().canonicalize().unwrap());

    let symbols = library.symbols();
    let mut number = 0;
    // SAFETY: it writes one integer.
    assert_eq!(unsafe { (symbols.get_version)(&mut number) }, 0);
    assert_eq!(library.version(), Version::from_code(number));

    let ids = [UniqueId::new(&symbols).unwrap(), UniqueId::new(&symbols).unwrap()];
    assert_ne!(ids[0], ids[1]);
    assert_eq!(UniqueId::from_bytes(ids[0].as_bytes()).unwrap(), ids[0]);
}

#[test]
#[ignore = "needs NCCL: set BURN_DDP_TEST_NCCL to a libnccl.so.2"]
fn an_init_without_a_device_fails_at_once() {
    child::init_without_device(&file());
}

/// Runs where no device is visible.
pub fn init(library: &Library) {
    let symbols = library.symbols();
    let id = UniqueId::new(&symbols).unwrap();
    let (mut comm, mut config) = (ptr::null_mut(), Config::new());
    let start = Instant::now();
    // SAFETY: the arguments live through the call, and without a device nothing goes on after it.
    let code = unsafe { (symbols.comm_init_rank_config)(&mut comm, 1, id, 0, &mut config) };
    assert_eq!(code, CUDA_ERROR);
    assert!(comm.is_null());
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());

    // Some versions leave the group of a failed init open: one end closes it, and to the others it is a usage error.
    // SAFETY: no arguments, no group that anyone else has open.
    let ends = unsafe { [(symbols.group_end)(), (symbols.group_end)()] };
    println!("NCCL {}: ends of groups after a failed init {ends:?}", library.version());
    assert!([0, INVALID_USAGE].contains(&ends[0]));
    assert_eq!(ends[1], INVALID_USAGE);

    let mut state = -1;
    // SAFETY: NCCL checks for a null communicator.
    let codes = unsafe {
        [
            (symbols.comm_get_async_error)(comm, &mut state),
            (symbols.comm_finalize)(comm),
            (symbols.comm_destroy)(comm),
            (symbols.comm_abort)(comm),
        ]
    };
    assert_eq!(codes, [INVALID_ARGUMENT, 0, 0, 0]);
    assert_eq!(state, -1, "not written");
}
