//! One frame on its way out of, or into, a non-blocking socket.
//!
//! A step is one system call. It says whether another one could move something at once, so that the caller can
//! take turns between the two directions and waits only when neither moves.

use std::io::{self, IoSlice, IoSliceMut, Read};
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

/// Buffers of a body that one system call moves; more than that many come with further calls, and buffers so small
/// that this is felt are seldom so many.
const PARTS: usize = 63;

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

/// How far a list of buffers has been gone through.
#[derive(Clone, Copy, Default)]
struct Place {
    part: usize,
    /// Into that buffer.
    offset: usize,
}

impl Place {
    /// Goes on by `bytes` through buffers of these lengths, which start with the one at hand.
    fn advance(&mut self, mut bytes: usize, lengths: impl Iterator<Item = usize>) {
        for length in lengths {
            let left = length - self.offset;
            if bytes < left {
                self.offset += bytes;
                return;
            }
            bytes -= left;
            *self = Self { part: self.part + 1, offset: 0 };
        }
    }
}

/// A frame to send.
pub(super) struct Outgoing<'a> {
    pub stream: &'a TcpStream,
    pub header: &'a Header,
    body: &'a [&'a [u8]],
    place: Place,
    pub sent: usize,
}

impl<'a> Outgoing<'a> {
    pub fn new(stream: &'a TcpStream, header: &'a Header, body: &'a [&'a [u8]]) -> Self {
        Self { stream, header, body, place: Place::default(), sent: 0 }
    }

    pub fn total(&self) -> usize {
        Header::SIZE + self.header.body as usize
    }

    pub fn step(&mut self) -> Result<Step, Fault> {
        if self.sent == self.total() {
            return Ok(Step::Done);
        }
        let header = &bytemuck::bytes_of(self.header)[self.sent.min(Header::SIZE)..];
        let body = &self.body[self.place.part..];
        let mut parts = [IoSlice::new(&[]); PARTS + 1];
        parts[0] = IoSlice::new(header);
        let (mut count, mut asked) = (1, header.len());
        for (part, given) in parts[1..].iter_mut().zip(body) {
            let skipped = if count == 1 { self.place.offset } else { 0 };
            *part = IoSlice::new(&given[skipped..]);
            (count, asked) = (count + 1, asked + given.len() - skipped);
        }
        let sent = match sendmsg(self.stream, &parts[..count], &mut SendAncillaryBuffer::default(), FLAGS) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Step::Blocked),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        self.sent += sent;
        self.place.advance(sent.saturating_sub(header.len()), body.iter().map(|part| part.len()));
        Ok(after(sent, asked, self.sent == self.total()))
    }
}

/// A frame to receive.
pub(super) struct Incoming<'a, 'b> {
    pub stream: &'a TcpStream,
    pub expect: &'a Header,
    body: &'a mut [&'b mut [u8]],
    /// At least a header long.
    front: &'a mut [u8],
    place: Place,
    pub got: usize,
}

impl<'a, 'b> Incoming<'a, 'b> {
    pub fn new(
        stream: &'a TcpStream,
        expect: &'a Header,
        body: &'a mut [&'b mut [u8]],
        front: &'a mut [u8],
    ) -> Self {
        Self { stream, expect, body, front, place: Place::default(), got: 0 }
    }

    pub fn total(&self) -> usize {
        Header::SIZE + self.expect.body as usize
    }

    pub fn step(&mut self) -> Result<Step, Fault> {
        if self.got == self.total() {
            return Ok(Step::Done);
        }
        let read = if self.got < Header::SIZE { self.read_front() } else { self.read_body() };
        let (count, asked) = match read {
            Ok((0, _)) => return Err(Fault::Closed),
            Ok(moved) => moved,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Step::Blocked);
            }
            Err(error) => return Err(error.into()),
        };
        let had_header = self.got >= Header::SIZE;
        self.got += count;
        if !had_header && self.got >= Header::SIZE {
            let header: Header = bytemuck::pod_read_unaligned(&self.front[..Header::SIZE]);
            if header != *self.expect {
                return Err(Fault::Unexpected(header));
            }
            self.unpack_front();
        }
        Ok(after(count, asked, self.got == self.total()))
    }

    /// Bytes that came, and bytes that there was room for.
    fn read_front(&mut self) -> io::Result<(usize, usize)> {
        let end = self.total().min(self.front.len());
        let space = &mut self.front[self.got..end];
        let asked = space.len();
        let mut stream = self.stream;
        Ok((stream.read(space)?, asked))
    }

    fn read_body(&mut self) -> io::Result<(usize, usize)> {
        let mut parts: [IoSliceMut<'_>; PARTS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let mut skipped = self.place.offset;
        let (mut count, mut asked) = (0, 0);
        for (part, given) in parts.iter_mut().zip(&mut self.body[self.place.part..]) {
            asked += given.len() - skipped;
            *part = IoSliceMut::new(&mut given[skipped..]);
            (count, skipped) = (count + 1, 0);
        }
        let mut stream = self.stream;
        let got = stream.read_vectored(&mut parts[..count])?;
        let lengths = self.body[self.place.part..].iter().map(|part| part.len());
        self.place.advance(got, lengths);
        Ok((got, asked))
    }

    /// Brings what came with the header to where it belongs.
    fn unpack_front(&mut self) {
        let mut rest = &self.front[Header::SIZE..self.got];
        self.place.advance(rest.len(), self.body.iter().map(|part| part.len()));
        for part in self.body.iter_mut() {
            let (here, behind) = rest.split_at(rest.len().min(part.len()));
            part[..here.len()].copy_from_slice(here);
            rest = behind;
        }
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
