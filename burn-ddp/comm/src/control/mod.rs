//! Who is alive, who has left, and why the group has ended.
//!
//! A rank that waits for data cannot tell a slow peer from a dead one by waiting: the one must be given hours
//! (a preprocessing step, a first compilation), the other seconds. So life is proved on a connection of its
//! own by a thread of its own, which beats however busy the rest of the process is, and a data wait ends for
//! one of three reasons only: the data came, its own deadline passed, or this module says in the shared
//! [`Liveness`] that it is in vain.
//!
//! The same connection carries the two other things that must not queue behind data. An abort tells everyone
//! the first cause, so that all ranks report the mismatch and not each other's closed sockets. A goodbye is
//! said and acknowledged before anything is closed, so that a rank that is done early is not taken for dead.
//!
//! Silence is counted only while this process was able to listen: a rank that was stopped and goes on must not
//! accuse everyone else of the time it slept.

mod link;
mod message;
mod monitor;
mod pulse;
#[cfg(test)]
mod tests;

use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::transport::Liveness;
use crate::transport::poll::Wake;
use crate::transport::tcp::check_streams;
use monitor::Monitor;

/// How long an abort, or leaving a failed group, waits for the cause to be handed to the kernel.
const TELL: Duration = Duration::from_millis(200);
/// Longest wait for the acknowledgements of a goodbye.
const GOODBYE: Duration = Duration::from_secs(5);
/// Shortest silence that means anything on a busy host.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(100);

/// The control channel of one rank in one group. Dropping it leaves the group in good order, or aborts it when
/// the thread that drops it is panicking.
pub struct Control {
    me: Rank,
    liveness: Liveness,
    shared: Arc<Shared>,
    goodbye: Duration,
    thread: Option<JoinHandle<()>>,
}

/// What the monitor and the owner of the channel tell each other.
struct Shared {
    orders: Mutex<Orders>,
    changed: Condvar,
    wake: Wake,
}

#[derive(Default)]
struct Orders {
    /// The owner wants to leave; the moment until which that may take.
    leave: Option<Deadline>,
    /// The monitor has told the cause of the group's end to everyone it could, or is gone.
    told: bool,
}

impl Shared {
    // Every update is one assignment, so a panic elsewhere leaves nothing half-done.
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_told(&self) {
        self.lock().told = true;
        self.changed.notify_all();
    }
}

impl Control {
    /// Starts to prove life to the peers at the other ends of `streams` (indexed by rank, none at `me`:
    /// [`Mesh::control`](crate::transport::tcp::Mesh)) and to watch theirs. A peer that is silent for
    /// `peer_timeout`, which must be the same on all ranks, is lost.
    pub fn start(
        me: Rank,
        streams: Vec<Option<TcpStream>>,
        liveness: Liveness,
        peer_timeout: Duration,
    ) -> Result<Control> {
        check_streams(me, &streams)?;
        if peer_timeout < SHORTEST_TIMEOUT {
            return Err(Error::config(format!(
                "peer timeout (BURN_DDP_PEER_TIMEOUT) {peer_timeout:?}: a busy host is silent for that long; use at least \
                 {SHORTEST_TIMEOUT:?}"
            )));
        }
        let shared =
            Arc::new(Shared { orders: Mutex::default(), changed: Condvar::new(), wake: Wake::new()? });
        let monitor = Monitor::new(me, streams, liveness.clone(), shared.clone(), peer_timeout)?;
        let bell = shared.clone();
        liveness.subscribe(move || bell.wake.raise());
        let thread = std::thread::Builder::new()
            .name(format!("ddp-control-{}", me.0))
            .spawn(move || monitor.run())
            .map_err(|error| Error::io("cannot start the thread of the control channel", error))?;
        Ok(Self { me, liveness, shared, goodbye: GOODBYE.min(peer_timeout), thread: Some(thread) })
    }

    /// Ends the group on all ranks: every wait here returns `cause`, every wait of a peer an error that repeats
    /// it. Only the first cause of a group counts. Returns when the peers have been told, or after 200 ms.
    pub fn abort(&self, cause: &Error) {
        self.liveness.fail(cause.clone());
        let deadline = Deadline::after(TELL);
        let mut orders = self.shared.lock();
        while !orders.told && !deadline.passed() {
            let woken = self.shared.changed.wait_timeout(orders, deadline.remaining());
            orders = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the group if this thread panics.
    pub fn tell_of_panic(&self) {
        if std::thread::panicking() && self.thread.is_some() {
            self.abort(&Error::new(ErrorKind::Aborted, format!("{} panicked", self.me)));
        }
    }

    /// Leaves the group: says goodbye to every living peer and returns when each has taken note (at most for
    /// the peer timeout or 5 seconds). Peers need not leave at the same time. A group that has failed is left
    /// without goodbye. Later calls do nothing.
    pub fn finish(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let limit = if self.liveness.cause().is_some() { TELL } else { self.goodbye };
        self.shared.lock().leave = Some(Deadline::after(limit));
        self.shared.wake.raise();
        // A panic of the monitor has already ended the group with a cause of its own.
        let _ = thread.join();
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.tell_of_panic();
        self.finish();
    }
}
