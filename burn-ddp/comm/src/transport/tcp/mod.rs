//! Frames over TCP: one connection for each peer, no thread, no buffer of its own.
//!
//! The sockets do not block. Each call tries to move its frame first and waits only when the kernel has no
//! room or no data, in one `poll` over both directions and the wake of [`Liveness`]. Sending and receiving in
//! the same loop is what makes a ring of ranks that all send first run at any size, and the wake is what ends
//! a wait within a moment of the group being given up.

mod call;
mod connect;
mod hello;
mod stream;
#[cfg(test)]
pub(crate) mod tests;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

pub use connect::{Listener, Mesh};
use stream::{FRONT, Fault, Incoming, Outgoing, Step};

use super::poll::{Wake, wait};
use super::{Header, Liveness, Transport};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;

/// How long a closed connection waits for the control channel to say why it was closed.
const EXPLANATION: Duration = Duration::from_secs(1);

/// How long a wait lasts before it looks at the frames of ranks that are not its turn. Ranks in different operations may
/// wait for each other in a ring in which no two have met; the frames that they have sent tell.
const LOOK_AROUND: Duration = Duration::from_secs(1);

/// A [`Transport`] over TCP connections.
///
/// The first error ends it: a frame may be half through, so every later call returns the same cause, and the
/// group's [`Liveness`] holds it too. Only a wrong argument ([`ErrorKind::Config`]) moves nothing and changes
/// nothing.
pub struct TcpTransport {
    me: Rank,
    peers: Vec<Option<TcpStream>>,
    liveness: Liveness,
    wake: Arc<Wake>,
    front: Vec<u8>,
}

/// Refuses connections that are not one for each rank other than `me`.
pub(crate) fn check_streams(me: Rank, streams: &[Option<TcpStream>]) -> Result<()> {
    match streams.iter().enumerate().find(|(rank, stream)| stream.is_none() != (*rank == me.0)) {
        Some((rank, Some(_))) => Err(Error::config(format!("{me} has a connection with itself, {rank}"))),
        Some((rank, None)) => Err(Error::config(format!("{me} has no connection with rank {rank}"))),
        None if me.0 >= streams.len() => {
            Err(Error::config(format!("{me} is outside of the {} connections it was given", streams.len())))
        }
        None => Ok(()),
    }
}

