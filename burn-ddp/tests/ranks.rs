//! Everything that needs several processes as ranks: one binary, because linking Burn is slow.

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
