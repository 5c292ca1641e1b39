//! Signals as events. They arrive on a thread of their own, which only puts them into the supervisor's queue: so
//! one loop sees them in order with everything else, and no code of ours runs in signal context.

use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

use super::raw::Unblocked;
use super::supervise::Event;
use burn_ddp_comm::{Error, Result};

/// Signals that end the launch.
pub(super) const STOP: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Turns signals into events while it lives.
pub(super) struct SignalEvents {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    _unblocked: Unblocked,
}

impl SignalEvents {
    /// Starts to watch; must come before the first child, or its end could be missed. Signals that are watched are
    /// unblocked too, for the ranks as well: one that is deaf to what is passed on would only end by SIGKILL.
    pub fn watch(events: Sender<Event>) -> Result<Self> {
        let wanted = wanted(ignored());
        let mut signals = Signals::new(&wanted).map_err(|error| Error::io("cannot watch signals", error))?;
        // After the handlers are there, since a blocked signal may be waiting already.
        let unblocked = Unblocked::new(&wanted);
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for signal in signals.forever() {
                    let event = if signal == SIGCHLD { Event::Child } else { Event::Signal(signal) };
                    if events.send(event).is_err() {
                        return;
                    }
                }
            })
            .map_err(|error| Error::io("cannot start the thread for signals", error))?;
        Ok(Self { handle, thread: Some(thread), _unblocked: unblocked })
    }
}

impl Drop for SignalEvents {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The signals to watch when those in the mask `ignored` were ignored at the start. `nohup` and shells that put a
/// job in the background ignore signals on its behalf; catching them would undo that, and a closed terminal would
/// end the training after all.
fn wanted(ignored: u64) -> Vec<i32> {
    let kept = |signal: &i32| {
        let deferred = [SIGHUP, SIGINT, SIGQUIT].contains(signal);
        !(deferred && ignored & (1 << (signal - 1)) != 0)
    };
    STOP.into_iter().filter(kept).chain([SIGUSR1, SIGUSR2, SIGCHLD]).collect()
}

/// Mask of the signals this process ignores; empty where the system does not tell.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    mask(&status)
}

fn mask(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// `9 (SIGKILL)`, or the bare number where it has no name.
pub(super) fn describe(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("{signal} ({name})"),
        None => signal.to_string(),
    }
}

/// `SIGKILL`, or `signal 34` where it has no name.
pub(super) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_stay_ignored() {
        assert!(wanted(0).contains(&SIGHUP));
        let nohup = mask("Name:\tx\nSigBlk:\t0\nSigIgn:\t0000000000000001\n");
        assert_eq!(nohup, 1);
        assert!(!wanted(nohup).contains(&SIGHUP));
        assert!(wanted(nohup).contains(&SIGINT));
        assert!(wanted(u64::MAX).contains(&SIGTERM), "nobody means to ignore SIGTERM");
        assert!(wanted(u64::MAX).contains(&SIGCHLD));
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(describe(9), "9 (SIGKILL)");
        assert_eq!(describe(60), "60");
        assert_eq!(name(15), "SIGTERM");
    }
}
