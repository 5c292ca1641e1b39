//! A fake NCCL: the table of functions over host memory, with the collectives of `burn-ddp` inside.
//!
//! It imitates NCCL's behaviour and not its speed: calls that go on after they have returned, work that reaches the
//! stream only when a group has settled, errors that are reported later, waits without end. A [`Script`] chooses among
//! them; the [`log`] has the calls in their order. "Device memory" is any memory of the process, and the stream is a
//! [`FakeStream`]. State is global to the process, as NCCL's is: ranks are processes, and each process runs one case.
#![allow(unsafe_code, reason = "a table of C functions")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_ddp_nccl::UniqueId;
use burn_ddp_nccl::library::{Config, RawComm, RawStream, Symbols};

mod comm;
mod stream;
mod wire;
mod work;

pub use stream::FakeStream;

use comm::Comm;
use work::{Kind, Work};

/// Outcome of one step of NCCL.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Step {
    /// It succeeds.
    #[default]
    Ends,
    /// It starts and ends only by an abort.
    Never,
    /// It starts, and its error is reported later.
    Fails(c_int),
    /// The call itself returns the error.
    Refuses(c_int),
    /// The process exits in the middle of it.
    Exits,
}

/// Outcomes of all steps from now on in this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Script {
    /// Number of polls that find each started call still in progress.
    pub busy: u32,
    pub init: Step,
    /// The call that adds a collective to a group: ends or refuses.
    pub call: Step,
    pub group_end: Step,
    /// The work on the stream.
    pub collective: Step,
    pub finalize: Step,
    /// `Ends` or `Never`: NCCL's abort does not return while a peer of the same host has not begun its own.
    pub abort: Step,
    pub destroy: Step,
}

static SCRIPT: Mutex<Option<Script>> = Mutex::new(None);
static LOG: Mutex<Vec<&str>> = Mutex::new(Vec::new());
static COMMS: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// As in NCCL a group belongs to a thread.
    static GROUP: RefCell<Option<Vec<Call>>> = const { RefCell::new(None) };
}

/// A collective in a group: its communicator, its stream and its work.
type Call = (Arc<Comm>, usize, Work);

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the script from now on.
pub fn play(script: Script) {
    *lock(&SCRIPT) = Some(script);
}

fn script() -> Script {
    lock(&SCRIPT).unwrap_or_default()
}

/// Names of the calls since the last time, and three more entries: "in progress" (once for any number of such answers
/// in a row), "enqueued" when the work of a group reaches the stream, and "record" when an event is recorded.
pub fn log() -> Vec<&'static str> {
    std::mem::take(&mut *lock(&LOG))
}

fn note(event: &'static str) {
    let mut log = lock(&LOG);
    if event != "in progress" || log.last() != Some(&event) {
        log.push(event);
    }
}

/// True if a group of this thread is open.
pub fn group_is_open() -> bool {
    GROUP.with_borrow(Option::is_some)
}

/// The table of the fake's functions.
pub fn symbols() -> Symbols {
    Symbols {
        get_version,
        get_unique_id,
        get_error_string,
        get_last_error,
        comm_init_rank_config,
        comm_get_async_error,
        comm_finalize,
        comm_destroy,
        comm_abort,
        group_start,
        group_end,
        all_reduce,
        reduce,
        broadcast,
        reduce_scatter,
        all_gather,
    }
}

/// The communicator behind a handle. Use after free, or of null, ends the process: a panic cannot leave a C function.
fn comm(handle: RawComm) -> Arc<Comm> {
    lock(&COMMS).get(&handle.addr()).expect("a communicator that is neither aborted nor destroyed").clone()
}

fn freed(handle: RawComm) -> Arc<Comm> {
    lock(&COMMS).remove(&handle.addr()).expect("a communicator that is neither aborted nor destroyed")
}

unsafe extern "C" fn get_version(version: *mut c_int) -> c_int {
    // SAFETY: the caller's place.
    unsafe { *version = 22_000 };
    SUCCESS
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> c_int {
    let Ok(new) = UniqueId::from_bytes(&wire::invite()) else { return INVALID_ARGUMENT };
    // SAFETY: the caller's place.
    unsafe { *id = new };
    SUCCESS
}

unsafe extern "C" fn get_error_string(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        _ => c"another error",
    }
    .as_ptr()
}

unsafe extern "C" fn get_last_error(_: RawComm) -> *const c_char {
    c"the fake's last words,\nin two lines".as_ptr()
}

