//! Shared parts of the benchmarks.
//!
//! Each benchmark is a program of several processes that starts itself ([`ranks`]). It checks its results against a
//! closed form ([`pattern`], [`gradients`]) before and after it takes times ([`times`]), prints a table, and writes one
//! line for each measurement for `compare.sh` ([`csv`]).

pub mod csv;
pub mod gradients;
pub mod memory;
pub mod model;
pub mod pattern;
pub mod ranks;
pub mod sizes;
pub mod times;
