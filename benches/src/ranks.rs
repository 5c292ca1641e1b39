//! A benchmark as several processes: it starts itself once per rank.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_ddp::launch::{self, Launcher};
use burn_ddp::{Error, RankInfo, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Arguments of every benchmark of several processes.
#[derive(clap::Args, Debug)]
pub struct Ranks {
    /// Processes on this machine; several numbers are run one after the other. Not looked at under a launcher
    #[arg(long, value_delimiter = ',', default_value = "2")]
    pub nproc: Vec<usize>,
    /// Bind rank r and all its threads to core r (beginning anew after the last)
    #[arg(long)]
    pub pin: bool,
    /// Append one line per measurement to this file
    #[arg(long)]
    pub csv: Option<PathBuf>,
    /// What cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

impl Ranks {
    /// Runs `rank` in every rank, which is this process if a launcher started it; else starts them, with the arguments
    /// of this process and those that `more` adds for a number of processes.
    pub fn run(
        &self,
        program: &str,
        more: impl Fn(usize) -> Result<Vec<String>>,
        rank: impl FnOnce() -> Result<()>,
    ) -> ExitCode {
        let launch = |nproc: &usize| {
            let args = std::env::args().skip(1).chain(more(*nproc)?);
            Launcher::new(*nproc).args(args).run()
        };
        let outcome = if launch::is_child() {
            self.pin().and_then(|()| rank())
        } else {
            self.nproc.iter().try_for_each(launch)
        };
        let Err(error) = outcome else { return ExitCode::SUCCESS };
        // Without standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "{program}: {error}");
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
    }

    /// Before there is any thread but the first: later ones inherit it.
    fn pin(&self) -> Result<()> {
        if !self.pin {
            return Ok(());
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut set = CpuSet::new();
        set.set(RankInfo::from_env()?.local_rank % cores);
        sched_setaffinity(None, &set)
            .map_err(|error| Error::io("cannot bind the rank to its core (--pin)", error))
    }
}

/// Prints a line.
///
/// # Errors
/// A reader that has gone is an error like any other.
pub fn say(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| Error::io("cannot write to standard output", error))
}