unsafe extern "C" fn comm_init_rank_config(
    out: *mut RawComm,
    world_size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    note("init");
    // SAFETY: both are the caller's.
    let config = unsafe {
        *out = ptr::null_mut();
        *config
    };
    let known = config.size == 48 && config.magic == 0xcafe_beef && config.version == 21_800;
    if !known || config.blocking != 0 || rank < 0 || rank >= world_size {
        return INVALID_ARGUMENT;
    }
    match script().init {
        Step::Refuses(code) => {
            // The mistake of NCCL 2.23 to 2.30.
            GROUP.set(Some(Vec::new()));
            return code;
        }
        Step::Exits => std::process::exit(7),
        _ => {}
    }
    let comm = Comm::new();
    comm.begin(script().init);
    if script().init == Step::Ends {
        comm.connect(id.as_bytes(), rank as usize, world_size as usize);
    }
    let mut comms = lock(&COMMS);
    let handle = comms.last_key_value().map_or(1, |(last, _)| last + 1);
    comms.insert(handle, comm);
    // SAFETY: the caller's place.
    unsafe { *out = ptr::without_provenance_mut(handle) };
    IN_PROGRESS
}

unsafe extern "C" fn comm_get_async_error(handle: RawComm, state: *mut c_int) -> c_int {
    let answer = comm(handle).answer();
    if answer == IN_PROGRESS {
        note("in progress");
    }
    // SAFETY: the caller's place.
    unsafe { *state = answer };
    SUCCESS
}

unsafe extern "C" fn comm_finalize(handle: RawComm) -> c_int {
    note("finalize");
    match script().finalize {
        Step::Refuses(code) => code,
        step => comm(handle).begin(step),
    }
}

unsafe extern "C" fn comm_destroy(handle: RawComm) -> c_int {
    note("destroy");
    freed(handle);
    block_if_never(script().destroy);
    SUCCESS
}

/// Does not return if `step` is `Never`.
fn block_if_never(step: Step) {
    if step == Step::Never {
        loop {
            std::thread::park();
        }
    }
}

unsafe extern "C" fn comm_abort(handle: RawComm) -> c_int {
    note("abort");
    let comm = freed(handle);
    block_if_never(script().abort);
    comm.abort();
    SUCCESS
}

unsafe extern "C" fn group_start() -> c_int {
    note("group_start");
    if group_is_open() {
        return INVALID_USAGE;
    }
    GROUP.set(Some(Vec::new()));
    SUCCESS
}

unsafe extern "C" fn group_end() -> c_int {
    note("group_end");
    match (GROUP.take(), script().group_end) {
        (None, _) => INVALID_USAGE,
        (_, Step::Refuses(code)) => code,
        (Some(calls), step) => launch(calls, step),
    }
}

/// The work of a group goes to the communicators, which enqueue it when they are no longer busy.
fn launch(calls: Vec<Call>, step: Step) -> c_int {
    let mut comms: Vec<Arc<Comm>> = Vec::new();
    for (comm, stream, work) in calls {
        comm.plan(stream, work);
        if !comms.iter().any(|known| Arc::ptr_eq(known, &comm)) {
            comms.push(comm);
        }
    }
    comms.iter().map(|comm| comm.begin(step)).max().unwrap_or(SUCCESS)
}

/// Adds to the group that is open, or else launches at once.
fn call(name: &'static str, handle: RawComm, stream: RawStream, work: Option<Work>) -> c_int {
    note(name);
    let Some(work) = work else { return INVALID_ARGUMENT };
    if let Step::Refuses(code) = script().call {
        return code;
    }
    let call = (comm(handle), stream.addr(), work);
    let single = GROUP.with_borrow_mut(|group| match group {
        Some(calls) => {
            calls.push(call);
            None
        }
        None => Some(call),
    });
    match single {
        Some(call) => launch(vec![call], Step::Ends),
        None if script().busy > 0 => IN_PROGRESS,
        None => SUCCESS,
    }
}

unsafe extern "C" fn all_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("all_reduce", comm, stream, Work::new(Kind::AllReduce, send, recv, count, dtype, Some(op), 0))
}

unsafe extern "C" fn reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("reduce", comm, stream, Work::new(Kind::Reduce, send, recv, count, dtype, Some(op), root))
}

unsafe extern "C" fn broadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("broadcast", comm, stream, Work::new(Kind::Broadcast, send, recv, count, dtype, None, root))
}

unsafe extern "C" fn reduce_scatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call(
        "reduce_scatter",
        comm,
        stream,
        Work::new(Kind::ReduceScatter, send, recv, count, dtype, Some(op), 0),
    )
}

unsafe extern "C" fn all_gather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("all_gather", comm, stream, Work::new(Kind::AllGather, send, recv, count, dtype, None, 0))
}
