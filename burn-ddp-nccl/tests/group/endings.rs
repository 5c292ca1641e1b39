//! NCCL and its memory when a group ends outside of a wait.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_ddp::{ReduceOp, Result};

use super::host::{B, PANIC_AT_EVENT, events, group};
use crate::fake::{self, Script, Step};
use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] = &[
    ("idle", idle),
    ("abort that hangs", abort_that_hangs),
    ("late, then stuck", late_then_stuck),
    ("panic", panic),
];

fn sum(group: &burn_ddp::ProcessGroup<B>) -> burn_ddp::Work<Tensor<B, 1>> {
    group.all_reduce(Tensor::ones([4], group.device()), ReduceOp::Sum)
}

/// Rank 0 ends the group while rank 1 is busy in its own code.
fn idle() -> Result<String> {
    let group = group()?;
    sum(&group).wait()?;
    // Rank 0 leaves the barrier when rank 1 has its sum; the end of the group may still meet rank 1 in the barrier.
    let passed = group.barrier();
    if group.rank().is_root() {
        passed?;
        group.abort("enough");
    }
    let end = Instant::now() + Duration::from_secs(10);
    while !events().contains(&"abort") {
        assert!(Instant::now() < end, "an idle rank keeps its communicator");
        std::thread::yield_now();
    }
    Ok(sum(&group).wait().expect_err("the group has ended").to_string())
}

#[test]
fn a_rank_that_is_busy_elsewhere_lets_go_of_nccl_when_the_group_ends() {
    for text in Launch::new("idle", 2).succeed() {
        assert!(text.contains("enough"), "{text}");
    }
}

/// NCCL returns neither from the collective nor from the abort.
fn abort_that_hangs() -> Result<String> {
    let group = group()?;
    group.barrier()?;
    fake::play(Script { collective: Step::Never, abort: Step::Never, ..Script::default() });
    let error = sum(&group).wait().expect_err("it never ends").to_string();
    let events = events();
    assert!(events.contains(&"abort") && !events.contains(&"memory"), "{events:?}");
    drop(group);
    Ok(error)
}

#[test]
fn memory_that_nccl_may_still_write_to_is_never_given_back() {
    let start = Instant::now();
    for text in Launch::new("abort that hangs", 2).env("BURN_DDP_TIMEOUT", 1).succeed() {
        assert!(text.contains("all_reduce"), "{text}");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

/// Rank 1 is late by most of the limit, and then NCCL never ends.
fn late_then_stuck() -> Result<String> {
    let group = group()?;
    group.barrier()?;
    fake::play(Script { collective: Step::Never, ..Script::default() });
    let start = Instant::now();
    while group.rank().0 == 1 && start.elapsed() < Duration::from_millis(3500) {
        std::thread::yield_now();
    }
    let error = sum(&group).wait().expect_err("it never ends").to_string();
    // The limit, and a second for a peer to report the cause.
    assert!(group.rank().0 == 1 || start.elapsed() < Duration::from_secs(7), "{:?}", start.elapsed());
    Ok(error)
}

#[test]
fn a_collective_has_one_limit_for_late_ranks_and_for_nccl() {
    for text in Launch::new("late, then stuck", 2).env("BURN_DDP_TIMEOUT", 4).succeed() {
        assert!(text.contains("all_reduce"), "{text}");
    }
}

/// The communication thread panics with a collective in flight.
fn panic() -> Result<String> {
    let group = group()?;
    group.barrier()?;
    PANIC_AT_EVENT.store(group.rank().is_root(), Ordering::SeqCst);
    // Rank 1 may have its result: everything that it needs of rank 0 was sent before the panic.
    let first = sum(&group).wait();
    assert!(first.is_err() || !group.rank().is_root(), "no result of a thread that panicked");
    let error = sum(&group).wait().expect_err("the group has ended").to_string();
    if group.rank().is_root() {
        let events = events();
        let at = |name| events.iter().position(|event| *event == name);
        assert!(at("abort") < at("memory") && at("abort").is_some(), "{events:?}");
    }
    Ok(error)
}

#[test]
fn a_panic_of_the_communication_thread_aborts_before_it_gives_memory_back() {
    for text in Launch::new("panic", 2).succeed() {
        assert!(text.contains("the communication thread panicked: asked to panic"), "{text}");
    }
}
