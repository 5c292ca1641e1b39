//! Buckets that leave while the backward pass runs: the numbers stay, the order on the wire is the plan's.
#![cfg(feature = "overlap")]

#[path = "overlap/errors.rs"]
mod errors;
mod harness;
#[path = "overlap/hook.rs"]
mod hook;
#[path = "overlap/leaving.rs"]
mod leaving;
#[path = "overlap/memory.rs"]
mod memory;
#[path = "overlap/programs.rs"]
mod programs;
#[path = "overlap/setup.rs"]
mod setup;
#[allow(dead_code, reason = "each test binary uses a part of this module")]
mod training;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    let tables = [errors::CASES, leaving::CASES, memory::CASES, programs::CASES];
    harness::run_case(&tables.concat());
}
