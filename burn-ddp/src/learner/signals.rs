//! SIGINT and SIGTERM as a wish to stop at the next step, on all ranks at the same one.
//!
//! A signal handler cannot be taken back: `signal-hook` leaves its own in place, and with nobody watching the process
//! would be deaf to a signal that ended it before. So the first launch of a process also asks for what the signals did
//! without us, to be done whenever no launch watches. Handlers are the process's, and so is the state that is kept
//! here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_default};

use crate::error::{Error, Result};

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

struct Process {
    /// Those that nobody ignored before us: of a job in the background the shell wants no SIGINT to be heard.
    signals: Vec<i32>,
    /// Launches that watch.
    watching: usize,
    nobody_watches: Arc<AtomicBool>,
}

impl Process {
    fn first() -> Result<Self> {
        let nobody_watches = Arc::<AtomicBool>::default();
        let (ignored, caught) = (mask("SigIgn:"), mask("SigCgt:"));
        let has = |mask: u64, signal: i32| mask & (1 << (signal - 1)) != 0;
        let signals: Vec<_> = [SIGINT, SIGTERM].into_iter().filter(|signal| !has(ignored, *signal)).collect();
        // Who catches a signal already goes on to get it.
        for signal in signals.iter().filter(|signal| !has(caught, **signal)) {
            register_conditional_default(*signal, nobody_watches.clone()).map_err(failed)?;
        }
        Ok(Self { signals, watching: 0, nobody_watches })
    }
}

/// A mask of signals of this process; empty where the system does not tell.
fn mask(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

fn process() -> MutexGuard<'static, Option<Process>> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: std::io::Error) -> Error {
    Error::io("cannot watch signals", error)
}

/// Watches the signals while it lives; a second one ends the process as if nobody watched.
pub(super) struct StopSignals {
    came: Arc<AtomicBool>,
    registered: Vec<SigId>,
    watches: bool,
}

impl StopSignals {
    /// Watches both signals, or nothing if not `wanted`.
    pub(super) fn watch(wanted: bool) -> Result<Self> {
        let mut this = Self { came: Arc::default(), registered: Vec::new(), watches: false };
        if !wanted {
            return Ok(this);
        }
        let mut process = process();
        let state = match process.take() {
            Some(state) => state,
            None => Process::first()?,
        };
        let state = process.insert(state);
        state.watching += 1;
        this.watches = true;
        state.nobody_watches.store(false, Ordering::SeqCst);
        let signals = state.signals.clone();
        drop(process);
        for signal in signals {
            // In this order: the first signal finds the flag unset and sets it, the second finds it set.
            let impatient = register_conditional_default(signal, this.came.clone());
            let stop = register(signal, this.came.clone());
            for registered in [impatient, stop] {
                this.registered.push(registered.map_err(failed)?);
            }
        }
        Ok(this)
    }

    /// Whether a signal came.
    pub(super) fn came(&self) -> bool {
        self.came.load(Ordering::SeqCst)
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            signal_hook::low_level::unregister(id);
        }
        if let Some(process) = process().as_mut().filter(|_| self.watches) {
            process.watching -= 1;
            process.nobody_watches.store(process.watching == 0, Ordering::SeqCst);
        }
    }
}
