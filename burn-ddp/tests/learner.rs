//! Burn's `SupervisedTraining` on several processes against the same training on one.
#![cfg(feature = "train")]

#[path = "learner/decisions.rs"]
mod decisions;
#[path = "learner/equal.rs"]
mod equal;
#[path = "learner/failures.rs"]
mod failures;
mod harness;
#[path = "learner/metrics.rs"]
mod metrics;
#[path = "learner/regressions.rs"]
mod regressions;
#[path = "learner/setup.rs"]
mod setup;

#[test]
#[ignore = "not a test: the entry of the processes that tests launch"]
fn rank_process() {
    let tables = [decisions::CASES, equal::CASES, failures::CASES, metrics::CASES, regressions::CASES];
    harness::run_case(&tables.concat());
}
