//! Trains a small GPT on English text: alone, or as one of several processes that act as one.
//!
//! ```text
//! cargo run --release --bin gpt                                 # one process, no socket, no thread
//! cargo run --release --bin gpt -- --nproc 2                    # two processes on this machine
//! burnrun --nproc-per-node 2 target/release/gpt                 # the same under a launcher
//! cargo run --release --features cuda --bin gpt -- --backend cuda --nproc 2    # the same on two GPUs
//! ```
//!
//! All of them train alike (but for rounding), because the *global batch* is the constant: `--total-batch-tokens`
//! tokens per optimizer step, one contiguous stretch of the text, whatever the number of processes. It is cut into
//! micro-batches of `--batch-size` rows of `--seq-len` tokens, and with A = total / (batch size * sequence length *
//! processes) rank r takes the micro-batches r*A to r*A+A-1, one after the other, and averages gradients with its peers
//! once. With `--reproducible` not even rounding depends on the number of processes, as long as it is a power of two.
//!
//! `--layers 12 --heads 12 --embd 768 --seq-len 1024 --tokenizer gpt2 --batch-size 1` is the smallest GPT-2, of 124
//! million parameters.
//!
//! Read [`train`] first: it has everything that a training loop for one process must change. [`plan`] cuts the global
//! batch; [`text`] and [`model`] do not depend on processes; [`optimizer`], [`log`] and [`args`] are those of any
//! trainer.

pub(crate) mod args;
pub(crate) mod log;
pub(crate) mod model;
pub(crate) mod optimizer;
pub(crate) mod plan;
pub(crate) mod text;
pub(crate) mod train;

use std::process::ExitCode;

use burn_ddp::Result;
use burn_ddp_examples::{Role, exit_code, launcher, log_to_stderr, role};
use clap::Parser;

use args::Args;
use plan::Plan;
use train::Training;

fn run(args: &Args) -> Result<()> {
    match role(args.processes.nproc)? {
        Role::Launcher(nproc) => {
            // Errors are reported once, before a process is started.
            Plan::new(args, nproc)?;
            launcher(nproc).run()
        }
        Role::Rank(info) => {
            let plan = Plan::new(args, info.world_size)?;
            args.processes.backend.run(Training { args, plan: &plan })
        }
    }
}

fn main() -> ExitCode {
    log_to_stderr();
    exit_code("gpt", run(&Args::parse()))
}
