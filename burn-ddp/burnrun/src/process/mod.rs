//! A rank as a process: its start, its exit, and its process group.
//!
//! The exit of a rank is polled without reaping the process (`WNOWAIT`). Until it is reaped, its process id, and so the
//! id of its process group, cannot be given to another process. So a signal to the group, for processes that the rank
//! left behind, cannot hit an unrelated process.

pub(crate) mod exit;
pub(crate) mod subreaper;
pub(crate) mod watchdog;

use std::fmt;
use std::io::ErrorKind as IoErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use burn_ddp_comm::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::process::{
    self, Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, test_kill_process_group,
};

use self::exit::RankExit;
use crate::output::routing::RankIo;
use crate::plan::{Plan, PlannedRank};
use crate::sys;

/// A started rank. Dropping it while it runs kills it.
pub(crate) struct RankProcess {
    pub rank: usize,
    /// Id of the process and of its process group.
    pub pid: Pid,
    /// `None` while it runs.
    pub exit: Option<RankExit>,
}

impl RankProcess {
    /// Starts a rank in a process group of its own. The second value has its pipes.
    ///
    /// # Errors
    /// [`ErrorKind::Exit`] with a shell's exit code if the program is not found or not executable, else
    /// [`ErrorKind::Io`].
    pub fn start(plan: &Plan, planned: &PlannedRank, io: RankIo) -> Result<(Self, Child)> {
        let mut command = Command::new(&plan.program);
        let environment = planned.environment.iter().map(|(name, value)| (name, value));
        command.args(&plan.args).envs(environment).process_group(0);
        if io != RankIo::Terminal {
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        sys::prepare_child(&mut command, io == RankIo::Terminal, io != RankIo::Pipes);
        let process = command.spawn().map_err(|error| cannot_start(plan, &error))?;
        Ok((Self { rank: planned.rank, pid: Pid::from_child(&process), exit: None }, process))
    }

    /// Returns the exit if the rank has ended since the last call, and `None` from then on.
    pub fn poll_exit(&mut self) -> Option<RankExit> {
        if self.exit.is_some() {
            return None;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.exit = match process::waitid(WaitId::Pid(self.pid), options) {
            Ok(None) | Err(Errno::INTR) => None,
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Some(RankExit::Code(code)),
                (None, Some(signal)) => Some(RankExit::Signal(signal)),
                (None, None) => None,
            },
            Err(_) => Some(RankExit::Unknown),
        };
        self.exit
    }

    /// Continues the rank if it was stopped. After Ctrl-Z in the terminal no other process would.
    pub fn resume_if_stopped(&self) {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        if self.exit.is_none() && matches!(process::waitid(WaitId::Pid(self.pid), options), Ok(Some(_))) {
            self.signal(Signal::CONT);
        }
    }

    /// Sends `signal` to the process group, that is to the rank and to the processes that it started.
    pub fn signal(&self, signal: Signal) {
        // The only expected failure is that the group has no process left.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Reaps the ended rank. From here on its group may be signalled only while [`Self::has_orphans`] is true.
    pub fn reap(&self) {
        let _ = process::waitpid(Some(self.pid), WaitOptions::NOHANG);
    }

    /// Returns true if processes remain in the group of a reaped rank.
    pub fn has_orphans(&self) -> bool {
        // Orphans became children of the launcher (`Subreaper`), which must reap them.
        while let Ok(Some(_)) = process::waitpgid(self.pid, WaitOptions::NOHANG) {}
        !matches!(test_kill_process_group(self.pid), Err(Errno::SRCH))
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.exit.is_none() {
            self.signal(Signal::KILL);
        }
    }
}

impl fmt::Display for RankProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {})", self.rank, self.pid.as_raw_nonzero())
    }
}

/// Returns the error for a program that cannot be started, with a shell's exit code: 127 if it is not found, 126 if it
/// is not executable.
fn cannot_start(plan: &Plan, error: &std::io::Error) -> Error {
    let name = plan.program.to_string_lossy();
    let exists = Path::new(&plan.program).exists();
    match error.kind() {
        IoErrorKind::NotFound => {
            let why = match (name.contains('/'), exists) {
                (false, false) => "not found in PATH".into(),
                (false, true) => format!("not found in PATH; did you mean ./{name}?"),
                (true, false) => "there is no such file".into(),
                (true, true) => "the file is there, but not the interpreter or loader that it names".into(),
            };
            Error::new(ErrorKind::Exit(127), format!("cannot start {name}: {why}"))
        }
        IoErrorKind::PermissionDenied => {
            Error::new(ErrorKind::Exit(126), format!("cannot start {name}: {error}; is it executable?"))
        }
        _ if error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => Error::new(
            ErrorKind::Exit(126),
            format!("cannot start {name}: {error}; a script needs a #! line"),
        ),
        _ => Error::new(ErrorKind::Io, format!("cannot start {name}: {error}")),
    }
}
