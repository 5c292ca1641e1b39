//! One connection of a client to the server: a request, its answer, a deadline.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::protocol::{FrameBuffer, Malformed, Request, Response, encode};
use crate::deadline::{Deadline, seconds};
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;

/// Silence for less than this may only be slowness.
const TELLING: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Obstacle {
    /// There was no connection, or it was closed before the answer.
    Closed(io::Error),
    /// Nothing came until the deadline.
    Silent(Duration),
    /// Something else is at the other end.
    Foreign(Malformed),
    /// The store itself says no, or the hello cannot be encoded.
    Refused(Error),
}

impl Obstacle {
    /// How much it says about what is wrong; `limit` is the time that the attempt had. Another program at the
    /// port explains everything, and silence within a moment nothing.
    pub(super) fn weight(&self, limit: Duration) -> u8 {
        match self {
            Obstacle::Foreign(_) => 3,
            Obstacle::Silent(_) if limit < TELLING => 1,
            Obstacle::Silent(_) | Obstacle::Closed(_) | Obstacle::Refused(_) => 2,
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Closed(error) => error.fmt(f),
            Obstacle::Silent(limit) => write!(f, "no answer within {} s", seconds(*limit)),
            Obstacle::Foreign(malformed) => malformed.fmt(f),
            Obstacle::Refused(error) => error.fmt(f),
        }
    }
}

/// A connection that the server has accepted.
pub(super) struct Link {
    stream: TcpStream,
    incoming: FrameBuffer,
}

impl Link {
    /// Connects to `address` and introduces itself with `hello`.
    pub(super) fn open(address: SocketAddr, hello: &Request, deadline: Deadline) -> Result<Self, Obstacle> {
        let connect = || -> io::Result<TcpStream> {
            let stream = TcpStream::connect_timeout(&address, io_limit(deadline))?;
            // A connection to a free port of this host may get that very port as its own end, and is then
            // connected to itself: it would read its own hello and keep rank 0 from binding.
            if stream.local_addr()? == stream.peer_addr()? {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = connect().map_err(|error| waited(error, deadline))?;
        let mut link = Self { stream, incoming: FrameBuffer::default() };
        let hello = encode(hello, 0).map_err(Obstacle::Refused)?;
        match link.call(&hello, &[], deadline)? {
            (Response::Done, _) => Ok(link),
            _ => Err(Obstacle::Foreign(Malformed::Undecodable)),
        }
    }

    /// This end's address.
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Sends the encoded `request` with `value` and returns the answer. After an error the link is of no
    /// further use.
    pub(super) fn call(
        &mut self,
        request: &[u8],
        value: &[u8],
        deadline: Deadline,
    ) -> Result<(Response, Vec<u8>), Obstacle> {
        let sent = self.send(request, deadline).and_then(|()| self.send(value, deadline));
        // A server that has ended says so before it closes, and what it said can still be read.
        let (response, value) = match (self.receive(deadline), sent) {
            (Ok(answer), _) => answer,
            (Err(_), Err(error)) => return Err(waited(error, deadline)),
            (Err(obstacle), Ok(())) => return Err(obstacle),
        };
        match response {
            Response::Refused(text) | Response::Failed { text, lost: None } => {
                Err(Obstacle::Refused(Error::config(text)))
            }
            Response::Failed { text, lost: Some(rank) } => {
                Err(Obstacle::Refused(Error::new(ErrorKind::PeerLost(rank), text)))
            }
            Response::Finished => Err(Obstacle::Refused(Error::new(
                ErrorKind::PeerFinished(Rank(0)),
                "rank 0, which serves the store, has already finished",
            ))),
            answer => Ok((answer, value)),
        }
    }

    fn send(&mut self, mut bytes: &[u8], deadline: Deadline) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(io_limit(deadline)))?;
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn receive(&mut self, deadline: Deadline) -> Result<(Response, Vec<u8>), Obstacle> {
        let mut chunk = vec![0; 64 << 10];
        loop {
            if let Some(frame) = self.incoming.take().map_err(Obstacle::Foreign)? {
                let response = frame.message().map_err(Obstacle::Foreign)?;
                return Ok((response, frame.value));
            }
            if deadline.passed() {
                return Err(Obstacle::Silent(deadline.limit()));
            }
            let read = self
                .stream
                .set_read_timeout(Some(io_limit(deadline)))
                .and_then(|()| self.stream.read(&mut chunk));
            match read {
                Ok(0) => return Err(Obstacle::Closed(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.incoming.extend(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(waited(error, deadline)),
            }
        }
    }
}

/// What is left until `deadline`, for a system call that takes zero for ever or refuses it.
fn io_limit(deadline: Deadline) -> Duration {
    deadline.remaining().max(Duration::from_millis(1))
}

fn waited(error: io::Error, deadline: Deadline) -> Obstacle {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Obstacle::Silent(deadline.limit()),
        _ => Obstacle::Closed(error),
    }
}
