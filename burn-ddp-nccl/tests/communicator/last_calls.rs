//! The two calls of NCCL that cannot be polled, when they do not return.

use std::time::{Duration, Instant};

use burn_ddp::{DType, ErrorKind, ReduceOp, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_nccl::Span;

use super::node::{Buffer, LIMIT, Node};
use crate::fake::{self, Script, Step};
use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] = &[("stuck in the last call", stuck_in_the_last_call)];

/// The limit of a call that cannot be interrupted.
const LAST_CALL: Duration = Duration::from_secs(3);

fn stuck_in_the_last_call() -> Result<String> {
    let node = Node::connect_tcp()?;
    let mut buffer = Buffer::new(&[0; 16]);
    let span = Span { send: buffer.pointer(), recv: buffer.pointer(), count: 4 };
    let mut comm = node.connect(LIMIT)?;
    fake::play(Script { destroy: Step::Never, ..Script::default() });
    let start = Instant::now();
    let error = comm.finish().unwrap_err();
    assert!(error.to_string().starts_with("destroy on rank 0 has not ended within 3s"), "{error}");
    assert!((LAST_CALL..LAST_CALL + Duration::from_secs(2)).contains(&start.elapsed()));
    assert!(!comm.is_released());
    drop(comm);

    let mut comm = node.connect(LIMIT)?;
    fake::play(Script { collective: Step::Never, abort: Step::Never, ..Script::default() });
    // SAFETY: the buffer lives until the process ends.
    unsafe { comm.start_all_reduce(&[span], DType::F32, ReduceOp::Sum) }?;
    std::mem::forget(buffer);
    let start = Instant::now();
    let error = comm.wait(Deadline::after(Duration::from_secs(1))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(!comm.is_released());
    // The abort is not tried again.
    comm.abort();
    drop(comm);
    assert!(start.elapsed() < LAST_CALL + Duration::from_secs(4), "{:?}", start.elapsed());
    assert_eq!(fake::log().iter().filter(|event| **event == "abort").count(), 1);
    Ok(String::new())
}

#[test]
fn a_last_call_that_does_not_come_back_is_left_behind() {
    Launch::new("stuck in the last call", 1).succeed();
}
