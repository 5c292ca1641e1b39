//! How the ranks of a host come to one board.
//!
//! Every rank opens a [`Door`], a socket with a random name, and tells all others of it over the wire they already have.
//! Whoever can knock at it is on the same host. The rank at the door hands out the memory, once the visitor has said the
//! nonce that only members of the group know, and says it back: a name alone could be a stranger's.
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
use serde::{Deserialize, Serialize};

use super::memory::SharedMemory;
use super::{Board, BoardPlan, CallerBusy, NAP};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::net::poll::wait;
use crate::transport::Liveness;

const NONCE: usize = 16;

/// What a rank tells its peers of its [`Door`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    name: String,
    nonce: [u8; NONCE],
}

/// A socket at which the ranks of this host can ask for the memory.
pub(crate) struct Door {
    socket: OwnedFd,
    offer: Offer,
}

/// A connection to another rank's [`Door`].
pub(crate) struct Visit {
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

impl Door {
    /// Opens a door for up to `visitors` at once.
    pub fn open(visitors: usize) -> Result<Self> {
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
            listen(&socket, i32::try_from(visitors).unwrap_or(i32::MAX).max(1))?;
            Ok(socket)
        };
        let socket = open().map_err(failed("open a Unix socket"))?;
        Ok(Self { socket, offer: Offer { name, nonce } })
    }

    /// What peers need to find it.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Reserves the memory of `plan`, of whose members this rank is the first, and hands it to all others, who have
    /// knocked before.
    ///
    /// # Errors
    /// `Io` where the host has no room, naming the bytes; `Timeout` for a visitor that does not ask by `deadline`.
    pub fn host(
        self,
        plan: BoardPlan,
        liveness: Liveness,
        caller: CallerBusy,
        deadline: Deadline,
    ) -> Result<Board> {
        let memory = SharedMemory::reserve(plan.bytes())?;
        let mut missing = plan.members.len() - 1;
        while missing > 0 {
            ready(&self.socket, &plan, &liveness, deadline)?;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let visitor = match accept_with(&self.socket, flags) {
                Ok(visitor) => visitor,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => return Err(failed("accept a visitor")(error)),
            };
            let known = rustix::net::sockopt::socket_peercred(&visitor);
            if !known.is_ok_and(|peer| peer.uid == rustix::process::geteuid()) {
                continue;
            }
            missing -= usize::from(self.hand_out(&visitor, &memory, deadline)?);
        }
        Ok(Board::new(plan, 0, memory, liveness, caller))
    }

    /// Whether the visitor was one of the group.
    fn hand_out(&self, visitor: &OwnedFd, memory: &SharedMemory, deadline: Deadline) -> Result<bool> {
        // A member has said the nonce as it knocked; nobody else is waited for.
        let limit = deadline.remaining().min(Duration::from_secs(1));
        let mut fds = [PollFd::new(visitor, PollFlags::IN)];
        wait(&mut fds, limit)?;
        if fds[0].revents().is_empty() {
            return Ok(false);
        }
        let mut said = [0u8; NONCE];
        let mut none = RecvAncillaryBuffer::default();
        let heard = recvmsg(visitor, &mut [IoSliceMut::new(&mut said)], &mut none, RecvFlags::empty());
        if !heard.is_ok_and(|heard| heard.bytes == NONCE) || said != self.offer.nonce {
            return Ok(false);
        }
        let files = [memory.file()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let words = [IoSlice::new(&self.offer.nonce)];
        match sendmsg(visitor, &words, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            Err(error) => Err(failed("hand out the memory")(error)),
        }
    }
}

/// Connects to the door of `offer` and says its nonce.
///
/// # Errors
/// Whatever keeps this process from it; then its rank is on another host, as far as shared memory goes.
pub(crate) fn knock(offer: &Offer) -> Result<Visit> {
    let call = || {
        let socket = socket()?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(offer.name.as_bytes())?)?;
        send(&socket, &offer.nonce, SendFlags::NOSIGNAL)?;
        Ok(socket)
    };
    let socket = call().map_err(failed("connect to a peer's Unix socket"))?;
    Ok(Visit { socket, nonce: offer.nonce })
}

impl Visit {
    /// Takes the memory of `plan`, of which this rank is the member at `me`.
    ///
    /// # Errors
    /// `Io` when the door closes without it (the message of its rank says why), `Timeout` at `deadline`.
    pub fn join(
        self,
        plan: BoardPlan,
        me: usize,
        liveness: Liveness,
        caller: CallerBusy,
        deadline: Deadline,
    ) -> Result<Board> {
        ready(&self.socket, &plan, &liveness, deadline)?;
        let mut said = [0u8; NONCE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let heard = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut said)], &mut control, flags);
        let bytes = heard.map_err(failed("receive the memory"))?.bytes;
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        match file {
            Some(file) if bytes == NONCE && said == self.nonce => {
                let memory = SharedMemory::map(file, plan.bytes())?;
                Ok(Board::new(plan, me, memory, liveness, caller))
            }
            _ => Err(Error::new(ErrorKind::Io, format!("shared memory: {} hands out none", plan.members[0]))),
        }
    }
}

/// Waits until `socket`, which belongs to the board of `plan`, has something to read.
fn ready(socket: &OwnedFd, plan: &BoardPlan, liveness: &Liveness, deadline: Deadline) -> Result<()> {
    loop {
        liveness.check()?;
        if deadline.passed() {
            let ranks: Vec<String> = plan.members.iter().map(ToString::to_string).collect();
            let text = format!(
                "shared memory: {} did not all come to it within {:?}",
                ranks.join(", "),
                deadline.limit()
            );
            return Err(Error::new(ErrorKind::Timeout, text));
        }
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        wait(&mut fds, deadline.remaining().min(NAP))?;
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::rank::Rank;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    #[test]
    fn members_get_one_board_and_strangers_none() {
        let plan = BoardPlan { members: vec![Rank(1), Rank(4)], cores: 2 };
        let door = Door::open(4).unwrap();
        let wrong = Offer { nonce: [0; NONCE], ..door.offer().clone() };
        let (stranger, member) = (knock(&wrong).unwrap(), knock(door.offer()).unwrap());
        let liveness = Liveness::new(5);
        let mut first = door.host(plan.clone(), liveness.clone(), CallerBusy::default(), soon()).unwrap();
        let mut second =
            member.join(plan.clone(), 1, liveness.clone(), CallerBusy::default(), soon()).unwrap();
        let mut turn = first.turn(&"test", soon()).unwrap();
        turn.mine()[..5].copy_from_slice(b"hello");
        turn.publish();
        second.turn(&"test", soon()).unwrap().publish();
        let mut turn = second.turn(&"test", soon()).unwrap();
        assert_eq!(&turn.places().0.of(0)[..5], b"hello");
        let refused = stranger.join(plan, 1, liveness, CallerBusy::default(), soon()).err().unwrap();
        assert!(refused.to_string().contains("rank 1 hands out none"), "{refused}");
    }

    #[test]
    fn a_door_that_is_gone_is_nobodys() {
        let offer = Door::open(1).unwrap().offer().clone();
        assert_eq!(knock(&offer).err().unwrap().kind(), ErrorKind::Io);
    }
}
