//! The library call behind `burnrun`: collects the options, makes the plan and hands both to the supervisor.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use burn_ddp_comm::{Error, Result};

use crate::options::{Options, Streams, Tty};
use crate::plan::store_address::StoreAddress;
use crate::plan::store_port::{StorePort, unique_run_id};
use crate::plan::{LaunchContext, Plan};
use crate::supervisor;

/// Returns true in a process that a launcher started, that is if RANK is set.
///
/// Programs that launch themselves call this first, since their ranks run the same `main`.
pub fn is_child() -> bool {
    std::env::var_os("RANK").is_some()
}

/// Starts a program once per rank of this node and waits for all of them.
///
/// ```
/// use burnrun::Launcher;
///
/// # fn main() -> burn_ddp_comm::Result<()> {
/// Launcher::new(2).program("sh").args(["-c", "echo rank $RANK of $WORLD_SIZE"]).run()
/// # }
/// ```
///
/// A program can launch itself, and then needs no `burnrun`. The path is `burn_ddp::launch` in programs that use
/// burn-ddp:
///
/// ```
/// use burnrun::{self as launch, Launcher};
///
/// # fn train() {}
/// # fn main() -> burn_ddp_comm::Result<()> {
/// let processes = 2; // usually from the command line
/// if processes > 1 && !launch::is_child() {
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
    /// Launches `nproc` ranks on this node. They run this same program unless [`Launcher::program`] names another.
    pub fn new(nproc: usize) -> Self {
        Self { options: Options { nproc, tty: Tty::Auto, ..Options::default() } }
    }

    /// A launcher with all options of the command line.
    pub(crate) fn with_options(options: Options) -> Self {
        Self { options }
    }

    #[cfg(test)]
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Sets the program of the ranks. A name without a slash is looked up in PATH.
    pub fn program(mut self, program: impl Into<OsString>) -> Self {
        self.options.program = Some(program.into());
        self
    }

    /// Sets the arguments of the ranks, without the program's name.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.options.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// Sets when rank 0 gets the terminal. The default is [`Tty::Auto`].
    pub fn tty_rank0(mut self, tty: Tty) -> Self {
        self.options.tty = tty;
        self
    }

    /// Sets the time between a signal that is passed on to the ranks and SIGKILL. The default is 5 s. A training that
    /// stops on all ranks at the next step needs as long as its steps.
    pub fn signal_grace(mut self, grace: Duration) -> Self {
        self.options.signal_grace = grace;
        self
    }

    /// Sets the directory for files of output. The default is a new directory for temporary files. It is removed
    /// after the launch if it is empty, or if it was made for [`Tty`] alone and no rank failed.
    pub fn log_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.options.log_dir = Some(directory.into());
        self
    }

    /// Sets the streams that go to the files `<log-dir>/<run-id>/attempt_0/<local_rank>/{stdout,stderr}.log` as well
    /// as to the console.
    pub fn tee(mut self, streams: Streams) -> Self {
        self.options.tee = streams;
        self
    }

    /// Starts the ranks, and returns when they and all processes in their process groups have ended.
    ///
    /// The ranks die with the calling thread, so it must live as long as they do. It must be the program's only caller
    /// of `wait` meanwhile. The signal handlers that this installs stay when it returns and do nothing then, so a
    /// program should exit soon after.
    ///
    /// # Errors
    /// - [`ErrorKind::Exit`](burn_ddp_comm::ErrorKind::Exit), with the exit code for the program, if a rank failed, if
    ///   a signal stopped the launch, or if the program cannot be started. For a failed rank the message tells which
    ///   one failed first, how, and its last lines, followed by one line for each of up to eight other ranks that
    ///   failed soon after.
    /// - [`ErrorKind::Config`](burn_ddp_comm::ErrorKind::Config) if options contradict each other, or if this process
    ///   is a rank itself and would launch itself again. No process was started then.
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
        let store = StoreAddress::resolve(&options, lookup)?;
        // Reserved until the ranks have ended.
        let port = StorePort::reserve(&store, options.node_rank == 0)?;
        let context = LaunchContext {
            program: match &options.program {
                Some(program) => program.clone(),
                None => std::env::current_exe()
                    .map_err(|error| Error::io("cannot tell which program is running", error))?
                    .into(),
            },
            store_host: store.host,
            store_port: port.number(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            host: burn_ddp_comm::net::host::host_name(),
            unique_run_id: unique_run_id(),
        };
        let plan = Plan::new(&options, &context, lookup);
        if let Some(directory) = options.log_dir.as_ref().filter(|_| plan.sets("NCCL_DEBUG_FILE")) {
            std::fs::create_dir_all(directory).map_err(|error| {
                Error::io(format!("cannot make {} (--log-dir)", directory.display()), error)
            })?;
        }
        supervisor::run(&options, &plan)
    }
}
