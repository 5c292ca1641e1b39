//! Parts that the benchmarks share.
//!
//! Each benchmark is a program of several processes that starts itself ([`ranks`]), checks what it computes against a
//! closed form ([`pattern`]) before and after it takes times ([`times`]), and prints a table besides one line per
//! measurement for `compare.sh` ([`csv`]).

pub mod csv;
pub mod gradients;
pub mod memory;
pub mod model;
pub mod pattern;
pub mod ranks;
pub mod sizes;
pub mod times;
