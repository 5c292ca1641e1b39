//! The server's end of one connection of a client.
//!
//! ```text
//!             hello           get            value, failure or timeout
//!   New ──────────────> Ready ───> Waiting ────────────────────────────> Ready
//!    │ refused,           │ bye, or the server shuts down
//!    │ or 5 s without     v
//!    │ a hello          Closing: sends a last answer ──> Closed
//!    └──────────────────────────────────────────────────> Closed
//! ```
//!
//! Set and add are answered at once and leave a connection ready. From every state but `Closing` a connection becomes
//! `Closed` when the client closes it or breaks the protocol. A client sends its next request only after the answer to
//! the last one, and the server closes connections of those that do not, so a connection holds at most one request and
//! one answer whatever is at its other end.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;

use super::protocol::{FrameBuffer, Malformed, Request, Response, encode};
use super::registry::{Action, Answer, ConnectionId, Registry};
use crate::deadline::Deadline;

/// Time for a new connection to send its hello, and for a closing one to take its last answer.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Bytes taken from a socket at once.
const CHUNK: usize = 64 << 10;

pub(super) struct ServerConnection {
    stream: TcpStream,
    state: State,
    incoming: FrameBuffer,
    outgoing: VecDeque<Arc<[u8]>>,
    /// Bytes of the first outgoing part that have been sent.
    sent: usize,
}

/// State of a connection; see the module documentation.
enum State {
    /// The client has not sent its hello; it has until the deadline.
    New(Deadline),
    /// The client may send a request.
    Ready,
    /// The client waits for the value of a key until the deadline.
    Waiting(String, Deadline),
    /// The last answer is on its way; the client has until the deadline to take it.
    Closing(Deadline),
    Closed,
}

impl ServerConnection {
    /// Wraps a connection that was just accepted.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            state: State::New(Deadline::after(HANDSHAKE_LIMIT)),
            incoming: FrameBuffer::without_values(),
            outgoing: VecDeque::new(),
            sent: 0,
        })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// True if the server can drop this connection.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// Events to poll for. Reading goes on while an answer is due, because it reveals that the client is gone.
    pub(super) fn interest(&self) -> PollFlags {
        let read = if matches!(self.state, State::Closing(_)) { PollFlags::empty() } else { PollFlags::IN };
        let write = if self.outgoing.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        read | write
    }

    /// Time after which [`update`](Self::update) has something to do even if the client stays silent.
    pub(super) fn time_limit(&self) -> Option<Duration> {
        match &self.state {
            State::New(deadline) | State::Waiting(_, deadline) | State::Closing(deadline) => {
                Some(deadline.remaining())
            }
            State::Ready | State::Closed => None,
        }
    }

    /// Reads the bytes that have arrived and executes the request that they complete.
    pub(super) fn receive(&mut self, id: ConnectionId, registry: &mut Registry) {
        let mut chunk = vec![0; CHUNK];
        match self.stream.read(&mut chunk) {
            Ok(0) => self.state = State::Closed,
            // The client sent a request before it had the answer to the last one.
            Ok(_) if matches!(self.state, State::Waiting(..)) || !self.outgoing.is_empty() => {
                self.state = State::Closed;
            }
            Ok(count) => {
                self.incoming.extend(&chunk[..count]);
                self.execute(id, registry);
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.state = State::Closed,
        }
    }

    fn execute(&mut self, id: ConnectionId, registry: &mut Registry) {
        let action = match self.incoming.take() {
            Ok(None) => return,
            Ok(Some(frame)) if self.incoming.is_empty() => match frame.message::<Request>() {
                Ok(request) => registry.handle(id, request, frame.value),
                Err(_) => Action::Close,
            },
            Ok(Some(_)) => Action::Close,
            // The header of the answer tells such a client the version of this server.
            Err(error @ Malformed::Version(_)) => {
                Action::AnswerAndClose(Response::Refused(error.to_string()))
            }
            Err(_) => Action::Close,
        };
        match action {
            Action::Answer(response) => {
                // The first request that is answered so is the hello.
                self.incoming.allow_values();
                self.state = State::Ready;
                self.answer((response, Arc::default()));
            }
            Action::AnswerAndClose(response) => self.answer_and_close(response),
            Action::Wait { key, wait_ms } => {
                self.state = State::Waiting(key, Deadline::after(Duration::from_millis(wait_ms)));
            }
            Action::Close => self.state = State::Closed,
        }
    }

    /// Answers a waiting get if `registry` has the answer or its time is over; closes a connection whose time is over.
    pub(super) fn update(&mut self, registry: &Registry) {
        match &self.state {
            State::Waiting(key, deadline) => {
                let timeout = || deadline.passed().then(|| (Response::NotSet, Arc::default()));
                if let Some(answer) = registry.answer_to_get(key).or_else(timeout) {
                    self.state = State::Ready;
                    self.answer(answer);
                }
            }
            State::New(deadline) | State::Closing(deadline) if deadline.passed() => {
                self.state = State::Closed
            }
            State::New(_) | State::Closing(_) | State::Ready | State::Closed => {}
        }
    }

    /// Sends a last answer, then closes.
    pub(super) fn answer_and_close(&mut self, response: Response) {
        self.state = State::Closing(Deadline::after(HANDSHAKE_LIMIT));
        self.answer((response, Arc::default()));
    }

    fn answer(&mut self, (response, value): Answer) {
        match encode(&response, value.len()) {
            Ok(head) => self.outgoing.push_back(head.into()),
            Err(error) => {
                tracing::error!("the store cannot answer: {error}");
                self.state = State::Closed;
                return;
            }
        }
        if !value.is_empty() {
            self.outgoing.push_back(value);
        }
        self.flush();
    }

    /// Sends as much of the answer as the socket takes.
    pub(super) fn flush(&mut self) {
        while let Some(part) = self.outgoing.front() {
            match self.stream.write(&part[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.state = State::Closed;
                    return;
                }
            }
            if self.sent == part.len() {
                self.outgoing.pop_front();
                self.sent = 0;
            }
        }
        if matches!(self.state, State::Closing(_)) {
            self.state = State::Closed;
        }
    }
}
