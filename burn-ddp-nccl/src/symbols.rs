//! NCCL's C interface: the functions, as a table, and the types that they take.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crate::UniqueId;

/// `ncclComm_t`: an opaque communicator.
pub type RawComm = *mut c_void;
/// `cudaStream_t`.
pub type RawStream = *mut c_void;

/// `NCCL_API_MAGIC`.
const MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`: NCCL decides.
const UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` as of NCCL 2.18: 48 bytes, which every later version accepts, because size and version tell NCCL
/// which fields there are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of this structure.
    pub size: usize,
    /// `NCCL_API_MAGIC`.
    pub magic: u32,
    /// Version of NCCL whose configuration this is, as a number of `NCCL_VERSION`.
    pub version: u32,
    /// 0: a call that would wait returns `ncclInProgress`, and `ncclCommGetAsyncError` is polled until it is done.
    pub blocking: c_int,
    /// `cgaClusterSize`: thread blocks of a cluster, from Hopper on.
    pub cga_cluster_size: c_int,
    /// `minCTAs`: the fewest thread blocks that a kernel of NCCL uses.
    pub min_ctas: c_int,
    /// `maxCTAs`: the most thread blocks.
    pub max_ctas: c_int,
    /// `netName`: the network plugin; null lets NCCL choose.
    pub net_name: *const c_char,
    /// `splitShare`: whether communicators made by `ncclCommSplit` share resources.
    pub split_share: c_int,
}

impl Config {
    /// The configuration of a communicator whose calls do not block. NCCL and its environment variables decide the
    /// rest.
    pub fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: 21800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::new()
    }
}

/// The functions of NCCL that are used, with the prototypes of `nccl.h`. Results are plain integers: a later NCCL may
/// return a code that no enumeration here has.
///
/// Tests make a table of Rust functions. The functions of every table must keep NCCL's contract, because safe code of
/// this crate calls them.
#[derive(Clone, Copy, Debug)]
pub struct Symbols {
    /// `ncclGetVersion(version)`.
    pub get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    /// `ncclGetUniqueId(id)`.
    pub get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    /// `ncclGetErrorString(result)`: a static text, also for a code that NCCL does not know.
    pub get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    /// `ncclGetLastError(comm)`: the last message of this process, whichever communicator is given; null is valid.
    pub get_last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
    /// `ncclCommInitRankConfig(comm, nranks, id, rank, config)`.
    pub comm_init_rank_config:
        unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> c_int,
    /// `ncclCommGetAsyncError(comm, result)`.
    pub comm_get_async_error: unsafe extern "C" fn(RawComm, *mut c_int) -> c_int,
    /// `ncclCommFinalize(comm)`.
    pub comm_finalize: unsafe extern "C" fn(RawComm) -> c_int,
    /// `ncclCommDestroy(comm)`.
    pub comm_destroy: unsafe extern "C" fn(RawComm) -> c_int,
    /// `ncclCommAbort(comm)`.
    pub comm_abort: unsafe extern "C" fn(RawComm) -> c_int,
    /// `ncclGroupStart()`.
    pub group_start: unsafe extern "C" fn() -> c_int,
    /// `ncclGroupEnd()`.
    pub group_end: unsafe extern "C" fn() -> c_int,
    /// `ncclAllReduce(send, receive, count, type, op, comm, stream)`.
    pub all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    /// `ncclReduce(send, receive, count, type, op, root, comm, stream)`.
    pub reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        c_int,
        RawComm,
        RawStream,
    ) -> c_int,
    /// `ncclBroadcast(send, receive, count, type, root, comm, stream)`.
    pub broadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    /// `ncclReduceScatter(send, receive, count received, type, op, comm, stream)`.
    pub reduce_scatter:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    /// `ncclAllGather(send, receive, count sent, type, comm, stream)`.
    pub all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> c_int,
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_configuration_lies_as_nccl_2_18_wants_it() {
        assert_eq!(size_of::<Config>(), 48);
        let offsets = [
            offset_of!(Config, size),
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
            offset_of!(Config, cga_cluster_size),
            offset_of!(Config, min_ctas),
            offset_of!(Config, max_ctas),
            offset_of!(Config, net_name),
            offset_of!(Config, split_share),
        ];
        assert_eq!(offsets, [0, 8, 12, 16, 20, 24, 28, 32, 40]);
    }

    #[test]
    fn the_configuration_does_not_block_and_leaves_the_rest_to_nccl() {
        let config = Config::new();
        assert_eq!((config.size, config.magic, config.version), (48, 0xcafebeef, 21800));
        assert_eq!(config.blocking, 0);
        let open = [config.cga_cluster_size, config.min_ctas, config.max_ctas, config.split_share];
        assert_eq!(open, [i32::MIN; 4]);
        assert!(config.net_name.is_null());
    }
}
