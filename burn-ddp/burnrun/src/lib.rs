//! Starts the ranks of one node and looks after them: `burnrun`, and the same as a library call.
//!
//! Ranks are processes, and processes need a parent that does what no rank can do for itself: notice that one
//! of them died, end the others, pass signals on, and say which one failed *first*. All of that is here, and
//! nothing of it knows what the ranks compute; they can be any program that reads torchrun's environment.
//!
//! The way from a command line to an exit code has four stages, each testable without the next:
//!
//! 1. [`Args`]: what was typed, no more.
//! 2. options: what was meant, checked, from a command line or from a [`Launcher`].
//! 3. the plan: a pure function from options, environment and a port to the children's commands and
//!    environments.
//! 4. supervision: start them, wait, end them.
//!
//! # What the ranks can rely on
//! - One process group each, so that everything a rank starts ends with it. When the launcher ends, by
//!   whatever cause, no process of a rank stays: on Linux the kernel kills the ranks with the launcher, and a
//!   watch (a small shell that waits for the launcher's end) kills what they started. Only a process that left
//!   its rank's process group escapes.
//! - No signal that is passed on is blocked when they start, even if whoever started the launcher had blocked it;
//!   the rest of the signal mask is inherited.
//! - Standard input is empty, except for rank 0 with the terminal ([`Tty`]).
//! - After the first failure the other ranks have 3 s to report what they saw before SIGTERM, then 2 s before
//!   SIGKILL. INT, TERM, HUP and QUIT sent to the launcher are passed on, with 5 s before SIGKILL, and at once on
//!   the second one; USR1 and USR2 are passed on and nothing else happens. HUP, INT and QUIT stay ignored where
//!   the launcher was started with them ignored (`nohup`, background jobs).
//! - Lines appear whole, each after `[rank N] `, or `[host:rank N] ` on several nodes; a line longer than
//!   1 MiB is split.
//!
//! # Exit codes
//! That of the rank that failed first, or 128 + signal; 128 + signal when the launcher was stopped by one; 2 for
//! wrong usage; 127 when the program is not found and 126 when it cannot be executed, as in a shell.
//!
//! The launcher is for Unix; Linux is what is tested.

mod args;
mod logs;
mod options;
mod output;
mod plan;
mod port;
mod process;
mod ranks;
#[allow(unsafe_code)]
mod raw;
mod signals;
mod supervise;
mod terminal;
mod verdict;
mod watch;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

pub use args::Args;
pub use options::{Streams, Tty};

use burn_ddp_comm::{Error, Result};
use options::Options;

/// Whether a launcher started this process: RANK is set.
///
/// Programs that launch themselves ask this first, since their ranks run the same `main`.
pub fn is_child() -> bool {
    std::env::var_os("RANK").is_some()
}

/// Starts a program once per rank of this node and waits for all of them.
///
/// This is the library call behind `burnrun`, for programs that launch themselves:
///
/// ```no_run
/// use burnrun::{self, Launcher};
///
/// # fn train() {}
/// # fn main() -> burn_ddp_comm::Result<()> {
/// let processes = 2; // usually from the command line
/// if processes > 1 && !burnrun::is_child() {
///     return Launcher::new(processes).args(std::env::args_os().skip(1)).run();
/// }
/// train();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Launcher {
    options: Options,
}

impl Launcher {
    /// A launch of `nproc` ranks on this node, of the running program unless [`Launcher::program`] names another.
    pub fn new(nproc: usize) -> Self {
        Self { options: Options { nproc, tty: Tty::Auto, ..Options::default() } }
    }

    /// The program of the ranks; a name without a slash is looked up in PATH.
    pub fn program(mut self, program: impl Into<OsString>) -> Self {
        self.options.program = Some(program.into());
        self
    }

    /// The arguments of the ranks, without the program's name.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.options.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// Whether rank 0 gets the terminal; [`Tty::Auto`] unless said otherwise.
    pub fn tty_rank0(mut self, tty: Tty) -> Self {
        self.options.tty = tty;
        self
    }

    /// How long ranks may take to end after a signal that was passed on to them, before they are killed; 5 s unless said
    /// otherwise. A training that stops at the next step on all ranks needs as long as its steps.
    pub fn signal_grace(mut self, grace: Duration) -> Self {
        self.options.signal_grace = grace;
        self
    }

    /// Where files of output go, where there are any. Unless said otherwise, a new directory for temporary files,
    /// which is removed when it stayed empty, or when it was made for [`Tty`] alone and no rank failed.
    pub fn log_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.options.log_dir = Some(directory.into());
        self
    }

    /// Streams that go to files `<log-dir>/<run-id>/attempt_0/<local_rank>/{stdout,stderr}.log` as well as to the
    /// console.
    pub fn tee(mut self, streams: Streams) -> Self {
        self.options.tee = streams;
        self
    }

    /// Starts the ranks and returns when all have ended, without anything of theirs left.
    ///
    /// The calling thread is the one the ranks' lives are tied to, and it must be the program's only caller of
    /// `wait` meanwhile. The handlers for signals it installs stay when it returns and then do nothing, so a
    /// program should leave soon after.
    ///
    /// # Errors
    /// [`ErrorKind::Exit`](burn_ddp_comm::ErrorKind::Exit) with the code to leave with when a rank failed, when the launch
    /// was stopped by a signal or when the program cannot be started; its message is the last words: who failed
    /// first, how, its last lines, and one line for each of up to eight others that failed soon after. [`ErrorKind::Config`](burn_ddp_comm::ErrorKind::Config) for options that do not fit
    /// together, and for a rank that would launch itself again; nothing was started then.
    pub fn run(self) -> Result<()> {
        let options = self.options;
        options.check()?;
        if options.program.is_none() && is_child() {
            return Err(Error::config(
                "this process is a rank already (RANK is set) and would start itself without end: ask \
                 burnrun::is_child() before launching, or unset RANK",
            ));
        }
        let lookup = |name: &str| std::env::var_os(name);
        let store = plan::store(&options, lookup)?;
        let port = port::Port::reserve(&store, options.node == 0)?;
        let program = match &options.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()
                .map_err(|error| Error::io("cannot tell which program is running", error))?
                .into(),
        };
        let surroundings = plan::Surroundings {
            program,
            store_host: store.host,
            store_port: port.number(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            host: burn_ddp_comm::net::host::host_name(),
            own_run_id: port::unique_run_id(),
        };
        let plan = plan::plan(&options, &surroundings, lookup);
        if let Some(directory) = options.log_dir.as_ref().filter(|_| plan.gives("NCCL_DEBUG_FILE")) {
            std::fs::create_dir_all(directory).map_err(|error| {
                Error::io(format!("cannot make {} (--log-dir)", directory.display()), error)
            })?;
        }
        supervise::run(&options, &plan)
    }
}
