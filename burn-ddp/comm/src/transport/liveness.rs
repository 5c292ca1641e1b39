//! The state of all peers as this rank knows it, shared by the transports and the control channel.
//!
//! The control channel learns that a peer has died, failed or left, and the thread that is blocked in a transport must
//! learn of it. Both hold a [`Liveness`]. The first error stays the cause of the group's end, and calls all
//! subscribers, which wake blocked threads.
//!
//! ```text
//!   peer:   Alive ──goodbye──> Finished          group:   no cause ──first failure──> cause
//!             └────lost or aborted──> Failed ─────────────────────────^
//! ```

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;
use crate::watched::Watched;

/// State of one peer.
#[derive(Clone, Debug, Default)]
pub(crate) enum PeerState {
    /// It answers, or is only slow.
    #[default]
    Alive,
    /// It has left the group without an error.
    Finished,
    /// It is dead, stopped, or has reported an error.
    Failed(Error),
}

type Subscriber = Arc<dyn Fn() + Send + Sync>;

/// The state of a group and its peers. Clones are handles to the same state.
#[derive(Clone)]
pub struct Liveness(Arc<Watched<GroupState>>);

struct GroupState {
    /// The first error, which has ended the group.
    cause: Option<Error>,
    /// By rank.
    peers: Vec<PeerState>,
    subscribers: Vec<Subscriber>,
}

impl Liveness {
    /// A group of `world_size` living ranks.
    pub fn new(world_size: usize) -> Self {
        let peers = vec![PeerState::Alive; world_size];
        Self(Arc::new(Watched::new(GroupState { cause: None, peers, subscribers: Vec::new() })))
    }

    /// Ends the group: every wait returns `cause`, now and later. Only the first cause counts; returns whether
    /// this was it.
    pub fn fail(&self, cause: Error) -> bool {
        let subscribers = self.0.update(|group| {
            let first = group.cause.is_none();
            group.cause.get_or_insert(cause);
            first.then(|| group.subscribers.clone())
        });
        // Called without the lock, because a subscriber may take a lock under which another thread takes this one.
        subscribers.iter().flatten().for_each(|notify| notify());
        subscribers.is_some()
    }

    /// The first cause, if the group has ended.
    pub fn cause(&self) -> Option<Error> {
        self.0.lock().cause.clone()
    }

    /// Fails if the group has ended.
    ///
    /// # Errors
    /// The first cause of the group's end.
    pub fn check(&self) -> Result<(), Error> {
        self.cause().map_or(Ok(()), Err)
    }

    /// Sets the state of `peer`, unless it has finished or failed before. A failure ends the group as well.
    pub(crate) fn set_peer(&self, peer: Rank, new: PeerState) {
        let failure = match &new {
            PeerState::Failed(error) => Some(error.clone()),
            _ => None,
        };
        let changed = self.0.update(|group| {
            let alive = matches!(group.peers[peer.0], PeerState::Alive);
            if alive {
                group.peers[peer.0] = new;
            }
            alive
        });
        if let Some(error) = failure.filter(|_| changed) {
            self.fail(error);
        }
    }

    /// The state of `peer`.
    #[cfg(any(target_os = "linux", test))]
    pub(crate) fn peer(&self, peer: Rank) -> PeerState {
        self.0.lock().peers[peer.0].clone()
    }

    /// Calls `notify` when the group ends, or at once if it has ended.
    pub fn subscribe(&self, notify: impl Fn() + Send + Sync + 'static) {
        let mut group = self.0.lock();
        if group.cause.is_none() {
            group.subscribers.push(Arc::new(notify));
            return;
        }
        drop(group);
        notify();
    }

    /// The error for a connection that `peer` closed. A transport may see its end before the control channel has read
    /// the reason, so this waits for the reason until `deadline`.
    pub(crate) fn closed_by(&self, peer: Rank, deadline: Deadline) -> Error {
        let reason = self.0.wait_for(deadline, |group| match (&group.cause, &group.peers[peer.0]) {
            (Some(cause), _) => Some(cause.clone()),
            (None, PeerState::Failed(error)) => Some(error.clone()),
            (None, PeerState::Finished) => Some(Error::new(
                ErrorKind::PeerFinished(peer),
                format!("{peer} has already finished and takes part in nothing more"),
            )),
            (None, PeerState::Alive) => None,
        });
        let lost = || Error::new(ErrorKind::PeerLost(peer), format!("{peer} is lost: its connection closed"));
        reason.unwrap_or_else(lost)
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
