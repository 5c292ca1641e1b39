//! One connection from its first byte until both sides know each other.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::TcpStream;

use super::hello::{Heard, Purpose, acknowledgement, hear};
use crate::rank::Rank;

/// A connection that somebody opened to this rank and has not yet explained.
pub(super) struct Caller {
    pub stream: TcpStream,
    pub said: Vec<u8>,
}

/// A connection that this rank opens.
pub(super) struct Call {
    pub peer: Rank,
    pub purpose: Purpose,
    pub stream: TcpStream,
    /// What is left to say.
    pub hello: Vec<u8>,
    pub answer: Vec<u8>,
}

/// What became of a connection.
pub(super) enum Outcome {
    Waits,
    Stays(Rank, Purpose),
    Closes,
}

impl Caller {
    /// Hears what the caller has to say so far.
    pub fn listen(&mut self, group: &str) -> Outcome {
        loop {
            let lacks = match hear(&self.said, group) {
                Heard::Lacks(bytes) => bytes,
                Heard::Foreign => return Outcome::Closes,
                Heard::Member(rank, purpose) => return Outcome::Stays(rank, purpose),
            };
            match take(&self.stream, &mut self.said, lacks) {
                Ok(0) => return Outcome::Closes,
                Ok(_) => {}
                Err(error) if later(error.kind()) => return Outcome::Waits,
                Err(_) => return Outcome::Closes,
            }
        }
    }
}

impl Call {
    /// Says and hears what the socket allows now.
    pub fn advance(&mut self) -> std::io::Result<Outcome> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        while !self.hello.is_empty() {
            match (&self.stream).write(&self.hello) {
                Ok(sent) => drop(self.hello.drain(..sent)),
                Err(error) if later(error.kind()) => return Ok(Outcome::Waits),
                Err(error) => return Err(error),
            }
        }
        let expected = acknowledgement(self.peer);
        loop {
            if self.answer.len() == expected.len() {
                let right = self.answer == expected;
                return Ok(if right { Outcome::Stays(self.peer, self.purpose) } else { Outcome::Closes });
            }
            let lacks = expected.len() - self.answer.len();
            match take(&self.stream, &mut self.answer, lacks) {
                Ok(0) => return Ok(Outcome::Closes),
                Ok(_) => {}
                Err(error) if later(error.kind()) => return Ok(Outcome::Waits),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Reads at most `most` bytes, so that what follows on the connection stays there.
fn take(mut stream: &TcpStream, into: &mut Vec<u8>, most: usize) -> std::io::Result<usize> {
    let mut bytes = vec![0; most];
    let count = stream.read(&mut bytes)?;
    into.extend_from_slice(&bytes[..count]);
    Ok(count)
}

/// Errors that only say that nothing could be moved now.
fn later(kind: IoErrorKind) -> bool {
    matches!(kind, IoErrorKind::WouldBlock | IoErrorKind::Interrupted)
}
