//! A benchmark of several processes, which starts itself once for each rank.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::backend::Autodiff;
use burn_ddp::launch::{self, Launcher};
use burn_ddp::{Ddp, Error, ProcessGroup, RankInfo, Result};
use burn_flex::{Flex, FlexDevice};
use rustix::thread::{CpuSet, sched_setaffinity};

/// The backend of benchmarks that train.
pub type B = Autodiff<Ddp<Flex>>;

/// The process group of benchmarks that train.
pub type Group = ProcessGroup<Ddp<Flex>>;

/// Arguments of every benchmark of several processes.
#[derive(clap::Args, Debug)]
pub struct Ranks {
    /// Processes on this machine; several numbers are run one after the other. Ignored under a launcher
    #[arg(long, value_delimiter = ',', default_value = "2")]
    pub nproc: Vec<usize>,
    /// Bind rank r and all its threads to core r (beginning anew after the last)
    #[arg(long)]
    pub pin: bool,
    /// Append one line per measurement to this file
    #[arg(long)]
    pub csv: Option<PathBuf>,
    /// Passed by cargo to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

impl Ranks {
    /// Runs `rank` if a launcher started this process as a rank. Otherwise starts the ranks with the arguments of this
    /// process and those that `more` returns for a number of processes.
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
        exit_code(program, outcome)
    }

    /// Like [`run`](Self::run), with the process group of the rank.
    pub fn run_group(
        &self,
        program: &str,
        more: impl Fn(usize) -> Result<Vec<String>>,
        rank: impl FnOnce(&Group) -> Result<()>,
    ) -> ExitCode {
        self.run(program, more, || {
            let group = ProcessGroup::from_env(&FlexDevice)?;
            group.finish(rank(&group))
        })
    }

    /// Binds this process to a core. Called while there is one thread only: later ones inherit the binding.
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

/// The exit code of `program`; an error is printed as one line.
pub fn exit_code(program: &str, outcome: Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // Nothing can be done if standard error cannot be written.
    let _ = writeln!(std::io::stderr(), "{program}: {error}");
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
}

/// Prints a line.
///
/// # Errors
/// Standard output that cannot be written, for example because its reader has exited.
pub fn say(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| Error::io("cannot write to standard output", error))
}
