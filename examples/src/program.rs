//! How a program that is one of several processes begins and ends.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use burn::tensor::backend::Backend;
use burn_ddp::launch::Launcher;
use burn_ddp::{Error, ProcessGroup, RankInfo, Result};
use tracing_subscriber::EnvFilter;

/// What this process is there for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// To start this many processes and to wait for them.
    Launcher(usize),
    /// To be a rank; of a world of one, where there is no launcher.
    Rank(RankInfo),
}

/// What `--nproc` and the environment make of this process.
///
/// # Errors
/// A configuration error for a number that cannot be, or one that is not that of the launcher.
pub fn place(nproc: Option<usize>) -> Result<Place> {
    let info = RankInfo::from_env()?;
    let Some(nproc) = nproc else { return Ok(Place::Rank(info)) };
    check_counts(&[("--nproc", nproc)])?;
    if info.master.is_none() {
        return Ok(Place::Launcher(nproc));
    }
    if nproc != info.world_size {
        return Err(Error::config(format!(
            "--nproc {nproc} under a launcher of {} processes: leave --nproc out",
            info.world_size
        )));
    }
    Ok(Place::Rank(info))
}

/// Starts this program again, `nproc` times, with the arguments that it was given itself.
pub fn launcher(nproc: usize) -> Launcher {
    Launcher::new(nproc).args(std::env::args_os().skip(1))
}

/// Largest number that counts anything; products of them fit into 64 bits.
const LARGEST: usize = 1 << 20;

/// Refuses numbers of things, each with its flag, that are zero or beyond any use.
///
/// # Errors
/// A configuration error that names the first of them.
pub fn check_counts(counts: &[(&str, usize)]) -> Result<()> {
    let refuse = |(flag, count): &(&str, usize), advice: String| {
        Err(Error::config(format!("{flag} {count}: give at {advice}")))
    };
    if let Some(zero) = counts.iter().find(|(_, count)| *count == 0) {
        return refuse(zero, "least 1".into());
    }
    match counts.iter().find(|(_, count)| *count > LARGEST) {
        Some(large) => refuse(large, format!("most {LARGEST}")),
        None => Ok(()),
    }
}

/// The directory that the file `path` is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Ranks that were started by hand may have been given different arguments: they would train, but not as one. `given`
/// is what makes a difference to what is trained.
///
/// # Errors
/// A configuration error on all ranks, naming the first that differs from rank 0, and what both were given.
pub fn agree<B: Backend>(group: &ProcessGroup<B>, given: String) -> Result<()> {
    let all = group.all_gather_bytes(given.into_bytes())?;
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]);
    match (1..all.len()).find(|rank| all[*rank] != all[0]) {
        None => Ok(()),
        Some(rank) => {
            Err(Error::config(format!("rank 0 was given {}, but rank {rank} {}", text(0), text(rank))))
        }
    }
}

/// Prints a line.
///
/// # Errors
/// A reader that has gone is an error like any other.
pub fn say(line: fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| Error::io("cannot write to standard output", error))
}

/// Sends the log to standard error: warnings, or what `RUST_LOG` asks for.
pub fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let colors = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colors).with_writer(std::io::stderr).init();
}

/// How `program` ends: an error is one line.
pub fn exit_code(program: &str, outcome: Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // Without standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "{program}: {error}");
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
}
