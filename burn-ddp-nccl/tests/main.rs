//! All tests that link the crate, in one program: NCCL's communicator and whole process groups over a fake NCCL, with
//! processes as ranks, and the search for the library. No GPU is needed, and no NCCL except where a test says so.
#![allow(unsafe_code, reason = "memory is given to NCCL by its address")]

mod communicator;
mod fake;
mod group;
#[allow(unexpected_cfgs, reason = "a file of burn-ddp, which has a launcher")]
#[path = "../../burn-ddp/tests/harness.rs"]
mod harness;
mod library;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    harness::run_case(&[communicator::cases(), group::cases()].concat());
}
