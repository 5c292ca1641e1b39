//! The ranks of a host find each other and get one mapping.
//!
//! ```text
//! every rank       bind a socket with a random name, send name and nonce to all peers over the wires they have
//! every rank       connect to the sockets of lower ranks, say their nonce  ─▶ connected = same host
//!                  (`topology.rs` decides which ranks are members)
//! first of a host  reserve the memory, accept, check the nonce, send file descriptor and nonce
//! the others       receive both, check the nonce, map the file
//! ```
//!
//! A process that can connect runs on the same kernel and in the same network namespace. The nonce, which only members
//! of the group know, tells them from strangers, whichever side a stranger is on. The sockets are closed afterwards:
//! the kernel closes the control connection of a process that dies, and that is how its peers learn of it.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, send, sendmsg, socket_with,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::address::{NONCE, ShmAddress};
use super::mapping::Mapping;
use super::region::RegionLayout;
use super::spin::MAX_SLEEP;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::net::poll::wait;
use crate::transport::Liveness;

/// Longest wait for the nonce of an accepted connection: members have sent it when they connected.
const NONCE_TIMEOUT: Duration = Duration::from_secs(1);

/// A socket from which the ranks of this host can get the memory.
pub(crate) struct ShmListener {
    socket: OwnedFd,
    address: ShmAddress,
}

/// A connection to the [`ShmListener`] of another rank.
pub(crate) struct ShmConnection {
    socket: OwnedFd,
    nonce: [u8; NONCE],
}

fn failed(what: &str) -> impl Fn(Errno) -> Error {
    move |error| Error::io(format!("shared memory: cannot {what}"), error)
}

fn socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

impl ShmListener {
    /// Listens on a socket with a random name, for up to `backlog` connections before the first is accepted.
    pub fn bind(backlog: usize) -> Result<Self> {
        let mut random = [0u8; 2 * NONCE];
        getrandom(&mut random, GetRandomFlags::empty()).map_err(failed("get random numbers"))?;
        let mut nonce = [0; NONCE];
        nonce.copy_from_slice(&random[..NONCE]);
        let name = random[NONCE..].iter().fold(String::from("burn-ddp-"), |mut name, byte| {
            name.push_str(&format!("{byte:02x}"));
            name
        });
        let open = || {
            let socket = socket()?;
            bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
            listen(&socket, i32::try_from(backlog).unwrap_or(i32::MAX).max(1))?;
            Ok(socket)
        };
        let socket = open().map_err(failed("open a Unix socket"))?;
        Ok(Self { socket, address: ShmAddress { name, nonce } })
    }

    /// The address that peers need to connect.
    pub fn address(&self) -> &ShmAddress {
        &self.address
    }

    /// Reserves the memory of `layout`, of which this rank is the first member, and sends it to all other members,
    /// which have connected before.
    ///
    /// # Errors
    /// `Io` where the host has no room, naming the bytes; `Timeout` if a member is missing at `deadline`.
    pub fn share(self, layout: &RegionLayout, liveness: &Liveness, deadline: Deadline) -> Result<Mapping> {
        let mapping = Mapping::reserve(layout.bytes())?;
        let mut missing = layout.members.len() - 1;
        while missing > 0 {
            wait_readable(&self.socket, layout, liveness, deadline)?;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let peer = match accept_with(&self.socket, flags) {
                Ok(peer) => peer,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => return Err(failed("accept a connection")(error)),
            };
            let credentials = rustix::net::sockopt::socket_peercred(&peer);
            if !credentials.is_ok_and(|peer| peer.uid == rustix::process::geteuid()) {
                continue;
            }
            missing -= usize::from(self.send_mapping(&peer, &mapping, deadline)?);
        }
        Ok(mapping)
    }

