//! One rank as a process: its start, its end, and its process group.
//!
//! An ended rank is looked at without being collected (`WNOWAIT`). As long as it is not collected, its process id
//! and so the id of its process group cannot be given to anybody else, and signalling the group later, for what
//! the rank may have left behind, cannot hit a stranger.

use std::fmt;
use std::io::ErrorKind as IoErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::Errno;
use rustix::process::{
    self, Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, test_kill_process_group,
};

use super::plan::{self, Plan};
use super::raw;
use super::signals;
use burn_ddp_comm::{Error, ErrorKind, Result};

/// What a rank reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stdin {
    /// Nothing to read, and pipes to write into.
    Pipes,
    /// The same, while another rank has the terminal.
    PipesBesideTerminal,
    /// The terminal.
    Terminal,
}

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Code(i32),
    Signal(i32),
    /// Another part of the launcher's program collected the process before it was seen here.
    Lost,
}

impl End {
    /// In brackets after a name.
    pub fn brief(self) -> String {
        match self {
            Self::Code(code) => format!("exit code {code}"),
            Self::Signal(signal) => format!("signal {}", signals::describe(signal)),
            Self::Lost => "exit code unknown".into(),
        }
    }

    /// As a shell's exit code.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::Lost => 1,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by signal {}", signals::describe(*signal)),
            Self::Lost => {
                f.write_str("ended, but its exit code was collected by another part of this program")
            }
        }
    }
}

/// A started rank. Dropping one that still runs kills it.
pub(super) struct RankProcess {
    pub rank: usize,
    pub pid: Pid,
    pub end: Option<End>,
}

impl RankProcess {
    /// Starts `child` in a process group of its own; the second value has its pipes.
    pub fn start(plan: &Plan, child: &plan::Child, stdin: Stdin) -> Result<(Self, Child)> {
        let mut command = Command::new(&plan.program);
        command.args(&plan.args).envs(child.env.iter().map(|(name, value)| (name, value))).process_group(0);
        if stdin != Stdin::Terminal {
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        raw::before_exec(&mut command, stdin == Stdin::Terminal, stdin != Stdin::Pipes);
        let process = command.spawn().map_err(|error| cannot_start(plan, &error))?;
        Ok((Self { rank: child.rank, pid: Pid::from_child(&process), end: None }, process))
    }

    /// Looks whether the rank has ended since the last look; `Some` once.
    pub fn poll(&mut self) -> Option<End> {
        if self.end.is_some() {
            return None;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.end = match process::waitid(WaitId::Pid(self.pid), options) {
            Ok(None) | Err(Errno::INTR) => None,
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Some(End::Code(code)),
                (None, Some(signal)) => Some(End::Signal(signal)),
                (None, None) => None,
            },
            Err(_) => Some(End::Lost),
        };
        self.end
    }

    /// Wakes the rank if it was stopped. Nobody but the launcher could, when it was by a key.
    pub fn resume_if_stopped(&self) {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        if self.end.is_none() && matches!(process::waitid(WaitId::Pid(self.pid), options), Ok(Some(_))) {
            self.signal(Signal::CONT);
        }
    }

    /// Sends `signal` to the whole process group, that is also to what the rank started.
    pub fn signal(&self, signal: Signal) {
        // The only expected failure is that nobody is left to get it.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Collects the ended rank. From here on the group's id is only safe to use while [`Self::left_behind`].
    pub fn collect(&self) {
        let _ = process::waitpid(Some(self.pid), WaitOptions::NOHANG);
    }

    /// Whether processes remain in the group of a collected rank.
    pub fn left_behind(&self) -> bool {
        // Adopted ones are the launcher's to collect.
        while let Ok(Some(_)) = process::waitpgid(self.pid, WaitOptions::NOHANG) {}
        !matches!(test_kill_process_group(self.pid), Err(Errno::SRCH))
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.end.is_none() {
            self.signal(Signal::KILL);
        }
    }
}

impl fmt::Display for RankProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {})", self.rank, self.pid.as_raw_nonzero())
    }
}

/// Makes the launcher, while it lives, the parent of what the ranks leave behind, so that it sees these end. The
/// first process of a container often collects orphans late or never, and an uncollected one still counts as a
/// member of its group.
pub(super) struct Adoption {
    #[cfg(target_os = "linux")]
    before: bool,
}

impl Adoption {
    #[cfg(target_os = "linux")]
    pub fn begin() -> Self {
        let before = process::child_subreaper().is_ok_and(|set| set.is_some());
        // Without it, ending what is left behind takes longer, and is no worse otherwise.
        let _ = process::set_child_subreaper(Some(process::getpid()));
        Self { before }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn begin() -> Self {
        Self {}
    }
}

#[cfg(target_os = "linux")]
impl Drop for Adoption {
    fn drop(&mut self) {
        if !self.before {
            let _ = process::set_child_subreaper(None);
        }
    }
}

/// The shell's exit codes: 127 for what is not there, 126 for what cannot be executed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_read_as_a_shell_says_them() {
        assert_eq!(End::Code(3).to_string(), "exited with code 3");
        assert_eq!(End::Signal(9).to_string(), "was killed by signal 9 (SIGKILL)");
        assert_eq!(End::Signal(9).brief(), "signal 9 (SIGKILL)");
        assert_eq!([End::Code(7), End::Signal(9), End::Lost].map(End::exit_code), [7, 137, 1]);
    }
}
