#![doc = include_str!("../README.md")]
//!
//! # How it is built
//! A command line becomes an exit code in four stages, and each stage can be tested without the next:
//!
//! ```text
//! Args ──────────┐
//! (command line) ├─► Options ───► Plan ───────────► Supervisor ─────────► Result
//! Launcher ──────┘   (checked)    (pure: commands,  (starts the ranks,    (exit code and
//! (library call)                  environments)      waits, ends them)     message)
//! ```
//!
//! No stage knows what the ranks compute: a rank is any program that reads torchrun's environment variables. The
//! states of a launch are drawn at the top of `supervisor/mod.rs`.

// Modules in groups: each group uses only the groups above it, and no two files import each other.
mod options;
mod signals;
#[allow(unsafe_code)]
mod sys;

mod output;
mod plan;

mod process;

mod supervisor;

mod launcher;

mod args;

pub use args::Args;
pub use launcher::{Launcher, is_child};
pub use options::{Streams, Tty};
