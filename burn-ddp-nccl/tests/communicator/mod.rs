//! `NcclComm` from connect to drop, over a fake NCCL: these tests fix what it makes of NCCL's answers.

use crate::harness::Case;

mod collectives;
mod failures;
mod last_calls;
mod node;
mod states;

/// The cases that these tests launch.
pub fn cases() -> Vec<(&'static str, Case)> {
    [collectives::CASES, failures::CASES, last_calls::CASES, states::CASES].concat()
}
