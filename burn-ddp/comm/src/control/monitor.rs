//! The monitor thread of the control channel: one loop over the connections with all peers.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::heartbeat::HeartbeatSchedule;
use super::message::{Cause, Message};
use super::peer_connection::{End, PeerConnection};
use super::signals::Signals;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::net::poll::wait;
use crate::rank::Rank;
use crate::transport::{Liveness, PeerState};

pub(super) struct Monitor {
    me: Rank,
    liveness: Liveness,
    signals: Arc<Signals>,
    connections: Vec<PeerConnection>,
    schedule: HeartbeatSchedule,
    /// The cause of the group's end was queued for all peers.
    cause_queued: bool,
    /// Set when this rank leaves the group: the latest end of this thread.
    leave_by: Option<Deadline>,
}

impl Monitor {
    /// A monitor of `streams`, which are indexed by rank and do not block.
    pub fn new(
        me: Rank,
        streams: Vec<Option<TcpStream>>,
        liveness: Liveness,
        signals: Arc<Signals>,
        timeout: Duration,
    ) -> Self {
        let now = Instant::now();
        let connect =
            |(rank, stream): (usize, Option<TcpStream>)| Some(PeerConnection::new(Rank(rank), stream?, now));
        let connections = streams.into_iter().enumerate().filter_map(connect).collect();
        let schedule = HeartbeatSchedule::new(timeout, now);
        Self { me, liveness, signals, connections, schedule, cause_queued: false, leave_by: None }
    }

    /// Runs until this rank has left the group.
    pub fn run(mut self) {
        while !self.may_leave() {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(error) => {
                    self.liveness.fail(error);
                    break;
                }
            };
            self.read(&ready);
            self.send_heartbeats();
            self.queue_cause_or_goodbye();
            self.connections.iter_mut().for_each(PeerConnection::flush);
            if self.cause_queued {
                self.signals.set_cause_sent();
            }
        }
        self.connections.iter_mut().for_each(PeerConnection::close);
    }

    /// Waits until there is something to do; returns which connections can be read.
    fn wait(&self) -> Result<Vec<bool>> {
        let mut limit = self.schedule.until(Instant::now());
        if let Some(deadline) = self.leave_by {
            limit = limit.min(deadline.remaining());
        }
        let mut fds = vec![PollFd::new(&self.signals.waker, PollFlags::IN)];
        fds.extend(self.connections.iter().filter_map(|connection| {
            let write = if connection.has_output() { PollFlags::OUT } else { PollFlags::empty() };
            Some(PollFd::new(connection.stream()?, PollFlags::IN | write))
        }));
        wait(&mut fds, limit)?;
        if !fds[0].revents().is_empty() {
            self.signals.waker.clear();
        }
        let mut ready = fds[1..].iter().map(|fd| !fd.revents().is_empty());
        let is_ready =
            |connection: &PeerConnection| connection.stream().is_some() && ready.next() == Some(true);
        Ok(self.connections.iter().map(is_ready).collect())
    }

    fn read(&mut self, ready: &[bool]) {
        // When heartbeats are due, silent peers are, too. So all connections are read before, whatever the poll has
        // seen.
        let all = self.schedule.until(Instant::now()).is_zero();
        let mut ends = Vec::new();
        for (index, ready) in ready.iter().enumerate() {
            if !(all || *ready) {
                continue;
            }
            let (messages, end) = self.connections[index].read();
            messages.into_iter().for_each(|message| self.handle(index, message));
            ends.extend(end.map(|end| (index, end)));
        }
        // Messages count before ends, because a peer that has ended after an abort of a third one is not the cause.
        for (index, end) in ends {
            self.handle_end(index, end);
        }
    }

    fn handle(&mut self, index: usize, message: Message) {
        let peer = self.connections[index].peer;
        match message {
            Message::Heartbeat | Message::GoodbyeAcknowledged => {}
            Message::Abort(cause) => {
                self.liveness.set_peer(peer, PeerState::Failed(cause.into_error(self.me, peer)));
            }
            Message::Goodbye => {
                self.liveness.set_peer(peer, PeerState::Finished);
                self.connections[index].queue(&Message::GoodbyeAcknowledged);
            }
        }
    }

    fn handle_end(&mut self, index: usize, end: End) {
        let connection = &self.connections[index];
        let reason = match end {
            End::Closed if connection.peer_may_close() => return,
            End::Closed => "its process ended (connection closed)",
            End::Garbage => "it sends bytes that are no control messages (another version or program)",
        };
        self.set_lost(connection.peer, reason);
    }

    fn set_lost(&self, peer: Rank, reason: &str) {
        let error = Error::new(ErrorKind::PeerLost(peer), format!("{peer} is lost: {reason}"));
        self.liveness.set_peer(peer, PeerState::Failed(error));
    }

    /// Queues the heartbeats that are due, and finds the peers whose heartbeats do not come.
    fn send_heartbeats(&mut self) {
        let Some(heartbeat) = self.schedule.due(Instant::now()) else { return };
        let mut silent = Vec::new();
        for connection in &mut self.connections {
            silent.extend(connection.too_silent(&heartbeat).map(|silence| (connection.peer, silence)));
            connection.queue_heartbeat();
        }
        for (peer, silence) in silent {
            self.set_lost(
                peer,
                &format!(
                    "no heartbeat for {:.1} s (its process is stopped, its host is down or the network is cut)",
                    silence.as_secs_f64()
                ),
            );
        }
    }

    fn queue_cause_or_goodbye(&mut self) {
        self.leave_by = self.leave_by.or_else(|| self.signals.leave_by());
        match self.liveness.cause() {
            // Every peer gets the cause, even one that came from a peer: that peer may have died before it had sent it
            // to all, and no peer may notice the end of this rank before the cause of it.
            Some(cause) if !self.cause_queued => {
                let message = Message::Abort(Cause::new(self.me, &cause));
                self.connections.iter_mut().for_each(|connection| connection.queue(&message));
                self.cause_queued = true;
            }
            Some(_) => {}
            None if self.leave_by.is_some() => {
                self.connections.iter_mut().for_each(PeerConnection::queue_goodbye);
            }
            None => {}
        }
    }

    fn may_leave(&self) -> bool {
        let Some(deadline) = self.leave_by else { return false };
        let mut connections = self.connections.iter();
        let complete = if self.cause_queued {
            connections.all(|connection| !connection.has_output())
        } else {
            connections.all(PeerConnection::goodbye_complete)
        };
        complete || deadline.passed()
    }
}

impl Drop for Monitor {
    // A panic of this thread ends the group: without it this rank sends no heartbeats and notices no lost peer.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cause = format!("the control channel of {} panicked", self.me);
            self.liveness.fail(Error::new(ErrorKind::Aborted, cause));
        }
        self.signals.set_cause_sent();
    }
}
