//! The only unsafe code of the launcher: what has to happen between fork and exec, and the signal disposition and
//! mask that no safe crate sets.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{getpid, getppid};

/// Makes the child die with the thread that spawns it and, if `foreground`, own the terminal before its program
/// starts. With `terminal`, the launcher's own ignoring of SIGTTOU is undone for the program.
pub(super) fn before_exec(command: &mut Command, foreground: bool, terminal: bool) {
    let launcher = getpid();
    let hook = move || -> io::Result<()> {
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The launcher may have died before the line above took effect; nobody would end this process then.
        if getppid() != Some(launcher) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if foreground {
            rustix::termios::tcsetpgrp(rustix::stdio::stdin(), getpid())?;
        }
        if terminal {
            // SAFETY: `signal` is async-signal-safe, and SIG_DFL needs no handler.
            unsafe { libc::signal(libc::SIGTTOU, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The hook makes plain system calls
    // (prctl, getppid, ioctl, sigaction), allocates nothing, takes no lock, and its errors carry only a number.
    unsafe { command.pre_exec(hook) };
}

/// Ignores SIGTTOU while it lives. A process in the background that changes the terminal gets this signal and
/// stops; the launcher is in the background while rank 0 has the terminal.
pub(super) struct TtouIgnored(libc::sighandler_t);

impl TtouIgnored {
    pub fn new() -> Self {
        // SAFETY: SIG_IGN installs no handler, so no code can run in signal context.
        Self(unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) })
    }
}

impl Drop for TtouIgnored {
    fn drop(&mut self) {
        if self.0 != libc::SIG_ERR {
            // SAFETY: the value came from `signal` for the same signal, so it is a valid disposition.
            unsafe { libc::signal(libc::SIGTTOU, self.0) };
        }
    }
}

/// Lets signals through to the calling thread while it lives, and to the threads and processes that this thread
/// starts meanwhile. A parent may have blocked them, and a block is inherited.
pub(super) struct Unblocked(Option<libc::sigset_t>);

impl Unblocked {
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

impl Drop for Unblocked {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // SAFETY: the set was filled by `pthread_sigmask`, and the old one is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}
