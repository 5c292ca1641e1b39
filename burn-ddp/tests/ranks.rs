//! Everything that needs several processes as ranks: one binary, because linking Burn is slow.
#![cfg(feature = "burn")]

mod equivalence;
mod faults;
mod group;
mod harness;
mod norm;
mod regression;
mod startup;
mod toy;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    let tables = [
        equivalence::CASES,
        faults::CASES,
        group::CASES,
        norm::CASES,
        regression::CASES,
        startup::CASES,
        toy::CASES,
    ];
    harness::run_case(&tables.concat());
}
