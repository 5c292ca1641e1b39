//! One frame on its way out of, or into, a non-blocking socket.
//!
//! A step is one system call. It says whether another one could move something at once, so that the caller can
//! take turns between the two directions and waits only when neither moves.

use std::io::{self, IoSlice, Read};
use std::net::TcpStream;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::transport::Header;

/// A peer that is gone must be an error here, not a signal that ends the process. Apple's sockets have an
/// option for this, which the standard library sets.
#[cfg(not(target_vendor = "apple"))]
const FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
const FLAGS: SendFlags = SendFlags::empty();

/// Bytes read together with a header. A small frame arrives in one system call, and yet nothing reaches the
/// receiver's buffer before the header has been compared.
pub(super) const FRONT: usize = 4096;

/// What a step has achieved.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The frame is through.
    Done,
    /// Something moved, more may move at once.
    Moved,
    /// The socket has to be waited for.
    Blocked,
}

/// Why a frame cannot go on.
pub(super) enum Fault {
    /// The peer's end of the connection is gone.
    Closed,
    /// Another frame than the expected one is there.
    Unexpected(Header),
    /// The socket fails.
    Io(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, TimedOut};
        match error.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | TimedOut => Fault::Closed,
            _ => Fault::Io(error),
        }
    }
}

/// A frame to send.
pub(super) struct Outgoing<'a> {
    pub stream: &'a TcpStream,
    pub header: &'a Header,
    pub body: &'a [u8],
    pub sent: usize,
}

impl Outgoing<'_> {
    pub fn total(&self) -> usize {
        Header::SIZE + self.body.len()
    }

    pub fn step(&mut self) -> Result<Step, Fault> {
        if self.sent == self.total() {
            return Ok(Step::Done);
        }
        let header = &bytemuck::bytes_of(self.header)[self.sent.min(Header::SIZE)..];
        let body = &self.body[self.sent.saturating_sub(Header::SIZE)..];
        let parts = [IoSlice::new(header), IoSlice::new(body)];
        let sent = match sendmsg(self.stream, &parts, &mut SendAncillaryBuffer::default(), FLAGS) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Step::Blocked),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        self.sent += sent;
        Ok(after(sent, header.len() + body.len(), self.sent == self.total()))
    }
}

/// A frame to receive.
pub(super) struct Incoming<'a> {
    pub stream: &'a TcpStream,
    pub expect: &'a Header,
    pub body: &'a mut [u8],
    /// At least a header long.
    pub front: &'a mut [u8],
    pub got: usize,
}

impl Incoming<'_> {
    pub fn total(&self) -> usize {
        Header::SIZE + self.body.len()
    }

    pub fn step(&mut self) -> Result<Step, Fault> {
        if self.got == self.total() {
            return Ok(Step::Done);
        }
        let in_front = self.got < Header::SIZE;
        let front_end = self.total().min(self.front.len());
        let space = if in_front {
            &mut self.front[self.got..front_end]
        } else {
            &mut self.body[self.got - Header::SIZE..]
        };
        let asked = space.len();
        let mut stream = self.stream;
        let count = match stream.read(space) {
            Ok(0) => return Err(Fault::Closed),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Step::Blocked);
            }
            Err(error) => return Err(error.into()),
        };
        self.got += count;
        if in_front && self.got >= Header::SIZE {
            let header: Header = bytemuck::pod_read_unaligned(&self.front[..Header::SIZE]);
            if header != *self.expect {
                return Err(Fault::Unexpected(header));
            }
            let start = self.got - Header::SIZE;
            self.body[..start].copy_from_slice(&self.front[Header::SIZE..self.got]);
        }
        Ok(after(count, asked, self.got == self.total()))
    }
}

/// A call that moved less than it was asked to has emptied, or filled, the socket: asking again would cost a
/// call to hear that.
fn after(moved: usize, asked: usize, done: bool) -> Step {
    match done {
        true => Step::Done,
        false if moved < asked => Step::Blocked,
        false => Step::Moved,
    }
}
