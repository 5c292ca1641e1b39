//! Connecting a rank with all others, whose addresses it knows.
//!
//! A rank opens the connections with all lower ranks and accepts those of all higher ones. Each pair has two, one for
//! frames and one for control, because a heartbeat must not queue behind a gigabyte of gradients.
//!
//! ```text
//!   higher rank                                       lower rank
//!   connect ────────────────────────────────────────> accept
//!   hello: group, rank, purpose ────────────────────> of another group, or no hello: close
//!   close, or another rank: PeerLost <──── close      of a member: keep the connection
//!   keep the connection <──────── acknowledgement: rank
//! ```
//!
//! One loop advances all handshakes over sockets that do not block, so no connection delays another, be it one of a
//! program that is no member or of a slow peer.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use super::handshake::{HandshakeState, IncomingHandshake, OutgoingHandshake};
use super::hello::{LONGEST_GROUP, Purpose, acknowledgement, hello};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::net::poll::wait;
use crate::rank::Rank;
use crate::rendezvous::PeerInfo;

/// Accepted connections without a hello that are kept, besides those of all members. Members send their hello at once,
/// so the connection that has been silent longest is closed first.
const SILENT_CONNECTIONS: usize = 64;

/// Connections of one rank with all others, by the rank at the other end.
#[derive(Debug)]
pub struct Mesh {
    /// For frames.
    pub data: Vec<Option<TcpStream>>,
    /// For heartbeats, aborts and goodbyes.
    pub control: Vec<Option<TcpStream>>,
}

impl Mesh {
    fn slot(&mut self, peer: Rank, purpose: Purpose) -> &mut Option<TcpStream> {
        match purpose {
            Purpose::Data => &mut self.data[peer.0],
            Purpose::Control => &mut self.control[peer.0],
        }
    }

    fn missing(&self, me: Rank) -> Vec<Rank> {
        let lacks = |rank: &usize| self.data[*rank].is_none() || self.control[*rank].is_none();
        (0..self.data.len()).filter(|rank| *rank != me.0).filter(lacks).map(Rank).collect()
    }
}

/// The listening socket of this rank. It exists before ranks exchange their addresses, so that no connection comes too
/// early.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens on a free port of `address`.
    ///
    /// # Errors
    /// `Io` when `address` is not one of this host.
    pub fn bind(address: IpAddr) -> Result<Listener> {
        let listener = TcpListener::bind((address, 0)).map_err(|error| {
            Error::io(format!("cannot listen on {address} (is it an address of this host?)"), error)
        })?;
        Ok(Self(listener))
    }

    /// The address to which peers connect.
    ///
    /// # Errors
    /// `Io` when the system does not tell it.
    pub fn address(&self) -> Result<SocketAddr> {
        self.0.local_addr().map_err(|error| Error::io("cannot read the address of a listening socket", error))
    }

    /// Connects `me` with all `peers`, which are listed by rank and include `me`. All members must pass the same
    /// `group`; connections of other groups are closed.
    ///
    /// # Errors
    /// `Timeout` naming the peers that are missing, `PeerLost` for a peer whose address refuses the connection,
    /// `Config` when the list is not in rank order.
    pub fn connect(self, me: Rank, group: &str, peers: &[PeerInfo], deadline: Deadline) -> Result<Mesh> {
        if let Some((index, peer)) = peers.iter().enumerate().find(|(index, peer)| peer.rank.0 != *index) {
            return Err(Error::config(format!(
                "connect: entry {index} of the list of peers is {}; list each rank once, in order",
                peer.rank
            )));
        }
        if me.0 >= peers.len() {
            return Err(Error::config(format!("connect: {me} is not one of the {} peers", peers.len())));
        }
        if group.len() > LONGEST_GROUP {
            return Err(Error::config(format!(
                "connect: the name of the group has {} bytes; use at most {LONGEST_GROUP} (a shorter \
                 TORCHELASTIC_RUN_ID, or fewer splits within splits)",
                group.len()
            )));
        }
        let none = || peers.iter().map(|_| None).collect::<Vec<_>>();
        let mesh = Mesh { data: none(), control: none() };
        if peers.len() == 1 {
            return Ok(mesh);
        }
        self.0
            .set_nonblocking(true)
            .map_err(|error| Error::io("connect: cannot make the listening socket non-blocking", error))?;
        let (incoming, outgoing) = (VecDeque::new(), Vec::new());
        MeshBuilder { me, group, peers, listener: self.0, mesh, incoming, outgoing }.run(deadline)
    }
}

struct MeshBuilder<'a> {
    me: Rank,
    group: &'a str,
    peers: &'a [PeerInfo],
    listener: TcpListener,
    mesh: Mesh,
    /// In the order in which they were accepted.
    incoming: VecDeque<IncomingHandshake>,
    outgoing: Vec<OutgoingHandshake>,
}

