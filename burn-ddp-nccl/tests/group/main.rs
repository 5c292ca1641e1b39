//! Whole process groups over a fake NCCL, with processes as ranks: tensors in, tensors out.
//!
//! No GPU and no NCCL is involved. The tensors are Flex's, their memory is the host's, and everything between them and
//! NCCL's functions is what it is on a GPU.
#![allow(unsafe_code, reason = "memory goes to NCCL by its address")]

mod collectives;
mod endings;
mod failures;
#[path = "../fake/mod.rs"]
mod fake;
#[allow(unexpected_cfgs, reason = "a file of burn-ddp, which has a launcher")]
#[path = "../../../burn-ddp/tests/harness.rs"]
mod harness;
mod host;
mod startup;
mod training;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    harness::run_case(
        &[collectives::CASES, endings::CASES, failures::CASES, startup::CASES, training::CASES].concat(),
    );
}
