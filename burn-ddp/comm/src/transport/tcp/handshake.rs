//! The handshake at the start of one connection, from both ends, over sockets that do not block.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::TcpStream;

use super::hello::{ParsedHello, Purpose, acknowledgement, parse_hello};
use crate::rank::Rank;

/// A connection that was accepted and whose hello is not complete.
pub(super) struct IncomingHandshake {
    pub stream: TcpStream,
    /// Bytes of the hello that have arrived.
    received: Vec<u8>,
}

/// A connection that this rank opens.
pub(super) struct OutgoingHandshake {
    pub peer: Rank,
    pub purpose: Purpose,
    pub stream: TcpStream,
    /// Bytes of the hello that have not been sent.
    pub unsent: Vec<u8>,
    /// Bytes of the acknowledgement that have arrived.
    pub received: Vec<u8>,
}

/// State of a handshake.
pub(super) enum HandshakeState {
    /// It waits for the socket.
    Pending,
    /// It is complete; the rank is the one at the other end.
    Complete(Rank, Purpose),
    /// The other end has closed the connection, or is not a member of the group.
    Failed,
}

impl IncomingHandshake {
    /// Starts with a connection that was just accepted.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream, received: Vec::new() }
    }

    /// Reads as much of the hello as has arrived.
    pub fn advance(&mut self, group: &str) -> HandshakeState {
        loop {
            let missing = match parse_hello(&self.received, group) {
                ParsedHello::Incomplete(missing) => missing,
                ParsedHello::Foreign => return HandshakeState::Failed,
                ParsedHello::Member(rank, purpose) => return HandshakeState::Complete(rank, purpose),
            };
            match read_at_most(missing, &self.stream, &mut self.received) {
                Ok(0) => return HandshakeState::Failed,
                Ok(_) => {}
                Err(error) if is_transient(error.kind()) => return HandshakeState::Pending,
                Err(_) => return HandshakeState::Failed,
            }
        }
    }
}

impl OutgoingHandshake {
    /// Sends and reads as much as the socket allows.
    ///
    /// # Errors
    /// The error of the socket, that of an attempt to connect included.
    pub fn advance(&mut self) -> std::io::Result<HandshakeState> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        while !self.unsent.is_empty() {
            match (&self.stream).write(&self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if is_transient(error.kind()) => return Ok(HandshakeState::Pending),
                Err(error) => return Err(error),
            }
        }
        let expected = acknowledgement(self.peer);
        loop {
            if self.received.len() == expected.len() {
                let complete = HandshakeState::Complete(self.peer, self.purpose);
                return Ok(if self.received == expected { complete } else { HandshakeState::Failed });
            }
            let missing = expected.len() - self.received.len();
            match read_at_most(missing, &self.stream, &mut self.received) {
                Ok(0) => return Ok(HandshakeState::Failed),
                Ok(_) => {}
                Err(error) if is_transient(error.kind()) => return Ok(HandshakeState::Pending),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Reads at most `limit` bytes, so that the bytes behind the handshake stay in the socket.
fn read_at_most(limit: usize, mut stream: &TcpStream, into: &mut Vec<u8>) -> std::io::Result<usize> {
    let mut bytes = vec![0; limit];
    let count = stream.read(&mut bytes)?;
    into.extend_from_slice(&bytes[..count]);
    Ok(count)
}

/// True if the call that failed so may succeed later.
fn is_transient(kind: IoErrorKind) -> bool {
    matches!(kind, IoErrorKind::WouldBlock | IoErrorKind::Interrupted)
}
