//! What this rank knows of its peers' lives, shared by the wires and the control channel.
//!
//! The control channel learns that a peer has died, failed or left; the thread that is blocked in a wire has
//! to hear of it. Both hold a [`Liveness`]: the first error wins and stays, and setting it wakes everyone
//! who subscribed.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;

/// What is known of one peer.
#[derive(Clone, Debug, Default)]
pub enum PeerState {
    /// Nothing bad: it answers, or it is only slow.
    #[default]
    Alive,
    /// It has left the group in good order.
    Finished,
    /// It is dead, stopped, or has reported an error.
    Failed(Error),
}

type Wake = Arc<dyn Fn() + Send + Sync>;

/// The shared knowledge. Clones are handles to the same state.
#[derive(Clone)]
pub struct Liveness(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    cause: Option<Error>,
    peers: Vec<PeerState>,
    wakes: Vec<Wake>,
}

impl Liveness {
    /// All of `world_size` ranks alive.
    pub fn new(world_size: usize) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(State {
                cause: None,
                peers: vec![PeerState::Alive; world_size],
                wakes: Vec::new(),
            }),
            changed: Condvar::new(),
        }))
    }

    // A panic while the lock is held cannot leave the state half-written: every update is one assignment.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the group: every wait returns `cause`, now and later. Only the first cause counts; returns whether
    /// this was it.
    pub fn fail(&self, cause: Error) -> bool {
        let mut state = self.lock();
        if state.cause.is_some() {
            return false;
        }
        state.cause = Some(cause);
        self.0.changed.notify_all();
        // A subscriber may take a lock under which others ask this state, so it is called without the lock.
        let wakes = state.wakes.clone();
        drop(state);
        wakes.iter().for_each(|wake| wake());
        true
    }

    /// The first cause, if the group has ended.
    pub fn cause(&self) -> Option<Error> {
        self.lock().cause.clone()
    }

    /// `Err` with the first cause if the group has ended.
    pub fn check(&self) -> Result<(), Error> {
        self.cause().map_or(Ok(()), Err)
    }

    /// Notes what is now known of `peer`; a failure ends the group as well. A peer that has finished or failed
    /// stays so.
    pub fn set_peer(&self, peer: Rank, new: PeerState) {
        let failure = match &new {
            PeerState::Failed(error) => Some(error.clone()),
            _ => None,
        };
        let mut state = self.lock();
        if !matches!(state.peers[peer.0], PeerState::Alive) {
            return;
        }
        state.peers[peer.0] = new;
        self.0.changed.notify_all();
        drop(state);
        if let Some(error) = failure {
            self.fail(error);
        }
    }

    /// What is known of `peer`.
    pub fn peer(&self, peer: Rank) -> PeerState {
        self.lock().peers[peer.0].clone()
    }

    /// Calls `wake` when the group ends (at once if it has).
    pub fn subscribe(&self, wake: impl Fn() + Send + Sync + 'static) {
        let mut state = self.lock();
        if state.cause.is_none() {
            state.wakes.push(Arc::new(wake));
            return;
        }
        drop(state);
        wake();
    }

    /// The error for a wire to `peer` that was closed. A wire sees the end of file before or after the control
    /// channel has read why, so this waits until `deadline` for the better reason.
    pub fn closed_by(&self, peer: Rank, deadline: Deadline) -> Error {
        let mut state = self.lock();
        loop {
            if let Some(cause) = &state.cause {
                return cause.clone();
            }
            match &state.peers[peer.0] {
                PeerState::Alive => {}
                PeerState::Failed(error) => return error.clone(),
                PeerState::Finished => {
                    return Error::new(
                        ErrorKind::PeerFinished(peer),
                        format!("{peer} has already finished and takes part in nothing more"),
                    );
                }
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Error::new(
                    ErrorKind::PeerLost(peer),
                    format!("{peer} is lost: its connection closed"),
                );
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn the_first_cause_stays_and_wakes_everyone() {
        let woken = Arc::new(AtomicUsize::new(0));
        let liveness = Liveness::new(3);
        let counter = woken.clone();
        liveness.subscribe(move || {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        let lost = Error::new(ErrorKind::PeerLost(Rank(2)), "rank 2 is lost");
        liveness.set_peer(Rank(2), PeerState::Failed(lost));
        assert!(!liveness.fail(Error::new(ErrorKind::Aborted, "later")));
        assert_eq!(liveness.cause().unwrap().kind(), ErrorKind::PeerLost(Rank(2)));
        assert_eq!(woken.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_closed_wire_is_explained_by_what_the_control_channel_knows() {
        let liveness = Liveness::new(2);
        let soon = Deadline::after(Duration::from_millis(5));
        assert_eq!(liveness.closed_by(Rank(1), soon).kind(), ErrorKind::PeerLost(Rank(1)));
        liveness.set_peer(Rank(1), PeerState::Finished);
        assert_eq!(liveness.closed_by(Rank(1), soon).kind(), ErrorKind::PeerFinished(Rank(1)));
    }
}
