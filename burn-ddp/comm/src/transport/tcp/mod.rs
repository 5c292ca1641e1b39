//! Frames over TCP, with one connection for each peer, no thread, and no buffer for bodies.
//!
//! The sockets do not block. A call moves its frames as far as the kernel takes and gives bytes, and then waits in one
//! `poll` for both directions and a waker. Because sending and receiving share that loop, a ring of ranks that all send
//! first runs at any size; the waker ends the wait as soon as [`Liveness`] learns that the group has failed.
//!
//! [`Listener::connect`] makes the connections, [`TcpTransport`] moves frames over them.

mod connect;
mod handshake;
mod hello;
mod stream;
#[cfg(test)]
pub(crate) mod tests;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

pub use connect::{Listener, Mesh};
use stream::{FrameError, HEAD, Incoming, Outgoing, Progress};

use super::{Header, Liveness, Transport};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::net::poll::{Waker, wait};
use crate::rank::Rank;

/// Time for the control channel to tell the reason for which a connection closed.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// Time after which a wait checks the frames of the other peers. Ranks in different operations may wait for each other
/// in a ring in which no two exchange frames, and only the frames that they have sent to others reveal it.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A [`Transport`] over TCP connections.
///
/// The first error ends it, because a frame may be half moved: every later call returns the same cause, which the
/// group's [`Liveness`] holds too. Only a wrong argument ([`ErrorKind::Config`]) moves nothing and ends nothing.
pub struct TcpTransport {
    me: Rank,
    peers: Vec<Option<TcpStream>>,
    liveness: Liveness,
    waker: Arc<Waker>,
    /// Buffer for the start of a frame that arrives.
    head: Vec<u8>,
}

/// Checks that there is one connection with each rank but `me`, and makes all of them non-blocking and undelayed.
///
/// # Errors
/// `Config` naming the rank with a missing or superfluous connection; `Io` when an option cannot be set.
pub(crate) fn prepare_streams(me: Rank, streams: &[Option<TcpStream>]) -> Result<()> {
    match streams.iter().enumerate().find(|(rank, stream)| stream.is_none() != (*rank == me.0)) {
        Some((rank, Some(_))) => Err(Error::config(format!("{me} has a connection with itself, {rank}"))),
        Some((rank, None)) => Err(Error::config(format!("{me} has no connection with rank {rank}"))),
        None if me.0 >= streams.len() => {
            Err(Error::config(format!("{me} is outside of the {} connections it was given", streams.len())))
        }
        None => streams.iter().flatten().try_for_each(|stream| {
            let set = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            set.map_err(|error| Error::io("cannot set the options of a connection", error))
        }),
    }
}

impl TcpTransport {
    /// A transport of `me` over the connections `streams`, which are indexed by rank with none at `me`
    /// ([`Mesh::data`]).
    ///
    /// # Errors
    /// `Config` when `streams` has another form; `Io` when a system call fails.
    pub fn new(me: Rank, streams: Vec<Option<TcpStream>>, liveness: Liveness) -> Result<TcpTransport> {
        prepare_streams(me, &streams)?;
        let waker = Arc::new(Waker::new()?);
        let woken = waker.clone();
        liveness.subscribe(move || woken.wake());
        Ok(Self { me, peers: streams, liveness, waker, head: vec![0; HEAD] })
    }

    fn check(&self, peer: Rank, header: &Header, body: usize) -> Result<()> {
        let world = self.peers.len();
        let wrong = if peer == self.me {
            format!("a rank has no connection with itself (it is {peer})")
        } else if peer.0 >= world {
            format!("there is no {peer}: ranks go from 0 to {}", world - 1)
        } else if header.body != body as u64 {
            format!("the header says {} bytes of body, the buffer has {body}", header.body)
        } else {
            return Ok(());
        };
        Err(Error::config(format!("{} in {header}: {wrong}", self.me)))
    }

    /// Sends one frame, receives one frame, or does both at the same time.
    fn transfer(
        &mut self,
        send: Option<(Rank, &Header, &[&[u8]])>,
        recv: Option<(Rank, &Header, &mut [&mut [u8]])>,
        deadline: Deadline,
    ) -> Result<()> {
        self.liveness.check()?;
        let (mut outgoing, mut incoming) = (None, None);
        if let Some((to, header, body)) = send {
            self.check(to, header, body.iter().map(|part| part.len()).sum())?;
            outgoing = self.peers[to.0].as_ref().map(|stream| (to, Outgoing::new(stream, header, body)));
        }
        if let Some((from, expect, body)) = recv {
            self.check(from, expect, body.iter().map(|part| part.len()).sum())?;
            let head = &mut self.head[..];
            incoming =
                self.peers[from.0].as_ref().map(|stream| (from, Incoming::new(stream, expect, body, head)));
        }
        let (peers, liveness, waker) = (&self.peers[..], &self.liveness, &self.waker);
        let transfer = Transfer { me: self.me, peers, liveness, waker, outgoing, incoming };
        transfer.run(deadline).map_err(|error| {
            self.liveness.fail(error.clone());
            self.liveness.cause().unwrap_or(error)
        })
    }
}

impl Transport for TcpTransport {
    fn rank(&self) -> Rank {
        self.me
    }

    fn world_size(&self) -> usize {
        self.peers.len()
    }

