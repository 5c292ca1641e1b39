//! The terminal, lent to rank 0 and restored.
//!
//! A program that draws needs a real terminal, and it must be in the terminal's foreground process group, or the first
//! key it reads stops it. Each rank has its own process group, so the foreground moves to that of rank 0, and returns
//! to the launcher's when rank 0 ends. A rank 0 that is killed in raw mode or on the alternate screen cannot restore
//! the terminal, so the launcher does.

use std::io::IsTerminal;

use burn_ddp_comm::{Error, Result};
use rustix::process::{Pid, getpgrp};
use rustix::stdio::{stdin, stdout};
use rustix::termios::{self, OptionalActions, Termios};

use crate::options::Tty;
use crate::sys::IgnoredSigttou;

const SHOW_CURSOR: &[u8] = b"\x1b[?25h";
/// Only for a terminal on its alternate screen: on any other it moves the cursor.
const LEAVE_ALTERNATE_SCREEN: &[u8] = b"\x1b[?1049l";

/// The state of the terminal before rank 0 got it. Dropping this restores it.
pub(crate) struct Terminal {
    modes: Termios,
    foreground: Pid,
    lent: bool,
    _ignored: IgnoredSigttou,
}

impl Terminal {
    /// Saves the terminal's state if `tty` and the terminal allow to lend it, else returns `None`. The process of rank
    /// 0 takes the foreground by itself, before its program starts.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](burn_ddp_comm::ErrorKind::Config) if `tty` is [`Tty::Always`] and there is no usable
    /// terminal.
    pub fn prepare_to_lend(tty: Tty) -> Result<Option<Self>> {
        if tty == Tty::Never {
            return Ok(None);
        }
        match Self::current_state() {
            Ok((modes, foreground)) => {
                Ok(Some(Self { modes, foreground, lent: true, _ignored: IgnoredSigttou::new() }))
            }
            Err(_) if tty == Tty::Auto => Ok(None),
            Err(reason) => Err(Error::config(format!(
                "--tty-rank0: {reason}; start it in the foreground of a terminal, or leave the flag out"
            ))),
        }
    }

    /// Returns the modes and the foreground process group, or the reason why the terminal cannot be lent.
    fn current_state() -> Result<(Termios, Pid), String> {
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

    /// Takes the terminal back from rank 0. `killed` tells that rank 0 could not restore the screen by itself.
    pub fn restore(&mut self, killed: bool) {
        if !std::mem::take(&mut self.lent) {
            return;
        }
        // Errors are ignored: a terminal that has gone away needs no restoring.
        let _ = termios::tcsetpgrp(stdin(), self.foreground);
        let changed = termios::tcgetattr(stdin()).is_ok_and(|now| modes_differ(&now, &self.modes));
        let _ = termios::tcsetattr(stdin(), OptionalActions::Now, &self.modes);
        // A terminal cannot be asked which screen it shows. Programs that use the alternate screen also change the
        // modes, and restore both or, when killed, neither.
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

fn modes_differ(a: &Termios, b: &Termios) -> bool {
    a.input_modes != b.input_modes || a.output_modes != b.output_modes || a.local_modes != b.local_modes
}
