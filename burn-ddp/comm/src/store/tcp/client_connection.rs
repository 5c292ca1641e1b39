//! The client's end of one connection: it sends a request and waits for the answer until a deadline.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::protocol::{FrameBuffer, Malformed, Request, Response, encode};
use crate::deadline::{Deadline, seconds};
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;

/// A shorter silence may be slowness, and explains nothing.
const SHORT_SILENCE: Duration = Duration::from_secs(1);

/// Reason for which a call has no answer.
#[derive(Debug)]
pub(super) enum CallError {
    /// There was no connection, or it was closed before the answer.
    Closed(io::Error),
    /// No answer came within this time.
    Silent(Duration),
    /// Another program, or another version of this one, is at the other end.
    Foreign(Malformed),
    /// The store refused the call, or the hello cannot be encoded.
    Refused(Error),
}

impl CallError {
    /// Weight of the error as an explanation of an attempt that failed within `limit`: another program at the port
    /// explains everything, a short silence nothing. The user is told an error with the greatest weight.
    pub(super) fn weight(&self, limit: Duration) -> u8 {
        match self {
            CallError::Foreign(_) => 3,
            CallError::Silent(_) if limit < SHORT_SILENCE => 1,
            CallError::Silent(_) | CallError::Closed(_) | CallError::Refused(_) => 2,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Closed(error) => error.fmt(f),
            CallError::Silent(limit) => write!(f, "no answer within {} s", seconds(*limit)),
            CallError::Foreign(malformed) => malformed.fmt(f),
            CallError::Refused(error) => error.fmt(f),
        }
    }
}

/// A connection whose hello the server has accepted.
pub(super) struct ClientConnection {
    stream: TcpStream,
    incoming: FrameBuffer,
}

impl ClientConnection {
    /// Connects to `address` and sends `hello`.
    pub(super) fn open(address: SocketAddr, hello: &Request, deadline: Deadline) -> Result<Self, CallError> {
        let connect = || -> io::Result<TcpStream> {
            let stream = TcpStream::connect_timeout(&address, io_limit(deadline))?;
            // A connection to a free port of this host may get that same port as its own end. It is then connected to
            // itself: it would read its own hello, and rank 0 could not bind the port.
            if stream.local_addr()? == stream.peer_addr()? {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = connect().map_err(|error| io_error(error, deadline))?;
        let mut connection = Self { stream, incoming: FrameBuffer::default() };
        let hello = encode(hello, 0).map_err(CallError::Refused)?;
        match connection.call(&hello, &[], deadline)? {
            (Response::Done, _) => Ok(connection),
            _ => Err(CallError::Foreign(Malformed::Undecodable)),
        }
    }

    /// This end's address.
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Sends the encoded `request` with `value` and returns the answer. After an error the connection is unusable.
    pub(super) fn call(
        &mut self,
        request: &[u8],
        value: &[u8],
        deadline: Deadline,
    ) -> Result<(Response, Vec<u8>), CallError> {
        let sent = self.send(request, deadline).and_then(|()| self.send(value, deadline));
        // A server that ends sends its last answer before it closes, which can be read even if sending fails.
        let (response, value) = match (self.receive(deadline), sent) {
            (Ok(answer), _) => answer,
            (Err(_), Err(error)) => return Err(io_error(error, deadline)),
            (Err(error), Ok(())) => return Err(error),
        };
        match response {
            Response::Refused(text) | Response::Failed { text, lost: None } => {
                Err(CallError::Refused(Error::config(text)))
            }
            Response::Failed { text, lost: Some(rank) } => {
                Err(CallError::Refused(Error::new(ErrorKind::PeerLost(rank), text)))
            }
            Response::Finished => Err(CallError::Refused(Error::new(
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

    fn receive(&mut self, deadline: Deadline) -> Result<(Response, Vec<u8>), CallError> {
        let mut chunk = vec![0; 64 << 10];
        loop {
            if let Some(frame) = self.incoming.take().map_err(CallError::Foreign)? {
                let response = frame.message().map_err(CallError::Foreign)?;
                return Ok((response, frame.value));
            }
            if deadline.passed() {
                return Err(CallError::Silent(deadline.limit()));
            }
            let read = self
                .stream
                .set_read_timeout(Some(io_limit(deadline)))
                .and_then(|()| self.stream.read(&mut chunk));
            match read {
                Ok(0) => return Err(CallError::Closed(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.incoming.extend(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(io_error(error, deadline)),
            }
        }
    }
}

/// Time left until `deadline`, but not zero, which system calls take for no limit or refuse.
fn io_limit(deadline: Deadline) -> Duration {
    deadline.remaining().max(Duration::from_millis(1))
}

fn io_error(error: io::Error, deadline: Deadline) -> CallError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => CallError::Silent(deadline.limit()),
        _ => CallError::Closed(error),
    }
}