    /// Sends `mapping` to `peer` if it says the nonce; returns whether it did.
    fn send_mapping(&self, peer: &OwnedFd, mapping: &Mapping, deadline: Deadline) -> Result<bool> {
        let mut fds = [PollFd::new(peer, PollFlags::IN)];
        wait(&mut fds, deadline.remaining().min(NONCE_TIMEOUT))?;
        if fds[0].revents().is_empty() {
            return Ok(false);
        }
        let mut nonce = [0u8; NONCE];
        let mut none = RecvAncillaryBuffer::default();
        let received = recvmsg(peer, &mut [IoSliceMut::new(&mut nonce)], &mut none, RecvFlags::empty());
        if !received.is_ok_and(|received| received.bytes == NONCE) || nonce != self.address.nonce {
            return Ok(false);
        }
        let files = [mapping.file()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let body = [IoSlice::new(&self.address.nonce)];
        match sendmsg(peer, &body, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            Err(error) => Err(failed("hand out the memory")(error)),
        }
    }
}

impl ShmConnection {
    /// Connects to the listener at `address` and says its nonce.
    ///
    /// # Errors
    /// `Io` if the listener cannot be reached; shared memory then treats its rank as one of another host.
    pub fn connect(address: &ShmAddress) -> Result<Self> {
        let open = || {
            let socket = socket()?;
            connect(&socket, &SocketAddrUnix::new_abstract_name(address.name.as_bytes())?)?;
            send(&socket, &address.nonce, SendFlags::NOSIGNAL)?;
            Ok(socket)
        };
        let socket = open().map_err(failed("connect to a peer's Unix socket"))?;
        Ok(Self { socket, nonce: address.nonce })
    }

    /// Receives and maps the memory of `layout`.
    ///
    /// # Errors
    /// `Io` if the listener closes without sending it (the error of its rank says why), `Timeout` at `deadline`.
    pub fn receive(self, layout: &RegionLayout, liveness: &Liveness, deadline: Deadline) -> Result<Mapping> {
        wait_readable(&self.socket, layout, liveness, deadline)?;
        let mut nonce = [0u8; NONCE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut nonce)], &mut control, flags);
        let bytes = received.map_err(failed("receive the memory"))?.bytes;
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        match file {
            Some(file) if bytes == NONCE && nonce == self.nonce => Mapping::map(file, layout.bytes()),
            _ => {
                Err(Error::new(ErrorKind::Io, format!("shared memory: {} hands out none", layout.members[0])))
            }
        }
    }
}

/// Waits until `socket`, over which the members of `layout` meet, has something to read.
fn wait_readable(
    socket: &OwnedFd,
    layout: &RegionLayout,
    liveness: &Liveness,
    deadline: Deadline,
) -> Result<()> {
    loop {
        liveness.check()?;
        if deadline.passed() {
            let ranks: Vec<String> = layout.members.iter().map(ToString::to_string).collect();
            let text = format!(
                "shared memory: {} did not all come to it within {:?}",
                ranks.join(", "),
                deadline.limit()
            );
            return Err(Error::new(ErrorKind::Timeout, text));
        }
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        wait(&mut fds, deadline.remaining().min(MAX_SLEEP))?;
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::rank::Rank;
    use crate::shm::{ComputeHint, SharedRegion};

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    #[test]
    fn members_get_one_region_and_strangers_none() {
        let layout = RegionLayout { members: vec![Rank(1), Rank(4)], cores: 2 };
        let listener = ShmListener::bind(4).unwrap();
        let wrong = ShmAddress { nonce: [0; NONCE], ..listener.address().clone() };
        let stranger = ShmConnection::connect(&wrong).unwrap();
        let member = ShmConnection::connect(listener.address()).unwrap();
        let liveness = Liveness::new(5);
        let region = |me, mapping| {
            SharedRegion::new(layout.clone(), me, mapping, liveness.clone(), ComputeHint::default())
        };
        let mut first = region(0, listener.share(&layout, &liveness, soon()).unwrap());
        let mut second = region(1, member.receive(&layout, &liveness, soon()).unwrap());
        let mut access = first.wait_for_step(&"test", soon()).unwrap();
        access.own_slot()[..5].copy_from_slice(b"hello");
        access.publish();
        second.wait_for_step(&"test", soon()).unwrap().publish();
        let mut access = second.wait_for_step(&"test", soon()).unwrap();
        assert_eq!(&access.slots().0.of(0)[..5], b"hello");
        let refused = stranger.receive(&layout, &liveness, soon()).err().unwrap();
        assert!(refused.to_string().contains("rank 1 hands out none"), "{refused}");
    }

    #[test]
    fn a_listener_that_is_closed_cannot_be_reached() {
        let address = ShmListener::bind(1).unwrap().address().clone();
        assert_eq!(ShmConnection::connect(&address).err().unwrap().kind(), ErrorKind::Io);
    }
}
