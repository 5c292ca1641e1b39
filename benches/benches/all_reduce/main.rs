//! `all_reduce` from 1 byte to 256 MiB: time, algorithm bandwidth (bytes over time) and bus bandwidth, which is the
//! former times `2 (N - 1) / N`, the share of the bytes that has to cross a rank's link in each direction.
//!
//! Every size is verified on every rank, each element against a closed form, before and after its times are taken; a
//! wrong element ends the program, and no time of that size is printed. An `all_reduce` of one element aligns the ranks
//! before each iteration, and the time is rank 0's. The buffer holds zeros while times are taken, because sums of sums
//! overflow.
//!
//! ```sh
//! cargo bench -p burn-ddp-benches --bench all_reduce
//! cargo bench -p burn-ddp-benches --bench all_reduce -- --nproc 4 --bytes 4KiB,1MiB --dtype bf16
//! cargo bench -p burn-ddp-benches --bench all_reduce -- --group --segments 8
//! ```

use std::process::ExitCode;
use std::time::Instant;

use burn_ddp::{DType, Error, Rank, RankInfo, Result};
use burn_ddp_benches::csv::Measurement;
use burn_ddp_benches::pattern::Pattern;
use burn_ddp_benches::ranks::{Ranks, say};
use burn_ddp_benches::sizes;
use burn_ddp_benches::times::Times;
use clap::Parser;

mod direct;
mod group;

/// `all_reduce` by size: time and bandwidth, each size verified
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    /// Sizes on one rank (B, KiB, MiB, GiB), each rounded up to whole elements
    #[arg(long, value_delimiter = ',', value_parser = sizes::parse,
        default_value = "1B,64B,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB")]
    bytes: Vec<usize>,
    /// Type of the elements
    #[arg(long, value_delimiter = ',', value_parser = dtype, default_value = "f32")]
    dtype: Vec<DType>,
    /// Call through a `ProcessGroup` with tensors, instead of the collective itself with bytes
    #[arg(long)]
    group: bool,
    /// Give the buffer as so many segments
    #[arg(long, default_value_t = 1)]
    segments: usize,
    /// Iterations of each size; without it from 10 for large sizes to 400 for small ones
    #[arg(long)]
    iterations: Option<usize>,
    /// Spoil the last rank's result, to see that nothing is printed then
    #[arg(long)]
    spoil: bool,
}

fn dtype(text: &str) -> std::result::Result<DType, String> {
    let known = DType::ALL.map(|dtype| dtype.to_string()).join(", ");
    let found = DType::ALL.into_iter().find(|dtype| dtype.to_string() == text);
    found.ok_or(format!("{text} is none of {known}"))
}

/// An implementation of `all_reduce` (the sum) with its buffer.
trait AllReduce {
    /// This rank and the world size.
    fn place(&self) -> (Rank, usize);
    /// Allocates a buffer of `bytes`.
    fn prepare(&mut self, dtype: DType, bytes: usize) -> Result<()>;
    /// Waits until all ranks have called it.
    fn align(&mut self) -> Result<()>;
    /// Fills the buffer with `pattern`, or with zeros.
    fn fill(&mut self, pattern: Option<&Pattern>) -> Result<()>;
    /// Reduces the buffer in place.
    fn reduce(&mut self) -> Result<()>;
    /// Compares the buffer with `pattern`.
    fn check(&self, pattern: &Pattern) -> Result<()>;
    /// Ends with `outcome`; an error is told to the other ranks.
    fn finish(self: Box<Self>, outcome: Result<()>) -> Result<()>;
}

impl Args {
    fn iterations(&self, bytes: usize) -> usize {
        self.iterations.unwrap_or_else(|| ((256 << 20) / bytes).clamp(10, 400)).max(1)
    }

    fn rank(&self) -> Result<()> {
        let info = RankInfo::from_env()?;
        let mut all_reduce: Box<dyn AllReduce> = match self.group {
            true => Box::new(group::Group::new(info, self.segments)?),
            false => Box::new(direct::Direct::new(info, self.segments)?),
        };
        let outcome = self.sweep(all_reduce.as_mut());
        all_reduce.finish(outcome)
    }

    fn sweep(&self, all_reduce: &mut dyn AllReduce) -> Result<()> {
        let (rank, world) = all_reduce.place();
        if rank.is_root() {
            let how = if self.group { "through a process group" } else { "called directly" };
            say(format_args!("all_reduce {how}, {world} processes, {} segment(s), verified", self.segments))?;
            say(format_args!(
                "{:>8} {:>6} {:>14} {:>14} {:>12} {:>12}",
                "bytes", "dtype", "median µs", "minimum µs", "alg GB/s", "bus GB/s"
            ))?;
        }
        for dtype in &self.dtype {
            for bytes in &self.bytes {
                let bytes = bytes.next_multiple_of(dtype.size());
                let times = self.measure(all_reduce, *dtype, bytes)?;
                if !rank.is_root() {
                    continue;
                }
                let algorithm = bytes as f64 / times.median() / 1e3;
                let bus = algorithm * 2.0 * (world - 1) as f64 / world as f64;
                say(format_args!(
                    "{:>8} {:>6} {:>14.2} {:>14.2} {algorithm:>12.3} {bus:>12.3}",
                    sizes::show(bytes),
                    dtype.to_string(),
                    times.median(),
                    times.minimum()
                ))?;
                let bench = if self.group { "all_reduce_group" } else { "all_reduce" };
                let measurement = Measurement { bench, dtype: *dtype, bytes, world };
                measurement.append(self.ranks.csv.as_deref(), &times)?;
            }
        }
        Ok(())
    }

    /// Times of `bytes`, verified on every rank before and after.
    fn measure(&self, all_reduce: &mut dyn AllReduce, dtype: DType, bytes: usize) -> Result<Times> {
        let (rank, world) = all_reduce.place();
        let (mine, sum) = (Pattern::of_rank(dtype, rank), Pattern::sum(dtype, world));
        let verify = |all_reduce: &mut dyn AllReduce| {
            all_reduce.fill(Some(&mine))?;
            all_reduce.reduce()?;
            if self.spoil && rank.0 + 1 == world {
                all_reduce.fill(None)?;
            }
            let what =
                format_args!("all_reduce of {} {dtype} is wrong on {rank}", sizes::show(bytes)).to_string();
            all_reduce.check(&sum).map_err(|error| Error::new(error.kind(), format!("{what}: {error}")))?;
            // A rank with a wrong element does not reach this call, and then no rank continues.
            all_reduce.align()
        };
        all_reduce.prepare(dtype, bytes)?;
        verify(all_reduce)?;
        all_reduce.fill(None)?;
        let iterations = self.iterations(bytes);
        let mut times = Vec::with_capacity(iterations);
        for iteration in 0..iterations + 3 {
            all_reduce.align()?;
            let start = Instant::now();
            all_reduce.reduce()?;
            // The first three warm up.
            times.extend((iteration >= 3).then(|| start.elapsed()));
        }
        verify(all_reduce)?;
        Ok(Times::new(times))
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.ranks.run("all_reduce", |_| Ok(Vec::new()), || args.rank())
}
