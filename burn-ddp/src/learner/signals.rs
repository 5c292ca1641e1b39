//! SIGINT and SIGTERM as a wish to stop at the next step, on all ranks at the same one.
//!
//! A signal handler cannot be taken back: `signal-hook` leaves its own in place, and with nobody watching the process
//! would be deaf to a signal that ended it before. So the first launch of a process starts a thread that stays, and
//! that does what the signals did without us whenever no launch watches. Handlers are the process's, and so is the list
//! of launches that is kept here.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::error::{Error, Result};

/// `timeout` and some schedulers send the same signal twice at once; only a later one means impatience.
const IMPATIENCE: Duration = Duration::from_millis(200);

/// Launches that watch; `None` before the first.
static WATCHING: Mutex<Option<Vec<Weak<Seen>>>> = Mutex::new(None);

fn watching() -> MutexGuard<'static, Option<Vec<Weak<Seen>>>> {
    WATCHING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one launch has seen.
#[derive(Default)]
struct Seen {
    /// The first signal; 0 before it.
    came: AtomicI32,
    first: Mutex<Option<Instant>>,
}

impl Seen {
    /// Notes a signal; whether it is a second one that means impatience.
    fn signal(&self, signal: i32, now: Instant) -> bool {
        let _ = self.came.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        now.duration_since(*first.get_or_insert(now)) >= IMPATIENCE
    }
}

/// Watches the signals while it lives; a second one ends the process as if nobody watched.
pub(super) struct StopSignals(Option<Arc<Seen>>);

impl StopSignals {
    /// Watches both signals, or nothing if not `wanted`.
    pub(super) fn watch(wanted: bool) -> Result<Self> {
        if !wanted {
            return Ok(Self(None));
        }
        let seen = Arc::<Seen>::default();
        let mut watching = watching();
        if watching.is_none() {
            listen()?;
        }
        watching.get_or_insert_default().push(Arc::downgrade(&seen));
        Ok(Self(Some(seen)))
    }

    /// The name of the signal that came first, if one did.
    pub(super) fn came(&self) -> Option<&'static str> {
        match self.0.as_ref()?.came.load(Ordering::SeqCst) {
            0 => None,
            SIGINT => Some("SIGINT"),
            _ => Some("SIGTERM"),
        }
    }
}

/// Starts the thread that is told of signals.
fn listen() -> Result<()> {
    let (ignored, caught) = (mask("SigIgn:"), mask("SigCgt:"));
    // Of a job in the background the shell wants no SIGINT to be heard.
    let signals: Vec<i32> = [SIGINT, SIGTERM].into_iter().filter(|signal| !has(ignored, *signal)).collect();
    let mut signals = Signals::new(signals).map_err(|error| Error::io("cannot watch signals", error))?;
    let answer = move || {
        for signal in signals.forever() {
            if answered_by_default(signal, caught) {
                // Without effect only for signals that are not known to it, and these are.
                let _ = emulate_default_handler(signal);
            }
        }
    };
    std::thread::Builder::new()
        .name("learner-signals".into())
        .spawn(answer)
        .map_err(|error| Error::io("cannot start the thread for signals", error))?;
    Ok(())
}

/// Tells the launches that watch. Whether the signal is to do what it does by default: there is no such launch (unless
/// somebody else had `caught` the signal before us, who has got it too), or one that was told before.
fn answered_by_default(signal: i32, caught: u64) -> bool {
    let now = Instant::now();
    let mut watching = watching();
    let launches = watching.get_or_insert_default();
    launches.retain(|launch| launch.strong_count() > 0);
    let impatient =
        launches.iter().filter_map(Weak::upgrade).filter(|launch| launch.signal(signal, now)).count();
    if launches.is_empty() { !has(caught, signal) } else { impatient > 0 }
}

/// A mask of signals of this process; empty where the system does not tell.
fn mask(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

fn has(mask: u64, signal: i32) -> bool {
    mask & (1 << (signal - 1)) != 0
}
