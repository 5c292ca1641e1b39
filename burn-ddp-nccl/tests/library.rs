//! The search for NCCL, and what a real one says without a device. Fakes are libraries of a few lines, built here;
//! each search runs in a process of its own, since the system's linker reads its environment once.
#![allow(unsafe_code)]

#[path = "library/child.rs"]
mod child;
#[path = "library/fake.rs"]
mod fake;
#[path = "library/real.rs"]
mod real;
#[path = "library/search.rs"]
mod search;
