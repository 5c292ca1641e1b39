//! From a list of addresses to a connection with everyone.
//!
//! A rank calls all lower ranks and is called by all higher ones, two connections for each pair: one for
//! frames and one for control, because a heartbeat must not queue behind a gigabyte of gradients. All of it is
//! one loop over non-blocking sockets, so that no connection (a silent stranger's, a slow peer's) can delay
//! another.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use super::call::{Call, Caller, Outcome};
use super::hello::{LONGEST_GROUP, Purpose, acknowledgement, hello};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::transport::PeerInfo;
use crate::transport::poll::wait;

/// Callers more than all members together that may keep silent. Members introduce themselves at once, so the
/// one that has been silent longest gives way.
const STRANGERS: usize = 64;

/// The connections of one rank by the rank at the other end; none with itself.
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

/// Where this rank will be called. It exists before the addresses are exchanged, so that no call comes too
/// early.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens on a free port of `address`.
    pub fn bind(address: IpAddr) -> Result<Listener> {
        let listener = TcpListener::bind((address, 0)).map_err(|error| {
            Error::io(format!("cannot listen on {address} (is it an address of this host?)"), error)
        })?;
        Ok(Self(listener))
    }

    /// The address that peers call.
    pub fn address(&self) -> Result<SocketAddr> {
        self.0.local_addr().map_err(|error| Error::io("cannot read the address of a listening socket", error))
    }

    /// Connects `me` with all `peers`, which are listed by rank and include `me`. All members must give the
    /// same `group`; whoever gives another one is a stranger and is ignored.
    ///
    /// # Errors
    /// `Timeout` naming the peers that are missing, `PeerLost` for a peer that nobody answers for, `Config`
    /// when the list is not in the order of ranks.
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
        let nobody = || peers.iter().map(|_| None).collect::<Vec<_>>();
        let mesh = Mesh { data: nobody(), control: nobody() };
        if peers.len() == 1 {
            return Ok(mesh);
        }
        self.0
            .set_nonblocking(true)
            .map_err(|error| Error::io("connect: cannot make the listening socket non-blocking", error))?;
        Meeting { me, group, peers, listener: self.0, mesh, callers: VecDeque::new(), calls: Vec::new() }
            .run(deadline)
    }
}

struct Meeting<'a> {
    me: Rank,
    group: &'a str,
    peers: &'a [PeerInfo],
    listener: TcpListener,
    mesh: Mesh,
    callers: VecDeque<Caller>,
    calls: Vec<Call>,
}

impl Meeting<'_> {
    fn run(mut self, deadline: Deadline) -> Result<Mesh> {
        for peer in &self.peers[..self.me.0] {
            for purpose in Purpose::ALL {
                self.calls.push(self.call(peer, purpose)?);
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
            let (somebody_calls, callers, calls) = self.wait(deadline)?;
            self.answer_callers(&callers)?;
            self.advance_calls(&calls)?;
            if somebody_calls {
                self.accept()?;
            }
        }
    }

    /// Which connections have something to do: the listener, the callers, the calls.
    fn wait(&self, deadline: Deadline) -> Result<(bool, Vec<bool>, Vec<bool>)> {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.callers.iter().map(|caller| PollFd::new(&caller.stream, PollFlags::IN)));
        fds.extend(self.calls.iter().map(|call| {
            let next = if call.hello.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            PollFd::new(&call.stream, next)
        }));
        wait(&mut fds, deadline.remaining())?;
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let listener = ready.next().unwrap_or(false);
        let callers = ready.by_ref().take(self.callers.len()).collect();
        Ok((listener, callers, ready.collect()))
    }

    fn call(&self, peer: &PeerInfo, purpose: Purpose) -> Result<Call> {
        let open = || {
            let domain = Domain::for_address(peer.address);
            let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
            socket.set_nonblocking(true)?;
            socket.set_tcp_nodelay(true)?;
            match socket.connect(&peer.address.into()) {
                Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
                _ => Ok(socket.into()),
            }
        };
        let stream = open().map_err(|error| self.unreachable(peer.rank, error))?;
        let hello = hello(self.group, self.me, purpose);
        Ok(Call { peer: peer.rank, purpose, stream, hello, answer: Vec::new() })
    }

    fn accept(&mut self) -> Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // A stranger that has already hung up refuses these options: no reason to stop.
                    if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
                        continue;
                    }
                    let mut caller = Caller { stream, said: Vec::new() };
                    let outcome = caller.listen(self.group);
                    self.settle(caller, outcome)?;
                    if self.callers.len() > STRANGERS + 2 * self.peers.len() {
                        self.callers.pop_front();
                    }
                }
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(()),
                Err(error) if passing(error.kind()) => {}
                Err(error) => {
                    return Err(Error::io("connect: cannot accept the connection of a peer", error));
                }
            }
        }
    }

    fn answer_callers(&mut self, ready: &[bool]) -> Result<()> {
        for (mut caller, ready) in std::mem::take(&mut self.callers).into_iter().zip(ready) {
            let outcome = if *ready { caller.listen(self.group) } else { Outcome::Waits };
            self.settle(caller, outcome)?;
        }
        Ok(())
    }

    fn settle(&mut self, caller: Caller, outcome: Outcome) -> Result<()> {
        match outcome {
            Outcome::Waits => self.callers.push_back(caller),
            Outcome::Stays(peer, purpose) if peer > self.me && peer.0 < self.peers.len() => {
                let slot = self.mesh.slot(peer, purpose);
                // A second caller of the same name does not take the place of the first.
                if slot.is_none() && (&caller.stream).write_all(&acknowledgement(self.me)).is_ok() {
                    *slot = Some(caller.stream);
                }
            }
            Outcome::Stays(..) | Outcome::Closes => {}
        }
        Ok(())
    }

    fn advance_calls(&mut self, ready: &[bool]) -> Result<()> {
        for (mut call, ready) in std::mem::take(&mut self.calls).into_iter().zip(ready) {
            let outcome = if *ready { call.advance() } else { Ok(Outcome::Waits) };
            match outcome.map_err(|error| self.unreachable(call.peer, error))? {
                Outcome::Waits => self.calls.push(call),
                Outcome::Stays(peer, purpose) => *self.mesh.slot(peer, purpose) = Some(call.stream),
                Outcome::Closes => {
                    let hung_up = std::io::Error::other(
                        "it hung up without a greeting: its process has ended, or the address belongs to \
                         another group or version",
                    );
                    return Err(self.unreachable(call.peer, hung_up));
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
                "connect: {} of group {:?} has no connection with {} after {:?}; see whether they still run \
                 and whether a firewall is between the hosts",
                self.me,
                self.group,
                names.join(", "),
                deadline.limit()
            ),
        )
    }
}

/// Errors of `accept` that concern only the connection that was about to be accepted.
fn passing(kind: IoErrorKind) -> bool {
    matches!(kind, IoErrorKind::Interrupted | IoErrorKind::ConnectionAborted | IoErrorKind::ConnectionReset)
}
