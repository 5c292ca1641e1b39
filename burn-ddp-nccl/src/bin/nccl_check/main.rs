//! Checks that need a GPU. Each part is a process, so that a part that hangs stops no other.
//!
//! ```text
//! nccl_check collectives --nproc 2
//! ```
//!
//! Each line of a part begins with `PASS`, `FAIL` or `NOTE` (a number without a verdict). After a `FAIL` the exit code
//! is 1; it is 2 where the machine lacks something, with one line that says what. `gpu-check.sh` runs all parts.

mod abort;
mod collectives;
mod cost;
mod group;
mod memory;
mod order;
mod report;

use std::process::ExitCode;

use burn_cuda::{Cuda, CudaDevice};
use burn_ddp::launch::{Launcher, is_child};
use burn_ddp::{Error, RankInfo, Result};
use burn_ddp_nccl::library::Library;
use burn_ddp_nccl::local_device;
use clap::{Parser, ValueEnum};

use report::Report;

/// Checks on a GPU, the most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// NCCL's communicator over plain device memory
    Collectives,
    /// Process groups over Burn's tensors, with and without fusion, against the host's way
    Group,
    /// NCCL reads a bucket after the kernels that write it, and would not without the fence
    Order,
    /// Waits for a device that has stalled end
    Abort,
    /// Time of the gradients of GPT-2 124 M through a group of one
    Cost,
}

impl Part {
    fn takes_several(self) -> bool {
        matches!(self, Self::Collectives | Self::Group)
    }
}

/// Check NCCL on the GPUs of this machine.
#[derive(Parser)]
#[command(version, allow_negative_numbers = true)]
struct Args {
    part: Part,
    /// Start this many processes, one for each GPU (parts collectives and group)
    #[arg(long, default_value_t = 1)]
    nproc: usize,
}

/// Rank, device and library, which every part needs.
struct Machine {
    info: RankInfo,
    device: CudaDevice,
    library: Library,
}

impl Machine {
    /// Finds device and library. One error names all that is missing.
    fn find(part: Part) -> Result<Self> {
        let (info, device, library) = (RankInfo::from_env()?, local_device::<Cuda>(), Library::load());
        if info.world_size > 1 && !part.takes_several() {
            return Err(Error::config(format!("{part:?} is for one process, not for {}", info.world_size)));
        }
        let mut missing: Vec<String> = device.as_ref().err().map(Error::to_string).into_iter().collect();
        missing.extend(library.as_ref().err().map(Error::to_string));
        if !missing.is_empty() {
            return Err(Error::config(missing.join("; ")));
        }
        Ok(Self { info, device: device?, library: library? })
    }
}

fn run(part: Part, nproc: usize) -> Result<bool> {
    if nproc != 1 && !is_child() {
        return Launcher::new(nproc).args(std::env::args_os().skip(1)).run().map(|()| true);
    }
    let machine = Machine::find(part)?;
    let mut report = Report::new(machine.info.rank.is_root());
    match part {
        Part::Collectives => collectives::check(&machine, &mut report)?,
        Part::Group => group::check(&machine, &mut report)?,
        Part::Order => order::check(&machine, &mut report)?,
        Part::Abort => abort::check(&machine, &mut report)?,
        Part::Cost => cost::check(&machine, &mut report)?,
    }
    Ok(report.passed())
}

fn main() -> ExitCode {
    let Args { part, nproc } = Args::parse();
    match run(part, nproc) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("nccl_check: {error}");
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
        }
    }
}
