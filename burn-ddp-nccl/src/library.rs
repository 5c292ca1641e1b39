#![allow(missing_docs)]
//! NCCL as a table of functions.

use std::ffi::{c_char, c_int, c_void};

use crate::UniqueId;

/// `ncclComm_t`: an opaque communicator.
pub type RawComm = *mut c_void;
/// `cudaStream_t`.
pub type RawStream = *mut c_void;

/// `ncclConfig_t` as of NCCL 2.18: 48 bytes, which every later version accepts because its size and version say which
/// fields it has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
}

/// The functions of NCCL that are used. Results are plain integers: a later NCCL may return a code that no enumeration of
/// ours knows.
#[derive(Clone, Copy, Debug)]
pub struct Symbols {
    pub get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub get_last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
    pub comm_init_rank_config:
        unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> c_int,
    pub comm_get_async_error: unsafe extern "C" fn(RawComm, *mut c_int) -> c_int,
    pub comm_finalize: unsafe extern "C" fn(RawComm) -> c_int,
    pub comm_destroy: unsafe extern "C" fn(RawComm) -> c_int,
    pub comm_abort: unsafe extern "C" fn(RawComm) -> c_int,
    pub group_start: unsafe extern "C" fn() -> c_int,
    pub group_end: unsafe extern "C" fn() -> c_int,
    pub all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
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
    pub broadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    pub reduce_scatter:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> c_int,
    pub all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> c_int,
}
