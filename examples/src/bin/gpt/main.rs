//! Trains a small GPT on English text: alone, or as one of several processes that act as one.
//!
//! ```text
//! cargo run --release --bin gpt                                 # one process, no socket, no thread
//! cargo run --release --bin gpt -- --nproc 2                    # two processes on this machine
//! burnrun --nproc-per-node 2 target/release/gpt                 # the same under a launcher
//! ```
//!
//! All three train alike (but for rounding), because the *global batch* is the constant: `--total-batch-tokens` tokens
//! per optimizer step, one contiguous stretch of the text, whatever the number of processes. It is cut into
//! micro-batches of `--batch-size` rows of `--seq-len` tokens, and with
//! A = total / (batch size * sequence length * processes) rank r takes the micro-batches r*A to r*A+A-1, one after the
//! other, and averages gradients with its peers once.
//!
//! Read [`train`] first: what a training loop for one process has to change is there. [`plan`] cuts the global batch,
//! [`text`] and [`model`] know nothing of processes, [`optimizer`], [`log`] and [`args`] are what any trainer has.

pub(crate) mod args;
pub(crate) mod log;
pub(crate) mod model;
pub(crate) mod optimizer;
pub(crate) mod plan;
pub(crate) mod text;
pub(crate) mod train;

use std::io::Write;
use std::process::ExitCode;

use burn_ddp::launch::Launcher;
use burn_ddp::{Error, RankInfo, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Args, BackendName};
use plan::Plan;
use train::train;

fn run(args: &Args) -> Result<()> {
    let rank = RankInfo::from_env()?;
    let launched = rank.master.is_some();
    match args.nproc {
        Some(nproc) if !launched => {
            Plan::new(args, nproc)?;
            Launcher::new(nproc).args(std::env::args_os().skip(1)).run()
        }
        Some(nproc) if nproc != rank.world_size => Err(Error::config(format!(
            "--nproc {nproc} under a launcher of {} processes: leave --nproc out",
            rank.world_size
        ))),
        _ => {
            let plan = Plan::new(args, rank.world_size)?;
            match args.backend {
                BackendName::Flex => train::<Flex>(args, &plan),
                BackendName::Ndarray => train::<NdArray>(args, &plan),
            }
        }
    }
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without standard error there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "gpt: {error}");
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
        }
    }
}
