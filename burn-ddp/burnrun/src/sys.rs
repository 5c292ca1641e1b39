//! All unsafe code of the launcher: the calls between fork and exec, and the signal disposition and signal mask that no
//! safe crate sets.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{getpid, getppid};

/// Makes the child of `command` die with the thread that spawns it.
///
/// With `foreground`, the child also takes the terminal's foreground before its program starts. With `reset_sigttou`,
/// the child does not inherit that the launcher ignores SIGTTOU ([`IgnoredSigttou`]).
pub(crate) fn prepare_child(command: &mut Command, foreground: bool, reset_sigttou: bool) {
    let launcher = getpid();
    let before_exec = move || -> io::Result<()> {
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // If the launcher died before the line above took effect, no signal would end this process.
        if getppid() != Some(launcher) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if foreground {
            rustix::termios::tcsetpgrp(rustix::stdio::stdin(), getpid())?;
        }
        if reset_sigttou {
            // SAFETY: `signal` is async-signal-safe, and SIG_DFL needs no handler.
            unsafe { libc::signal(libc::SIGTTOU, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes plain system calls
    // (prctl, getppid, ioctl, sigaction), allocates nothing, takes no lock, and its errors carry only a number.
    unsafe { command.pre_exec(before_exec) };
}

/// Ignores SIGTTOU while it lives. A background process that changes the terminal gets this signal and stops, and the
/// launcher is in the background while rank 0 has the terminal.
pub(crate) struct IgnoredSigttou(libc::sighandler_t);

impl IgnoredSigttou {
    pub fn new() -> Self {
        // SAFETY: SIG_IGN installs no handler, so no code can run in signal context.
        Self(unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) })
    }
}

impl Drop for IgnoredSigttou {
    fn drop(&mut self) {
        if self.0 != libc::SIG_ERR {
            // SAFETY: the value came from `signal` for the same signal, so it is a valid disposition.
            unsafe { libc::signal(libc::SIGTTOU, self.0) };
        }
    }
}

/// Unblocks signals for the calling thread while it lives, and for the threads and processes that this thread starts
/// meanwhile. The parent of the launcher may have blocked them, and a signal mask is inherited.
pub(crate) struct UnblockedSignals(Option<libc::sigset_t>);

impl UnblockedSignals {
    pub fn new(signals: &[i32]) -> Self {
        // SAFETY: `sigset_t` is plain data for which zeros are valid; the calls only write the sets they are given,
        // which live on this stack, and change nothing but the mask of this thread.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, *signal);
            }
            let result = libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, &raw mut before);
            Self((result == 0).then_some(before))
        }
    }
}

impl Drop for UnblockedSignals {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // SAFETY: the set was filled by `pthread_sigmask`, and the null pointer asks for no old mask.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}
