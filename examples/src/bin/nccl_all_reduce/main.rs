//! Bandwidth of all-reduces between GPUs: NCCL alone, and the same through a process group.
//!
//! ```text
//! cargo run --release --features cuda --bin nccl_all_reduce -- --nproc 4
//! cargo run --release --features cuda --bin nccl_all_reduce -- --nproc 4 --min-bytes 1M --max-bytes 1G
//! ```
//!
//! The columns are those of `all_reduce_perf` of NVIDIA's nccl-tests, for f32 and sums, out of place; `raw.rs` has all
//! of NCCL that this needs. One difference: each all-reduce is waited for before the next one begins, as an optimizer
//! step does, so small sizes include the latency of a launch and a wait. The last column is `ProcessGroup::all_reduce`
//! of a tensor of that size, with the copy of the tensor into a bucket and the fence between Burn's stream and NCCL's.
//!
//! Each size is verified on all ranks, both ways, before it is timed. A sum that is wrong ends the program.
//!
//! One process measures the cost of a call, since nothing is sent: its bus bandwidth is 0. Its group does not use NCCL,
//! unless `BURN_DDP_CONNECT_ALONE=1` is set.

mod raw;
mod table;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_cuda::Cuda;
use burn_ddp::{Ddp, Error, ErrorKind, ProcessGroup, ReduceOp, Result};
use burn_ddp_examples::{Role, Trains, check_counts, exit_code, launcher, log_to_stderr, role, say};
use burn_ddp_nccl::library::Library;
use clap::Parser;

use raw::Raw;
use table::{ELEMENT, Row, bytes, head, sizes};

/// Measure all-reduces of many sizes over NCCL, alone and through a process group.
#[derive(Parser)]
#[command(version, allow_negative_numbers = true)]
struct Args {
    /// Start this many processes on this machine, one for each GPU; without it, be the rank that the environment names,
    /// or the only one
    #[arg(long)]
    nproc: Option<usize>,
    /// Smallest size; K, M and G are powers of 1024
    #[arg(long, value_name = "BYTES", default_value = "8", value_parser = bytes)]
    min_bytes: usize,
    /// Largest size; each is twice the one before
    #[arg(long, value_name = "BYTES", default_value = "128M", value_parser = bytes)]
    max_bytes: usize,
    /// All-reduces of a size before time counts
    #[arg(long, default_value_t = 5)]
    warmup: usize,
    /// All-reduces of a size whose mean is printed
    #[arg(long, default_value_t = 20)]
    repetitions: usize,
}

type Inner = Ddp<Cuda>;

fn sweep(group: &ProcessGroup<Inner>, args: &Args) -> Result<()> {
    let (root, world_size) = (group.rank().is_root(), group.world_size());
    let library = Library::load()?;
    let mut raw = Raw::connect(group, &library, group.device().index, args.max_bytes)?;
    if root {
        say(format_args!(
            "# NCCL {} from {}, {world_size} process(es), f32 sums, mean of {} after {}, slowest rank",
            library.version(),
            library.path().display(),
            args.repetitions,
            args.warmup
        ))?;
        if world_size == 1 {
            let connected = match group.options().connect_alone {
                true => "",
                false => {
                    ", and all_reduce returns its tensor; set BURN_DDP_CONNECT_ALONE=1 to send it through NCCL"
                }
            };
            say(format_args!("# one process: nothing is on the bus, busbw is 0{connected}"))?;
        }
        say(format_args!("{}", head()))?;
    }
    for bytes in sizes(args.min_bytes, args.max_bytes) {
        let row = measure(group, &mut raw, bytes, args)?;
        if root {
            say(format_args!("{row}"))?;
        }
    }
    raw.finish()
}

