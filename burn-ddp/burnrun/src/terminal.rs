//! The terminal, lent to rank 0 and taken back.
//!
//! A program that draws needs a real terminal, and it must be in the terminal's foreground process group, or the
//! first key it reads stops it. Ranks have process groups of their own, so the foreground moves to rank 0's group
//! and comes back when rank 0 ends. A rank 0 that was killed in raw mode or on the alternate screen cannot tidy
//! up; the launcher, which outlives it, does.

use std::io::IsTerminal;

use rustix::process::{Pid, getpgrp};
use rustix::stdio::{stdin, stdout};
use rustix::termios::{self, OptionalActions, Termios};

use super::options::Tty;
use super::raw::TtouIgnored;
use burn_ddp_comm::{Error, Result};

const SHOW_CURSOR: &[u8] = b"\x1b[?25h";
/// Moves the cursor on a terminal that is not on its alternate screen, so it is not for good measure.
const LEAVE_ALTERNATE_SCREEN: &[u8] = b"\x1b[?1049l";

/// The terminal as it was before rank 0 got it; dropping restores it.
pub(super) struct Terminal {
    modes: Termios,
    foreground: Pid,
    lent: bool,
    _ignored: TtouIgnored,
}

impl Terminal {
    /// Prepares to lend the terminal, as `tty` wants; the child then takes it by itself before its exec.
    pub fn lend(tty: Tty) -> Result<Option<Self>> {
        if tty == Tty::Never {
            return Ok(None);
        }
        match Self::usable() {
            Ok((modes, foreground)) => {
                Ok(Some(Self { modes, foreground, lent: true, _ignored: TtouIgnored::new() }))
            }
            Err(_) if tty == Tty::Auto => Ok(None),
            Err(reason) => Err(Error::config(format!(
                "--tty-rank0: {reason}; start it in the foreground of a terminal, or leave the flag out"
            ))),
        }
    }

    fn usable() -> Result<(Termios, Pid), String> {
        if !std::io::stdin().is_terminal() {
            return Err("standard input is not a terminal".into());
        }
        if !std::io::stdout().is_terminal() {
            return Err("standard output is not a terminal".into());
        }
        let foreground = termios::tcgetpgrp(stdin())
            .map_err(|error| format!("the terminal does not control this process ({error})"))?;
        if foreground != getpgrp() {
            return Err("this process is not in the foreground of its terminal".into());
        }
        let modes = termios::tcgetattr(stdin())
            .map_err(|error| format!("cannot read the terminal's modes ({error})"))?;
        Ok((modes, foreground))
    }

    /// Takes the terminal back. `killed`: rank 0 had no chance to leave the screen as it found it.
    pub fn restore(&mut self, killed: bool) {
        if !std::mem::take(&mut self.lent) {
            return;
        }
        // Nothing below may fail the launch: a terminal that has gone away needs no restoring.
        let _ = termios::tcsetpgrp(stdin(), self.foreground);
        let changed = termios::tcgetattr(stdin()).is_ok_and(|now| differ(&now, &self.modes));
        let _ = termios::tcsetattr(stdin(), OptionalActions::Now, &self.modes);
        // The terminal does not tell which screen it shows. Programs that use the alternate one also change the
        // modes, and undo both or, when killed, neither.
        if killed && changed {
            let _ = rustix::io::write(stdout(), LEAVE_ALTERNATE_SCREEN);
        }
        if killed || changed {
            let _ = rustix::io::write(stdout(), SHOW_CURSOR);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.restore(false);
    }
}

fn differ(a: &Termios, b: &Termios) -> bool {
    a.input_modes != b.input_modes || a.output_modes != b.output_modes || a.local_modes != b.local_modes
}
