//! Start and end of a program that is one of several processes.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use burn_ddp::launch::Launcher;
use burn_ddp::{Error, RankInfo, Result};
use tracing_subscriber::EnvFilter;

use crate::arguments::check_counts;

/// The role of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Starts this many processes and waits for them.
    Launcher(usize),
    /// Is a rank; without a launcher, the only one.
    Rank(RankInfo),
}

/// The role of this process by `--nproc` and the environment.
///
/// # Errors
/// A configuration error for a number out of range, or one that differs from the launcher's.
pub fn role(nproc: Option<usize>) -> Result<Role> {
    let info = RankInfo::from_env()?;
    let Some(nproc) = nproc else { return Ok(Role::Rank(info)) };
    check_counts(&[("--nproc", nproc)])?;
    if info.master.is_none() {
        return Ok(Role::Launcher(nproc));
    }
    if nproc != info.world_size {
        return Err(Error::config(format!(
            "--nproc {nproc} under a launcher of {} processes: leave --nproc out",
            info.world_size
        )));
    }
    Ok(Role::Rank(info))
}

/// A launcher that starts this program again, `nproc` times, with its own arguments.
pub fn launcher(nproc: usize) -> Launcher {
    Launcher::new(nproc).args(std::env::args_os().skip(1))
}

/// Prints a line.
///
/// # Errors
/// Standard output that cannot be written, for example because its reader has exited.
pub fn say(line: fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| Error::io("cannot write to standard output", error))
}

/// Sends the log to standard error: warnings, or the levels of `RUST_LOG`.
pub fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let colors = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colors).with_writer(std::io::stderr).init();
}

/// The exit code of `program`; an error is printed as one line.
pub fn exit_code(program: &str, outcome: Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // Nothing can be done if standard error cannot be written.
    let _ = writeln!(std::io::stderr(), "{program}: {error}");
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
}
