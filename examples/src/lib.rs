//! What the programs of this folder share: the choice of a backend, and how a program that is one of several processes
//! begins and ends. Everything that is about training is in the programs themselves.

mod backend;
mod program;

pub use backend::{BackendName, Program, Trains};
pub use program::{Place, agree, check_counts, exit_code, launcher, log_to_stderr, parent, place, say};
