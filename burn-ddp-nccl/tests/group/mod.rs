//! Whole process groups over a fake NCCL: tensors in, tensors out.
//!
//! The tensors are Flex's and their memory is the host's. Everything between them and NCCL's functions is what it is on
//! a GPU.

use crate::harness::Case;

mod collectives;
mod endings;
mod failures;
mod host;
mod startup;
mod training;

/// The cases that these tests launch.
pub fn cases() -> Vec<(&'static str, Case)> {
    [collectives::CASES, endings::CASES, failures::CASES, startup::CASES, training::CASES].concat()
}
