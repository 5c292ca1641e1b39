//! SIGINT and SIGTERM as a wish to stop at the next step, on all ranks at the same one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::{Error, Result};

/// Watches the signals while it lives; a second one ends the process as if nobody watched.
pub(super) struct StopSignals {
    came: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl StopSignals {
    /// Watches both signals, or nothing if not `wanted`.
    pub(super) fn watch(wanted: bool) -> Result<Self> {
        let mut this = Self { came: Arc::default(), registered: Vec::new() };
        for signal in if wanted { &[SIGINT, SIGTERM][..] } else { &[] } {
            // In this order: the first signal finds the flag unset and sets it, the second finds it set.
            let impatient = signal_hook::flag::register_conditional_default(*signal, this.came.clone());
            let stop = signal_hook::flag::register(*signal, this.came.clone());
            for registered in [impatient, stop] {
                let id = registered.map_err(|error| Error::io("cannot watch signals", error))?;
                this.registered.push(id);
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
    }
}
