//! SIGINT and SIGTERM as requests to stop the training.
//!
//! `signal-hook` cannot remove a handler, and a process whose handler does nothing could not be ended by the signal any
//! more. So the first launch of a process starts a thread that lives as long as the process:
//!
//! ```text
//! signal -> thread |- a launch is running, first signal  -> StopSignals::received, the training stops
//!                  |- a launch is running, second signal -> default action: the process ends
//!                  `- no launch is running               -> default action, unless the program had a handler
//! ```
//!
//! Signal handlers belong to the process, and so does the list of launches in this file.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Minimum time between a first and a second signal: `timeout` and some schedulers send a signal twice at once.
const SECOND_AFTER: Duration = Duration::from_millis(200);

/// Running launches; `None` before the first.
static LAUNCHES: Mutex<Option<Vec<Weak<Received>>>> = Mutex::new(None);

fn launches() -> MutexGuard<'static, Option<Vec<Weak<Received>>>> {
    LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Signals that one launch has received.
#[derive(Default)]
struct Received {
    /// Number of the first signal; 0 before it.
    first: AtomicI32,
    at: Mutex<Option<Instant>>,
}

impl Received {
    /// Adds a signal, and returns true if it is a second one.
    fn add(&self, signal: i32, now: Instant) -> bool {
        let _ = self.first.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        now.duration_since(*at.get_or_insert(now)) >= SECOND_AFTER
    }
}

/// Watch of the signals for one launch, which ends when this is dropped.
pub(super) struct StopSignals(Option<Arc<Received>>);

impl StopSignals {
    /// Watches both signals, or none if not `wanted`.
    pub(super) fn watch(wanted: bool) -> Result<Self> {
        if !wanted {
            return Ok(Self(None));
        }
        let received = Arc::<Received>::default();
        let mut launches = launches();
        if launches.is_none() {
            start_thread()?;
        }
        launches.get_or_insert_default().push(Arc::downgrade(&received));
        Ok(Self(Some(received)))
    }

    /// Name of the first signal, if one was received.
    pub(super) fn received(&self) -> Option<&'static str> {
        match self.0.as_ref()?.first.load(Ordering::SeqCst) {
            0 => None,
            SIGINT => Some("SIGINT"),
            _ => Some("SIGTERM"),
        }
    }
}

/// Starts the thread that handles signals.
fn start_thread() -> Result<()> {
    let (ignored, caught) = (mask("SigIgn:"), mask("SigCgt:"));
    // A shell makes a job in the background ignore SIGINT, and it stays ignored.
    let signals: Vec<i32> = [SIGINT, SIGTERM].into_iter().filter(|signal| !has(ignored, *signal)).collect();
    let mut signals = Signals::new(signals).map_err(|error| Error::io("cannot watch signals", error))?;
    let handle = move || {
        for signal in signals.forever() {
            if needs_default_action(signal, caught) {
                // Fails only for signals that it does not know.
                let _ = emulate_default_handler(signal);
            }
        }
    };
    std::thread::Builder::new()
        .name("learner-signals".into())
        .spawn(handle)
        .map_err(|error| Error::io("cannot start the thread for signals", error))?;
    Ok(())
}

/// Adds the signal to all running launches, and returns true if its default action is due: a launch receives it for the
/// second time, or no launch runs and the program had not `caught` it before the first launch.
fn needs_default_action(signal: i32, caught: u64) -> bool {
    let now = Instant::now();
    let mut launches = launches();
    let launches = launches.get_or_insert_default();
    launches.retain(|launch| launch.strong_count() > 0);
    let second = launches.iter().filter_map(Weak::upgrade).filter(|launch| launch.add(signal, now)).count();
    if launches.is_empty() { !has(caught, signal) } else { second > 0 }
}

/// Reads a signal mask of this process from `/proc`; empty on systems without it.
fn mask(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

fn has(mask: u64, signal: i32) -> bool {
    mask & (1 << (signal - 1)) != 0
}
