//! The thread behind the control channel.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::Shared;
use super::link::{End, Link};
use super::message::{Cause, Message};
use super::pulse::Pulse;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::transport::poll::wait;
use crate::transport::{Liveness, PeerState};

pub(super) struct Monitor {
    me: Rank,
    liveness: Liveness,
    shared: Arc<Shared>,
    links: Vec<Link>,
    pulse: Pulse,
    told: bool,
    leave: Option<Deadline>,
}

impl Monitor {
    pub fn new(
        me: Rank,
        streams: Vec<Option<TcpStream>>,
        liveness: Liveness,
        shared: Arc<Shared>,
        timeout: Duration,
    ) -> Result<Self> {
        let now = Instant::now();
        let mut links = Vec::with_capacity(streams.len());
        for (rank, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true))
                .map_err(|error| Error::io("cannot set the options of a control connection", error))?;
            links.push(Link::new(Rank(rank), stream, now));
        }
        let pulse = Pulse::new(timeout, now);
        Ok(Self { me, liveness, shared, links, pulse, told: false, leave: None })
    }

    /// Runs until the owner of the channel has left the group.
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
            self.beat();
            self.follow_orders();
            self.links.iter_mut().for_each(Link::flush);
            if self.told {
                self.shared.set_told();
            }
        }
        self.links.iter_mut().for_each(Link::close);
    }

    /// Waits for something to do; which links have something to read.
    fn wait(&self) -> Result<Vec<bool>> {
        let mut limit = self.pulse.until(Instant::now());
        if let Some(leave) = self.leave {
            limit = limit.min(leave.remaining());
        }
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        fds.extend(self.links.iter().filter_map(|link| {
            let mail = if link.has_mail() { PollFlags::OUT } else { PollFlags::empty() };
            Some(PollFd::new(link.stream()?, PollFlags::IN | mail))
        }));
        wait(&mut fds, limit)?;
        if !fds[0].revents().is_empty() {
            self.shared.wake.clear();
        }
        let mut ready = fds[1..].iter().map(|fd| !fd.revents().is_empty());
        Ok(self.links.iter().map(|link| link.stream().is_some() && ready.next() == Some(true)).collect())
    }

    fn read(&mut self, ready: &[bool]) {
        // Before anybody is judged, all that is there is read, whatever the poll has seen.
        let all = self.pulse.until(Instant::now()).is_zero();
        let mut ends = Vec::new();
        for (index, ready) in ready.iter().enumerate() {
            if !(all || *ready) {
                continue;
            }
            let (messages, end) = self.links[index].read();
            messages.into_iter().for_each(|message| self.hear(index, message));
            ends.extend(end.map(|end| (index, end)));
        }
        // A peer that left because a third one aborted must not be blamed, so words count before ends.
        for (index, end) in ends {
            self.part(index, end);
        }
    }

    fn hear(&mut self, index: usize, message: Message) {
        let peer = self.links[index].peer;
        match message {
            Message::Heartbeat | Message::GoodbyeHeard => {}
            Message::Abort(cause) => {
                self.liveness.set_peer(peer, PeerState::Failed(cause.into_error(self.me, peer)));
            }
            Message::Goodbye => {
                self.liveness.set_peer(peer, PeerState::Finished);
                self.links[index].post(&Message::GoodbyeHeard);
            }
        }
    }

    fn part(&mut self, index: usize, end: End) {
        let link = &self.links[index];
        let peer = link.peer;
        let reason = match end {
            End::Closed if link.may_end() => return,
            End::Closed => "its process ended (connection closed)",
            End::Garbage => "it sends bytes that are no control messages (another version or program)",
        };
        self.lose(peer, reason);
    }

    fn lose(&self, peer: Rank, reason: &str) {
        let error = Error::new(ErrorKind::PeerLost(peer), format!("{peer} is lost: {reason}"));
        self.liveness.set_peer(peer, PeerState::Failed(error));
    }

    fn beat(&mut self) {
        let Some(beat) = self.pulse.beat(Instant::now()) else { return };
        let mut silent = Vec::new();
        for link in &mut self.links {
            silent.extend(link.too_silent(&beat).map(|silence| (link.peer, silence)));
            link.post_heartbeat();
        }
        for (peer, silence) in silent {
            self.lose(
                peer,
                &format!(
                    "no heartbeat for {:.1} s (its process is stopped, its host is down or the network is cut)",
                    silence.as_secs_f64()
                ),
            );
        }
    }

    fn follow_orders(&mut self) {
        if self.leave.is_none() {
            self.leave = self.shared.lock().leave;
        }
        match self.liveness.cause() {
            // Everyone is told, even of a cause that came from a peer: that peer may have died in the middle of
            // telling, and this rank's own end must not reach anybody before the reason for it.
            Some(cause) if !self.told => {
                let message = Message::Abort(Cause::new(self.me, &cause));
                self.links.iter_mut().for_each(|link| link.post(&message));
                self.told = true;
            }
            Some(_) => {}
            None if self.leave.is_some() => self.links.iter_mut().for_each(Link::post_goodbye),
            None => {}
        }
    }

    fn may_leave(&self) -> bool {
        let Some(leave) = self.leave else { return false };
        let settled = if self.told {
            self.links.iter().all(|link| !link.has_mail())
        } else {
            self.links.iter().all(Link::is_parted)
        };
        settled || leave.passed()
    }
}

impl Drop for Monitor {
    // Also on a panic: a rank without this thread can neither prove its life nor hear of others, and nobody
    // may wait for it.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cause = format!("the control channel of {} panicked", self.me);
            self.liveness.fail(Error::new(ErrorKind::Aborted, cause));
        }
        self.shared.set_told();
    }
}
