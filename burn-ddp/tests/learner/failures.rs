use crate::harness::Case;
pub const CASES: &[(&str, Case)] = &[];
