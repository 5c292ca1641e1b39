//! Kills the process groups of the ranks when the launcher is killed.
//!
//! The parent-death signal kills a rank, but not the processes that the rank started: if a rank is a wrapper script,
//! the training itself would stay. So a small shell reads from a pipe that only the launcher holds open. When the
//! launcher ends, for whatever reason, the pipe closes, and the shell kills all process groups that it was given.
//! Without `/bin/sh` the parent-death signal remains, so that is no error.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

/// Reads one process group per line until the launcher ends and closes the pipe, then kills the groups.
const SCRIPT: &str = r#"while read -r group; do set -- "$@" "-$group"; done; kill -s KILL -- "$@""#;

/// The shell. Dropping this ends it without killing any group.
pub(crate) struct Watchdog(Option<Child>);

impl Watchdog {
    /// Starts the shell, which has no groups yet.
    pub fn start() -> Self {
        let shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "burnrun-watch"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        Self(shell.ok())
    }

    /// Adds the process group of `pid`.
    pub fn add(&mut self, pid: Pid) {
        if let Some(pipe) = self.0.as_mut().and_then(|shell| shell.stdin.as_mut()) {
            let _ = writeln!(pipe, "{}", pid.as_raw_nonzero());
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.0 {
            // The pipe is still open here, so the shell has not reached its last command.
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}
