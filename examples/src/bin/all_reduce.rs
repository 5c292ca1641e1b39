//! Hello, ranks: every process names its rank, host and process id; then all sum a small tensor and check the sum.
//!
//! ```text
//! cargo run --bin all_reduce                                    # a world of one
//! cargo run --bin all_reduce -- --nproc 3                       # three processes on this machine
//! burnrun --nproc-per-node 3 target/debug/all_reduce            # the same under a launcher
//! ```

use std::process::ExitCode;

use burn::tensor::Tensor;
use burn_ddp::{Ddp, Error, ErrorKind, ProcessGroup, ReduceOp, Result};
use burn_ddp_examples::{Role, exit_code, launcher, log_to_stderr, role, say};
use burn_flex::{Flex, FlexDevice};
use clap::Parser;

/// Every process says who it is, then they add up a small tensor and check the sum.
#[derive(Parser)]
#[command(version, allow_negative_numbers = true)]
struct Args {
    /// Start this many processes on this machine; without it, be the rank that the environment names, or the only one
    #[arg(long)]
    nproc: Option<usize>,
}

fn hello() -> Result<()> {
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&FlexDevice)?;
    // An error of this rank is told to its peers.
    group.finish(say_hello(&group))
}

fn say_hello(group: &ProcessGroup<Ddp<Flex>>) -> Result<()> {
    let device = group.device();
    let (rank, world_size) = (group.rank(), group.world_size());

    // Lines of several processes arrive in any order, so rank 0 collects them and prints.
    let host = hostname::get().map_err(|error| Error::io("cannot tell this host's name", error))?;
    let line = format!(
        "{rank} of {world_size} on host {}, process {}, device {device:?}",
        host.to_string_lossy(),
        std::process::id()
    );
    let lines = group.all_gather_bytes(line.into_bytes())?;
    if rank.is_root() {
        lines.iter().try_for_each(|line| say(format_args!("{}", String::from_utf8_lossy(line))))?;
    }

    // Element i is (rank + 1) * (i + 1), so its sum over n ranks is (i + 1) * n (n + 1) / 2: whole numbers, exact.
    let tensor = |factor: usize| {
        Tensor::<Ddp<Flex>, 1>::from_floats([1, 2, 3, 4].map(|i| (i * factor) as f32), device)
    };
    let sum = group.all_reduce(tensor(rank.0 + 1), ReduceOp::Sum).wait()?.into_data();
    let expected = tensor(world_size * (world_size + 1) / 2).into_data();
    if sum != expected {
        return Err(Error::new(ErrorKind::Diverged, format!("{rank} has {sum}, expected {expected}")));
    }
    // Behind the barrier all ranks have compared.
    group.barrier()?;
    if rank.is_root() {
        say(format_args!("all_reduce: {sum} on all {world_size} ranks, as expected"))?;
        let stats = group.stats();
        for (name, calls) in &stats.by_name {
            say(format_args!("{name}: {} call(s), {} bytes given by rank 0", calls.calls, calls.bytes))?;
        }
        say(format_args!("waited {:?}", stats.waited))?;
    }
    Ok(())
}

fn run(args: &Args) -> Result<()> {
    match role(args.nproc)? {
        Role::Launcher(nproc) => launcher(nproc).run(),
        Role::Rank(_) => hello(),
    }
}

fn main() -> ExitCode {
    log_to_stderr();
    exit_code("all_reduce", run(&Args::parse()))
}
