//! One client as the server sees it: bytes in, an answer out, never both at once.
//!
//! A client sends its next request when it has the answer to the one before. The server insists on it, so a
//! connection holds at most one request and one answer, whatever is at the other end.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;

use super::board::{Answer, Board, ConnectionId, Verdict};
use super::protocol::{FrameBuffer, Malformed, Request, Response, encode};
use crate::deadline::Deadline;

/// Time for a new connection to say who it is, and for a dismissed one to take its answer.
const MANNERS: Duration = Duration::from_secs(5);
/// Bytes taken from a socket at once.
const CHUNK: usize = 64 << 10;

pub(super) struct Connection {
    stream: TcpStream,
    incoming: FrameBuffer,
    outgoing: VecDeque<Arc<[u8]>>,
    /// How much of the first outgoing part has left.
    sent: usize,
    waiting: Option<(String, Deadline)>,
    /// When to give up on a connection that is only at the door, coming or going.
    at_door: Option<Deadline>,
    leaving: bool,
    over: bool,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            incoming: FrameBuffer::at_door(),
            outgoing: VecDeque::new(),
            sent: 0,
            waiting: None,
            at_door: Some(Deadline::after(MANNERS)),
            leaving: false,
            over: false,
        })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Whether it can be forgotten.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// What to poll for. Reading goes on while an answer is due: it tells when the client is gone.
    pub(super) fn interest(&self) -> PollFlags {
        let read = if self.leaving { PollFlags::empty() } else { PollFlags::IN };
        let write = if self.outgoing.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        read | write
    }

    /// When it needs attention without having said anything.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let waits = self.waiting.as_ref().map(|(_, deadline)| deadline);
        waits.into_iter().chain(&self.at_door).map(Deadline::remaining).min()
    }

    /// Takes what has arrived and does what it asks.
    pub(super) fn receive(&mut self, id: ConnectionId, board: &mut Board) {
        let mut chunk = vec![0; CHUNK];
        match self.stream.read(&mut chunk) {
            Ok(0) => self.over = true,
            // A client that talks while it is being answered is none of ours.
            Ok(_) if self.waiting.is_some() || !self.outgoing.is_empty() => self.over = true,
            Ok(count) => {
                self.incoming.extend(&chunk[..count]);
                self.serve(id, board);
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.over = true,
        }
    }

    fn serve(&mut self, id: ConnectionId, board: &mut Board) {
        let verdict = match self.incoming.take() {
            Ok(None) => return,
            Ok(Some(frame)) if self.incoming.is_empty() => match frame.message::<Request>() {
                Ok(request) => board.handle(id, request, frame.value),
                Err(_) => Verdict::Close,
            },
            Ok(Some(_)) => Verdict::Close,
            // The header of any answer tells such a client which version is spoken here.
            Err(error @ Malformed::Version(_)) => Verdict::Dismiss(Response::Refused(error.to_string())),
            Err(_) => Verdict::Close,
        };
        match verdict {
            Verdict::Answer(response) => {
                self.at_door = None;
                // Only a hello is answered at the door.
                self.incoming.admit();
                self.answer((response, Arc::default()));
            }
            Verdict::Dismiss(response) => self.dismiss(response),
            Verdict::Wait { key, wait_ms } => {
                self.waiting = Some((key, Deadline::after(Duration::from_millis(wait_ms))));
            }
            Verdict::Close => self.over = true,
        }
    }

    /// Answers a waiting get if `board` has the answer or the wait is over; ends a stay at the door.
    pub(super) fn settle(&mut self, board: &Board) {
        if let Some((key, deadline)) = &self.waiting {
            let answer =
                board.look(key).or_else(|| deadline.passed().then(|| (Response::NotSet, Arc::default())));
            if let Some(answer) = answer {
                self.waiting = None;
                self.answer(answer);
            }
        }
        self.over |= self.at_door.is_some_and(|deadline| deadline.passed());
    }

    /// Sends a last message, then closes.
    pub(super) fn dismiss(&mut self, response: Response) {
        self.leaving = true;
        self.at_door = Some(Deadline::after(MANNERS));
        self.answer((response, Arc::default()));
    }

    fn answer(&mut self, (response, value): Answer) {
        match encode(&response, value.len()) {
            Ok(head) => self.outgoing.push_back(head.into()),
            Err(error) => {
                tracing::error!("the store cannot answer: {error}");
                self.over = true;
            }
        }
        if !value.is_empty() {
            self.outgoing.push_back(value);
        }
        self.flush();
    }

    /// Sends what the socket takes.
    pub(super) fn flush(&mut self) {
        while let Some(part) = self.outgoing.front() {
            match self.stream.write(&part[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.over = true;
                    return;
                }
            }
            if self.sent == part.len() {
                self.outgoing.pop_front();
                self.sent = 0;
            }
        }
        self.over |= self.leaving;
    }
}
