//! Ends the process groups of the ranks when the launcher is killed.
//!
//! The parent-death signal reaches a rank, but not what the rank started: a rank that is a wrapper script would
//! die and leave the training behind. A small shell therefore waits for the end of a pipe that only the launcher
//! holds open, and then kills the groups it was told. It is the second line of defence (the first on systems
//! without that signal), so a system without `/bin/sh` is no error.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

/// Collects one group a line until the pipe ends, which is when the launcher has.
const SCRIPT: &str = r#"while read -r group; do set -- "$@" "-$group"; done; kill -s KILL -- "$@""#;

/// The watching shell; it is ended without acting when this is dropped.
pub(super) struct Watch(Option<Child>);

impl Watch {
    /// Starts to watch no group.
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

    /// Watches the group of `pid` too.
    pub fn add(&mut self, pid: Pid) {
        if let Some(pipe) = self.0.as_mut().and_then(|shell| shell.stdin.as_mut()) {
            let _ = writeln!(pipe, "{}", pid.as_raw_nonzero());
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.0 {
            // Killed while the pipe is still open, so that it never comes to its last command.
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}
