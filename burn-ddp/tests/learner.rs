//! Burn's `SupervisedTraining` on several processes against the same training on one.
#![cfg(feature = "train")]

#[path = "learner/compile_error.rs"]
mod compile_error;
#[path = "learner/decisions.rs"]
mod decisions;
#[path = "learner/equal.rs"]
mod equal;
#[path = "learner/failures.rs"]
mod failures;
mod harness;
#[path = "learner/metrics.rs"]
mod metrics;
#[path = "learner/panics.rs"]
mod panics;
#[path = "learner/programs.rs"]
mod programs;
#[path = "learner/setup.rs"]
mod setup;
#[path = "learner/signals.rs"]
mod signals;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    let tables = [
        decisions::CASES,
        equal::CASES,
        failures::CASES,
        metrics::CASES,
        panics::CASES,
        programs::CASES,
        signals::CASES,
    ];
    harness::run_case(&tables.concat());
}

#[cfg(feature = "launcher")]
#[test]
#[ignore = "not a test: the entry of the launcher that tests start"]
fn launcher_process() {
    harness::launch_case();
}
