//! The control channel: heartbeats, aborts and goodbyes.
//!
//! A rank that waits for data cannot tell a slow peer from a dead one: it may have to wait hours for the first (a
//! preprocessing step, a first compilation), but the second must be an error within seconds. So each pair of ranks has
//! a connection for control, and each rank a thread that sends heartbeats over it however busy the rest of the process
//! is. A wait for data ends for one of three reasons: the data have arrived, its deadline has passed, or the monitor
//! thread has put a cause into the shared [`Liveness`].
//!
//! ```text
//!             peer says goodbye, this rank acknowledges
//!   Alive ─────────────────────────────────────────────> Finished ────────┐
//!     │ this rank says goodbye                                            ├─> either end may close
//!     ├──────────────────────> peer acknowledges ─────────────────────────┘
//!     ├── end of the connection, or silence for the peer timeout ──> Failed, PeerLost
//!     └── abort message ───────────────────────────────────────────> Failed, PeerFailed or PeerLost
//! ```
//!
//! - Aborts and goodbyes use this connection because they must not queue behind data.
//! - An abort carries the first cause, so that all ranks report that cause and not each other's closed sockets.
//! - A goodbye is acknowledged before its connection closes, so that a rank that finishes early is not taken for dead.
//! - Silence counts only while this process was able to read: a rank that was stopped for a minute and continues must
//!   not declare its peers lost.

mod heartbeat;
mod message;
mod monitor;
mod peer_connection;
mod signals;
#[cfg(test)]
mod tests;

use std::net::TcpStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::transport::Liveness;
use crate::transport::tcp::prepare_streams;
use monitor::Monitor;
use signals::Signals;

/// Longest time for handing the cause of the group's end to the kernel.
const ABORT_LIMIT: Duration = Duration::from_millis(200);
/// Longest wait for the acknowledgements of a goodbye.
const GOODBYE_LIMIT: Duration = Duration::from_secs(5);
/// Smallest peer timeout; a busy host causes shorter silences.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(100);

/// The control channel of one rank in one group. Dropping it leaves the group without an error, or aborts the group if
/// the thread is panicking.
pub struct Control {
    me: Rank,
    liveness: Liveness,
    signals: Arc<Signals>,
    goodbye_limit: Duration,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts to send heartbeats over `streams` (indexed by rank, none at `me`:
    /// [`Mesh::control`](crate::transport::tcp::Mesh)) and to watch those of the peers. A peer that is silent for
    /// `peer_timeout`, which must be the same on all ranks, is lost.
    ///
    /// # Errors
    /// `Config` when `streams` has another form or `peer_timeout` is under 100 ms; `Io` when a system call fails.
    pub fn start(
        me: Rank,
        streams: Vec<Option<TcpStream>>,
        liveness: Liveness,
        peer_timeout: Duration,
    ) -> Result<Control> {
        prepare_streams(me, &streams)?;
        if peer_timeout < SHORTEST_TIMEOUT {
            return Err(Error::config(format!(
                "the peer timeout {peer_timeout:?} is as short as the silences of a busy host: set \
                 BURN_DDP_PEER_TIMEOUT to at least {SHORTEST_TIMEOUT:?}"
            )));
        }
        let signals = Arc::new(Signals::new()?);
        let monitor = Monitor::new(me, streams, liveness.clone(), signals.clone(), peer_timeout);
        let woken = signals.clone();
        liveness.subscribe(move || woken.waker.wake());
        let thread = std::thread::Builder::new()
            .name(format!("ddp-control-{}", me.0))
            .spawn(move || monitor.run())
            .map_err(|error| Error::io("cannot start the thread of the control channel", error))?;
        Ok(Self {
            me,
            liveness,
            signals,
            goodbye_limit: GOODBYE_LIMIT.min(peer_timeout),
            thread: Some(thread),
        })
    }

    /// Ends the group on all ranks: every wait of this rank returns `cause`, every wait of a peer an error that repeats
    /// it. Only the first cause of a group counts. Returns when the cause was sent to the peers, at most after 200 ms.
    pub fn abort(&self, cause: &Error) {
        self.liveness.fail(cause.clone());
        self.signals.wait_for_cause_sent(Deadline::after(ABORT_LIMIT));
    }

    /// Aborts the group if this thread is panicking.
    pub fn abort_if_panicking(&self) {
        if std::thread::panicking() && self.thread.is_some() {
            self.abort(&Error::new(ErrorKind::Aborted, format!("{} panicked", self.me)));
        }
    }

    /// Leaves the group: says goodbye to every living peer and returns when each has acknowledged it, at most after the
    /// peer timeout or 5 seconds. Peers need not leave at the same time. Leaving a group that has failed takes no
    /// goodbye. Later calls do nothing.
    pub fn finish(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let limit = if self.liveness.cause().is_some() { ABORT_LIMIT } else { self.goodbye_limit };
        self.signals.request_leave(Deadline::after(limit));
        // A panic of the monitor has already ended the group with a cause of its own.
        let _ = thread.join();
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.abort_if_panicking();
        self.finish();
    }
}
