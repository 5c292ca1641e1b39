//! The backend, and everything that needs several processes as ranks: one binary, because linking Burn is slow.

mod backend;
#[cfg(feature = "train")]
mod data;
mod equivalence;
mod faults;
mod group;
mod harness;
#[cfg(feature = "train")]
mod norm;
mod regression;
mod reproducible;
mod startup;
mod toy;
#[allow(dead_code, reason = "each test binary uses a part of this module")]
mod training;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    let tables = [
        #[cfg(feature = "train")]
        data::CASES,
        equivalence::CASES,
        faults::CASES,
        group::CASES,
        #[cfg(feature = "train")]
        norm::CASES,
        regression::CASES,
        reproducible::CASES,
        startup::CASES,
        toy::CASES,
    ];
    harness::run_case(&tables.concat());
}
