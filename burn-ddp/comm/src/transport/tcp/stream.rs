//! One frame that leaves through, or arrives from, a socket that does not block.
//!
//! A step is one system call. Its result tells whether another call may move bytes at once, so that the caller
//! alternates between the two directions and waits only when neither moves.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::net::TcpStream;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::transport::Header;

/// A peer that is gone must be an error, not a signal that ends the process. Apple's sockets have an option for this,
/// which the standard library sets.
#[cfg(not(target_vendor = "apple"))]
const FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
const FLAGS: SendFlags = SendFlags::empty();

/// Size of the buffer for the start of a frame. A small frame arrives in it with one system call, and no byte reaches
/// the receiver's memory before the header has been compared.
pub(super) const HEAD: usize = 4096;

/// Most buffers of a body that one system call moves. More of them take further calls, which cost little unless the
/// buffers are small.
const PARTS: usize = 63;

/// Result of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// The whole frame has moved.
    Done,
    /// Bytes have moved, and more may move at once.
    Moved,
    /// No more bytes move until the socket is ready.
    Blocked,
}

/// Reason for which a frame cannot be moved.
pub(super) enum FrameError {
    /// The peer's end of the connection is gone.
    Closed,
    /// The frame that has arrived has another header than the expected one.
    Unexpected(Header),
    /// The socket has failed.
    Io(io::Error),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, TimedOut};
        match error.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | TimedOut => FrameError::Closed,
            _ => FrameError::Io(error),
        }
    }
}

/// Position in a list of buffers.
#[derive(Clone, Copy, Default)]
struct Cursor {
    /// Index of the buffer.
    part: usize,
    /// Offset in that buffer.
    offset: usize,
}

impl Cursor {
    /// Moves forward by `bytes`; `lengths` are those of the buffers from the current one on.
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

/// A frame that is being sent.
pub(super) struct Outgoing<'a> {
    pub stream: &'a TcpStream,
    pub header: &'a Header,
    body: &'a [&'a [u8]],
    cursor: Cursor,
    pub sent: usize,
}

impl<'a> Outgoing<'a> {
    pub fn new(stream: &'a TcpStream, header: &'a Header, body: &'a [&'a [u8]]) -> Self {
        Self { stream, header, body, cursor: Cursor::default(), sent: 0 }
    }

    pub fn total(&self) -> usize {
        Header::SIZE + self.header.body as usize
    }

    pub fn step(&mut self) -> Result<Progress, FrameError> {
        if self.sent == self.total() {
            return Ok(Progress::Done);
        }
        let header = &bytemuck::bytes_of(self.header)[self.sent.min(Header::SIZE)..];
        let body = &self.body[self.cursor.part..];
        let mut parts = [IoSlice::new(&[]); PARTS + 1];
        parts[0] = IoSlice::new(header);
        let (mut count, mut asked) = (1, header.len());
        for (part, given) in parts[1..].iter_mut().zip(body) {
            let skipped = if count == 1 { self.cursor.offset } else { 0 };
            *part = IoSlice::new(&given[skipped..]);
            (count, asked) = (count + 1, asked + given.len() - skipped);
        }
        let sent = match sendmsg(self.stream, &parts[..count], &mut SendAncillaryBuffer::default(), FLAGS) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Progress::Blocked),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        self.sent += sent;
        self.cursor.advance(sent.saturating_sub(header.len()), body.iter().map(|part| part.len()));
        Ok(progress_after(sent, asked, self.sent == self.total()))
    }
}

/// A frame that is being received.
pub(super) struct Incoming<'a, 'b> {
    pub stream: &'a TcpStream,
    pub expect: &'a Header,
    body: &'a mut [&'b mut [u8]],
    /// Buffer for the start of the frame; at least as long as a header.
    head: &'a mut [u8],
    cursor: Cursor,
    pub got: usize,
}

impl<'a, 'b> Incoming<'a, 'b> {
    pub fn new(
        stream: &'a TcpStream,
        expect: &'a Header,
        body: &'a mut [&'b mut [u8]],
        head: &'a mut [u8],
    ) -> Self {
        Self { stream, expect, body, head, cursor: Cursor::default(), got: 0 }
    }

    pub fn total(&self) -> usize {
        Header::SIZE + self.expect.body as usize
    }

    pub fn step(&mut self) -> Result<Progress, FrameError> {
        if self.got == self.total() {
            return Ok(Progress::Done);
        }
        let read = if self.got < Header::SIZE { self.read_head() } else { self.read_body() };
        let (count, asked) = match read {
            Ok((0, _)) => return Err(FrameError::Closed),
            Ok(moved) => moved,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Progress::Blocked);
            }
            Err(error) => return Err(error.into()),
        };
        let had_header = self.got >= Header::SIZE;
        self.got += count;
        if !had_header && self.got >= Header::SIZE {
            let header: Header = bytemuck::pod_read_unaligned(&self.head[..Header::SIZE]);
            if header != *self.expect {
                return Err(FrameError::Unexpected(header));
            }
            self.unpack_head();
        }
        Ok(progress_after(count, asked, self.got == self.total()))
    }

    /// Reads the header, and a part of the body with it; returns the bytes read and the bytes there was room for.
    fn read_head(&mut self) -> io::Result<(usize, usize)> {
        let end = self.total().min(self.head.len());
        let space = &mut self.head[self.got..end];
        let asked = space.len();
        let mut stream = self.stream;
        Ok((stream.read(space)?, asked))
    }

    fn read_body(&mut self) -> io::Result<(usize, usize)> {
        let mut parts: [IoSliceMut<'_>; PARTS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let mut skipped = self.cursor.offset;
        let (mut count, mut asked) = (0, 0);
        for (part, given) in parts.iter_mut().zip(&mut self.body[self.cursor.part..]) {
            asked += given.len() - skipped;
            *part = IoSliceMut::new(&mut given[skipped..]);
            (count, skipped) = (count + 1, 0);
        }
        let mut stream = self.stream;
        let got = stream.read_vectored(&mut parts[..count])?;
        let lengths = self.body[self.cursor.part..].iter().map(|part| part.len());
        self.cursor.advance(got, lengths);
        Ok((got, asked))
    }

    /// Copies the part of the body that came with the header to the body's buffers.
    fn unpack_head(&mut self) {
        let mut rest = &self.head[Header::SIZE..self.got];
        self.cursor.advance(rest.len(), self.body.iter().map(|part| part.len()));
        for part in self.body.iter_mut() {
            let (here, behind) = rest.split_at(rest.len().min(part.len()));
            part[..here.len()].copy_from_slice(here);
            rest = behind;
        }
    }
}

/// Progress after a call that has moved `moved` of `asked` bytes. If it moved less than asked, the socket is empty or
/// full, and the next call would only find that out.
fn progress_after(moved: usize, asked: usize, done: bool) -> Progress {
    match done {
        true => Progress::Done,
        false if moved < asked => Progress::Blocked,
        false => Progress::Moved,
    }
}