impl MeshBuilder<'_> {
    fn run(mut self, deadline: Deadline) -> Result<Mesh> {
        for peer in &self.peers[..self.me.0] {
            for purpose in Purpose::ALL {
                self.outgoing.push(self.open(peer, purpose)?);
            }
        }
        loop {
            let missing = self.mesh.missing(self.me);
            if missing.is_empty() {
                return Ok(self.mesh);
            }
            if deadline.passed() {
                return Err(self.timeout(&missing, deadline));
            }
            let (listener, incoming, outgoing) = self.wait(deadline)?;
            self.advance_incoming(&incoming);
            self.advance_outgoing(&outgoing)?;
            if listener {
                self.accept()?;
            }
        }
    }

    /// Waits until a handshake can advance; returns which of the listener, `incoming` and `outgoing` are ready.
    fn wait(&self, deadline: Deadline) -> Result<(bool, Vec<bool>, Vec<bool>)> {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.incoming.iter().map(|handshake| PollFd::new(&handshake.stream, PollFlags::IN)));
        fds.extend(self.outgoing.iter().map(|handshake| {
            let next = if handshake.unsent.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            PollFd::new(&handshake.stream, next)
        }));
        wait(&mut fds, deadline.remaining())?;
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let listener = ready.next().unwrap_or(false);
        let incoming = ready.by_ref().take(self.incoming.len()).collect();
        Ok((listener, incoming, ready.collect()))
    }

    fn open(&self, peer: &PeerInfo, purpose: Purpose) -> Result<OutgoingHandshake> {
        let connect = || {
            let domain = Domain::for_address(peer.address);
            let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
            socket.set_nonblocking(true)?;
            socket.set_tcp_nodelay(true)?;
            match socket.connect(&peer.address.into()) {
                Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
                _ => Ok(socket.into()),
            }
        };
        let stream = connect().map_err(|error| self.unreachable(peer.rank, error))?;
        let unsent = hello(self.group, self.me, purpose);
        Ok(OutgoingHandshake { peer: peer.rank, purpose, stream, unsent, received: Vec::new() })
    }

    fn accept(&mut self) -> Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // Fails when the other end has closed the connection already.
                    if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
                        continue;
                    }
                    self.advance_or_keep(IncomingHandshake::new(stream));
                    if self.incoming.len() > SILENT_CONNECTIONS + 2 * self.peers.len() {
                        self.incoming.pop_front();
                    }
                }
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(()),
                Err(error) if concerns_one_connection(error.kind()) => {}
                Err(error) => {
                    return Err(Error::io("connect: cannot accept the connection of a peer", error));
                }
            }
        }
    }

    fn advance_incoming(&mut self, ready: &[bool]) {
        for (handshake, ready) in std::mem::take(&mut self.incoming).into_iter().zip(ready) {
            match ready {
                true => self.advance_or_keep(handshake),
                false => self.incoming.push_back(handshake),
            }
        }
    }

    /// Advances `handshake`; keeps it if it is pending, and its connection if it is one of a member.
    fn advance_or_keep(&mut self, mut handshake: IncomingHandshake) {
        match handshake.advance(self.group) {
            HandshakeState::Pending => self.incoming.push_back(handshake),
            HandshakeState::Complete(peer, purpose) if peer > self.me && peer.0 < self.peers.len() => {
                let slot = self.mesh.slot(peer, purpose);
                // A second connection of the same rank does not replace the first.
                if slot.is_none() && (&handshake.stream).write_all(&acknowledgement(self.me)).is_ok() {
                    *slot = Some(handshake.stream);
                }
            }
            HandshakeState::Complete(..) | HandshakeState::Failed => {}
        }
    }

    fn advance_outgoing(&mut self, ready: &[bool]) -> Result<()> {
        for (mut handshake, ready) in std::mem::take(&mut self.outgoing).into_iter().zip(ready) {
            let state = if *ready { handshake.advance() } else { Ok(HandshakeState::Pending) };
            match state.map_err(|error| self.unreachable(handshake.peer, error))? {
                HandshakeState::Pending => self.outgoing.push(handshake),
                HandshakeState::Complete(peer, purpose) => {
                    *self.mesh.slot(peer, purpose) = Some(handshake.stream);
                }
                HandshakeState::Failed => {
                    let closed = std::io::Error::other(
                        "it closed the connection without an acknowledgement: its process has ended, or the address \
                         belongs to another group or version",
                    );
                    return Err(self.unreachable(handshake.peer, closed));
                }
            }
        }
        Ok(())
    }

    fn unreachable(&self, peer: Rank, error: std::io::Error) -> Error {
        let PeerInfo { host, pid, address, .. } = &self.peers[peer.0];
        Error::with_source(
            ErrorKind::PeerLost(peer),
            format!("connect: {} cannot reach {peer} at {address} (process {pid} on {host})", self.me),
            error,
        )
    }

    fn timeout(&self, missing: &[Rank], deadline: Deadline) -> Error {
        let names: Vec<String> = missing
            .iter()
            .map(|rank| {
                let peer = &self.peers[rank.0];
                format!("{rank} ({}, process {} on {})", peer.address, peer.pid, peer.host)
            })
            .collect();
        Error::new(
            ErrorKind::Timeout,
            format!(
                "connect: {} of group {:?} has no connection with {} after {:?}; check that they still run and that no \
                 firewall is between the hosts",
                self.me,
                self.group,
                names.join(", "),
                deadline.limit()
            ),
        )
    }
}

/// True if an error of `accept` concerns only the connection that was about to be accepted.
fn concerns_one_connection(kind: IoErrorKind) -> bool {
    matches!(kind, IoErrorKind::Interrupted | IoErrorKind::ConnectionAborted | IoErrorKind::ConnectionReset)
}