    fn send(&mut self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()> {
        self.transfer(Some((to, header, body)), None, deadline)
    }

    fn recv(
        &mut self,
        from: Rank,
        expect: &Header,
        body: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()> {
        self.transfer(None, Some((from, expect, body)), deadline)
    }

    fn send_recv(
        &mut self,
        to: Rank,
        header: &Header,
        body: &[&[u8]],
        from: Rank,
        expect: &Header,
        into: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()> {
        self.transfer(Some((to, header, body)), Some((from, expect, into)), deadline)
    }
}

/// One call of the transport.
struct Transfer<'a, 'b> {
    me: Rank,
    peers: &'a [Option<TcpStream>],
    liveness: &'a Liveness,
    waker: &'a Waker,
    outgoing: Option<(Rank, Outgoing<'a>)>,
    incoming: Option<(Rank, Incoming<'a, 'b>)>,
}

impl Transfer<'_, '_> {
    fn run(mut self, deadline: Deadline) -> Result<()> {
        loop {
            let out = self.step_out()?;
            let into = self.step_in()?;
            if out == Progress::Done && into == Progress::Done {
                return Ok(());
            }
            if out == Progress::Moved || into == Progress::Moved {
                continue;
            }
            if deadline.passed() {
                return Err(self.timeout(deadline));
            }
            self.wait(out, into, deadline)?;
        }
    }

    fn step_out(&mut self) -> Result<Progress> {
        let Some((peer, frame)) = &mut self.outgoing else { return Ok(Progress::Done) };
        let (peer, header) = (*peer, frame.header);
        frame.step().map_err(|error| self.explain(peer, header, error))
    }

    fn step_in(&mut self) -> Result<Progress> {
        let Some((peer, frame)) = &mut self.incoming else { return Ok(Progress::Done) };
        let (peer, header) = (*peer, frame.expect);
        frame.step().map_err(|error| self.explain(peer, header, error))
    }

    fn wait(&self, out: Progress, into: Progress, deadline: Deadline) -> Result<()> {
        let mut fds = Vec::with_capacity(3);
        fds.push(PollFd::new(self.waker, PollFlags::IN));
        if let (Some((_, frame)), Progress::Blocked) = (&self.outgoing, out) {
            fds.push(PollFd::new(frame.stream, PollFlags::OUT));
        }
        if let (Some((_, frame)), Progress::Blocked) = (&self.incoming, into) {
            fds.push(PollFd::new(frame.stream, PollFlags::IN));
        }
        wait(&mut fds, deadline.remaining().min(CHECK_INTERVAL))?;
        if !fds[0].revents().is_empty() {
            return self.liveness.check();
        }
        if fds.iter().all(|fd| fd.revents().is_empty()) {
            return self.check_other_peers();
        }
        Ok(())
    }

    /// Fails if a peer that this transfer does not receive from has sent a frame of another operation.
    fn check_other_peers(&self) -> Result<()> {
        let expected = self.incoming.as_ref().map(|(_, frame)| *frame.expect);
        let own = expected.or_else(|| self.outgoing.as_ref().map(|(_, frame)| *frame.header));
        let Some(own) = own else { return Ok(()) };
        // The frame that is being received may be half read, so the next bytes of its connection may be no header.
        let current = self.incoming.as_ref().map(|(from, _)| *from);
        for (rank, stream) in self.peers.iter().enumerate() {
            let (peer, Some(stream)) = (Rank(rank), stream) else { continue };
            let mut bytes = [0; Header::SIZE];
            // The end of a connection, or an error, is found when this rank receives from that peer.
            if Some(peer) != current && stream.peek(&mut bytes).is_ok_and(|count| count == bytes.len()) {
                let got: Header = bytemuck::pod_read_unaligned(&bytes);
                if own.contradicts(&got) {
                    return Err(own.mismatch(self.me, peer, &got));
                }
            }
        }
        Ok(())
    }

    fn explain(&self, peer: Rank, header: &Header, error: FrameError) -> Error {
        match error {
            FrameError::Closed => self
                .liveness
                .closed_by(peer, Deadline::after(CLOSE_GRACE))
                .context(format_args!("{} in {header}", self.me)),
            FrameError::Unexpected(got) => header.mismatch(self.me, peer, &got),
            FrameError::Io(error) => {
                Error::io(format!("{} in {header}: the connection with {peer} fails", self.me), error)
            }
        }
    }

    fn timeout(&self, deadline: Deadline) -> Error {
        let mut header = None;
        let mut waits = Vec::new();
        if let Some((peer, frame)) = self.outgoing.as_ref().filter(|(_, frame)| frame.sent < frame.total()) {
            header = Some(frame.header);
            waits.push(format!("to send to {peer} ({} of {} bytes are sent)", frame.sent, frame.total()));
        }
        if let Some((peer, frame)) = self.incoming.as_ref().filter(|(_, frame)| frame.got < frame.total()) {
            header = Some(frame.expect);
            let progress = format!("{} of {} bytes have arrived", frame.got, frame.total());
            waits.push(format!("to receive from {peer} ({progress})"));
        }
        let operation = header.map(Header::to_string).unwrap_or_default();
        Error::new(
            ErrorKind::Timeout,
            format!(
                "{} in {operation}: waited {:?} {}; no peer is known to be dead, so a rank is slow or never calls \
                 this operation",
                self.me,
                deadline.limit(),
                waits.join(" and ")
            ),
        )
    }
}
