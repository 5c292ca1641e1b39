//! The communicator from connect to drop, over a fake NCCL, with processes as ranks.
//!
//! No GPU and no NCCL is involved: what is tested is what the communicator makes of NCCL's answers.
#![allow(unsafe_code, reason = "memory goes to NCCL by its address")]

mod collectives;
mod failures;
#[path = "../fake/mod.rs"]
mod fake;
#[allow(unexpected_cfgs, reason = "a file of burn-ddp, which has a launcher")]
#[path = "../../../burn-ddp/tests/harness.rs"]
mod harness;
mod last_calls;
mod node;
mod states;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    harness::run_case(&[collectives::CASES, failures::CASES, last_calls::CASES, states::CASES].concat());
}
