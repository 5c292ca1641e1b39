//! The supervisor's event queue, and the thread that puts signals into it.
//!
//! Signals arrive on a thread of their own, which only adds them to the queue. So one loop sees them in order with all
//! other events, and no code of this package runs in a signal handler.

use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use burn_ddp_comm::{Error, Result};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::{Handle, Signals};

use crate::signals::signals_to_handle;
use crate::sys::UnblockedSignals;

/// An event that the supervisor waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A child process changed its state.
    ChildChanged,
    /// The launcher received this signal.
    Signal(i32),
    /// A thread that writes to the console has finished.
    WriterFinished,
}

/// Turns signals into events while it lives.
pub(crate) struct SignalEvents {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    _unblocked: UnblockedSignals,
}

impl SignalEvents {
    /// Installs the handlers and starts the thread. This must happen before the first rank starts, or its end could be
    /// missed. The handled signals are also unblocked, for the launcher and so for its ranks: a rank that cannot
    /// receive the signals passed on to it would only end by SIGKILL.
    pub fn start(events: Sender<Event>) -> Result<Self> {
        let handled = signals_to_handle();
        let mut signals = Signals::new(&handled).map_err(|error| Error::io("cannot watch signals", error))?;
        // Only after the handlers are installed, since a blocked signal may be pending already.
        let unblocked = UnblockedSignals::new(&handled);
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                for signal in signals.forever() {
                    let event = if signal == SIGCHLD { Event::ChildChanged } else { Event::Signal(signal) };
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