fn measure(group: &ProcessGroup<Inner>, raw: &mut Raw, bytes: usize, args: &Args) -> Result<Row> {
    let (rank, world_size, count) = (group.rank().0, group.world_size(), bytes / ELEMENT);
    let mine = values(count, rank + 1);
    let expected = values(count, world_size * (world_size + 1) / 2);

    raw.fill(&mine)?;
    raw.all_reduce(count)?;
    verify("NCCL", bytes, &raw.sum(count)?, &expected)?;
    let tensor = Tensor::<Inner, 1>::from_data(TensorData::new(mine, [count]), group.device());
    // A clone, here and below: a tensor that has another owner is not reduced in place.
    let all_reduce = || group.all_reduce(tensor.clone(), ReduceOp::Sum).wait();
    let sum = all_reduce()?.into_data().into_vec::<f32>();
    let sum = sum.map_err(|error| Error::new(ErrorKind::Device, format!("{error:?}")))?;
    verify("the group", bytes, &sum, &expected)?;
    // A rank with a wrong sum does not reach the barrier, which then fails on the others.
    group.barrier()?;

    let nccl = time(args, || raw.all_reduce(count), || Ok(()))?;
    let through_group = time(args, || all_reduce().map(drop), || settled(group))?;
    Ok(Row { bytes, world_size, nccl: slowest(group, nccl)?, group: slowest(group, through_group)? })
}

/// Whole numbers, different next to each other, whose sums over up to 364 ranks are exact in any order.
fn values(count: usize, factor: usize) -> Vec<f32> {
    (0..count).map(|i| ((i % 251 + 1) * factor) as f32).collect()
}

fn verify(by: &str, bytes: usize, sum: &[f32], expected: &[f32]) -> Result<()> {
    let Some(at) = (0..expected.len()).find(|at| sum.get(*at) != Some(&expected[*at])) else { return Ok(()) };
    let message = format!(
        "{bytes} bytes: element {at} of the sum by {by} is {:?}, expected {}",
        sum.get(at),
        expected[at]
    );
    Err(Error::new(ErrorKind::Diverged, message))
}

/// The mean time of one call of `once`; `settle` waits for work that it has left to the device.
fn time(
    args: &Args,
    mut once: impl FnMut() -> Result<()>,
    settle: impl Fn() -> Result<()>,
) -> Result<Duration> {
    let mut repeat = |count: usize| (0..count).try_for_each(|_| once()).and_then(|()| settle());
    repeat(args.warmup)?;
    let started = Instant::now();
    repeat(args.repetitions)?;
    Ok(started.elapsed().div_f64(args.repetitions as f64))
}

fn settled(group: &ProcessGroup<Inner>) -> Result<()> {
    Inner::sync(group.device()).map_err(|error| Error::new(ErrorKind::Device, format!("{error}")))
}

/// The longest time of all ranks.
fn slowest(group: &ProcessGroup<Inner>, time: Duration) -> Result<Duration> {
    let all = group.all_gather_bytes(time.as_secs_f64().to_le_bytes().to_vec())?;
    let seconds = |bytes: &Vec<u8>| f64::from_le_bytes(bytes[..].try_into().unwrap_or_default());
    Ok(Duration::from_secs_f64(all.iter().map(seconds).fold(0.0, f64::max)))
}

fn run(args: &Args) -> Result<()> {
    check_counts(&[("--repetitions", args.repetitions), ("--warmup", args.warmup.max(1))])?;
    if args.max_bytes < args.min_bytes {
        return Err(Error::config(format!(
            "--max-bytes {} is less than --min-bytes {}: nothing to measure",
            args.max_bytes, args.min_bytes
        )));
    }
    match role(args.nproc)? {
        Role::Launcher(nproc) => launcher(nproc).run(),
        Role::Rank(_) => {
            let group = <Cuda as Trains>::begin()?;
            // An error of this rank is told to its peers.
            group.finish(sweep(&group, args))
        }
    }
}

fn main() -> ExitCode {
    log_to_stderr();
    exit_code("nccl_all_reduce", run(&Args::parse()))
}
