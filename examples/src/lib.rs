//! Shared parts of the programs in this folder: the choice of a backend, arguments, and the start and end of a program
//! that is one of several processes. Everything about training is in the programs themselves.

mod arguments;
mod backend;
mod program;

pub use arguments::{
    Processes, agree_on_arguments, check_counts, check_not_negative, check_output_file, check_share,
};
pub use backend::{BackendName, Program, Trains};
pub use program::{Role, exit_code, launcher, log_to_stderr, role, say};