impl TcpTransport {
    /// Frames of `me` over the connections `streams`, which are indexed by rank with none at `me`
    /// ([`Mesh::data`]).
    pub fn new(me: Rank, streams: Vec<Option<TcpStream>>, liveness: Liveness) -> Result<TcpTransport> {
        check_streams(me, &streams)?;
        for stream in streams.iter().flatten() {
            stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true))
                .map_err(|error| Error::io("cannot set the options of a connection", error))?;
        }
        let wake = Arc::new(Wake::new()?);
        let bell = wake.clone();
        liveness.subscribe(move || bell.raise());
        Ok(Self { me, peers: streams, liveness, wake, front: vec![0; FRONT] })
    }

    fn check(&self, peer: Rank, header: &Header, body: usize) -> Result<()> {
        let world = self.peers.len();
        let wrong = if peer == self.me {
            format!("a rank has no wire to itself (it is {peer})")
        } else if peer.0 >= world {
            format!("there is no {peer}: ranks go from 0 to {}", world - 1)
        } else if header.body != body as u64 {
            format!("the header says {} bytes of body, the buffer has {body}", header.body)
        } else {
            return Ok(());
        };
        Err(Error::config(format!("{} in {header}: {wrong}", self.me)))
    }

    fn exchange(
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
            let front = &mut self.front[..];
            incoming =
                self.peers[from.0].as_ref().map(|stream| (from, Incoming::new(stream, expect, body, front)));
        }
        let (peers, liveness, wake) = (&self.peers[..], &self.liveness, &self.wake);
        let drive = Drive { me: self.me, peers, liveness, wake, outgoing, incoming };
        drive.run(deadline).map_err(|error| {
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
        self.exchange(Some((to, header, body)), None, deadline)
    }

    fn recv(
        &mut self,
        from: Rank,
        expect: &Header,
        body: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()> {
        self.exchange(None, Some((from, expect, body)), deadline)
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
        self.exchange(Some((to, header, body)), Some((from, expect, into)), deadline)
    }
}

/// One call of the transport while it lasts.
struct Drive<'a, 'b> {
    me: Rank,
    peers: &'a [Option<TcpStream>],
    liveness: &'a Liveness,
    wake: &'a Wake,
    outgoing: Option<(Rank, Outgoing<'a>)>,
    incoming: Option<(Rank, Incoming<'a, 'b>)>,
}

impl Drive<'_, '_> {
    fn run(mut self, deadline: Deadline) -> Result<()> {
        loop {
            let out = self.step_out()?;
            let into = self.step_in()?;
            if out == Step::Done && into == Step::Done {
                return Ok(());
            }
            if out == Step::Moved || into == Step::Moved {
                continue;
            }
            if deadline.passed() {
                return Err(self.timeout(deadline));
            }
            self.wait(out, into, deadline)?;
        }
    }

    fn step_out(&mut self) -> Result<Step> {
        let Some((peer, frame)) = &mut self.outgoing else { return Ok(Step::Done) };
        let (peer, header) = (*peer, frame.header);
        frame.step().map_err(|fault| self.explain(peer, header, fault))
    }

    fn step_in(&mut self) -> Result<Step> {
        let Some((peer, frame)) = &mut self.incoming else { return Ok(Step::Done) };
        let (peer, header) = (*peer, frame.expect);
        frame.step().map_err(|fault| self.explain(peer, header, fault))
    }

    fn wait(&self, out: Step, into: Step, deadline: Deadline) -> Result<()> {
        let mut fds = Vec::with_capacity(3);
        fds.push(PollFd::new(self.wake, PollFlags::IN));
        if let (Some((_, frame)), Step::Blocked) = (&self.outgoing, out) {
            fds.push(PollFd::new(frame.stream, PollFlags::OUT));
        }
        if let (Some((_, frame)), Step::Blocked) = (&self.incoming, into) {
            fds.push(PollFd::new(frame.stream, PollFlags::IN));
        }
        wait(&mut fds, deadline.remaining().min(LOOK_AROUND))?;
        if !fds[0].revents().is_empty() {
            return self.liveness.check();
        }
        if fds.iter().all(|fd| fd.revents().is_empty()) {
            return self.look_around();
        }
        Ok(())
    }

    /// Looks whether a rank whose turn it is not has sent a frame of another operation.
    fn look_around(&self) -> Result<()> {
        let expected = self.incoming.as_ref().map(|(_, frame)| *frame.expect);
        let own = expected.or_else(|| self.outgoing.as_ref().map(|(_, frame)| *frame.header));
        let Some(own) = own else { return Ok(()) };
        // The frame that is being received may be half through: what stands first there need not be a header.
        let current = self.incoming.as_ref().map(|(from, _)| *from);
        for (rank, stream) in self.peers.iter().enumerate() {
            let (peer, Some(stream)) = (Rank(rank), stream) else { continue };
            let mut bytes = [0; Header::SIZE];
            // Whatever else stands there, an end or an error, is met when it is that rank's turn.
            if Some(peer) != current && stream.peek(&mut bytes).is_ok_and(|count| count == bytes.len()) {
                let got: Header = bytemuck::pod_read_unaligned(&bytes);
                if own.contradicts(&got) {
                    return Err(own.mismatch(self.me, peer, &got));
                }
            }
        }
        Ok(())
    }

    fn explain(&self, peer: Rank, header: &Header, fault: Fault) -> Error {
        match fault {
            Fault::Closed => self
                .liveness
                .closed_by(peer, Deadline::after(EXPLANATION))
                .context(format_args!("{} in {header}", self.me)),
            Fault::Unexpected(got) => header.mismatch(self.me, peer, &got),
            Fault::Io(error) => {
                Error::io(format!("{} in {header}: the connection with {peer} fails", self.me), error)
            }
        }
    }

    fn timeout(&self, deadline: Deadline) -> Error {
        let mut header = None;
        let mut waits = Vec::new();
        if let Some((peer, frame)) = self.outgoing.as_ref().filter(|(_, frame)| frame.sent < frame.total()) {
            header = Some(frame.header);
            waits.push(format!("to send to {peer} ({} of {} bytes are gone)", frame.sent, frame.total()));
        }
        if let Some((peer, frame)) = self.incoming.as_ref().filter(|(_, frame)| frame.got < frame.total()) {
            header = Some(frame.expect);
            let progress = format!("{} of {} bytes are here", frame.got, frame.total());
            waits.push(format!("to receive from {peer} ({progress})"));
        }
        let operation = header.map(Header::to_string).unwrap_or_default();
        Error::new(
            ErrorKind::Timeout,
            format!(
                "{} in {operation}: waited {:?} {}; nobody is known to be dead, so a rank is slow or never \
                 calls this operation",
                self.me,
                deadline.limit(),
                waits.join(" and ")
            ),
        )
    }
}
