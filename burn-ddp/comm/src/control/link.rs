//! The control connection with one peer.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use super::message::Message;
use super::pulse::{Beat, Heard};
use crate::rank::Rank;

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Closed,
    Garbage,
}

pub(super) struct Link {
    pub peer: Rank,
    stream: Option<TcpStream>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    heard: Heard,
    /// This rank has said goodbye.
    left: bool,
    /// The peer has said goodbye.
    peer_left: bool,
    /// The peer knows that this rank leaves.
    acknowledged: bool,
}

impl Link {
    pub fn new(peer: Rank, stream: TcpStream, now: Instant) -> Self {
        Self {
            peer,
            stream: Some(stream),
            inbox: Vec::new(),
            outbox: Vec::new(),
            heard: Heard::at(now),
            left: false,
            peer_left: false,
            acknowledged: false,
        }
    }

    /// The connection while it is open.
    pub fn stream(&self) -> Option<&TcpStream> {
        self.stream.as_ref()
    }

    pub fn has_mail(&self) -> bool {
        self.stream.is_some() && !self.outbox.is_empty()
    }

    /// Reads all that is there. The messages come first even if the connection has ended behind them.
    pub fn read(&mut self) -> (Vec<Message>, Option<End>) {
        let mut end = self.fill();
        let mut messages = Vec::new();
        loop {
            match Message::take(&mut self.inbox) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(()) => {
                    end = Some(End::Garbage);
                    break;
                }
            }
        }
        for message in &messages {
            self.peer_left |= *message == Message::Goodbye;
            self.acknowledged |= *message == Message::GoodbyeHeard;
        }
        if end.is_some() {
            self.stream = None;
        }
        (messages, end)
    }

    fn fill(&mut self) -> Option<End> {
        let mut stream = self.stream.as_ref()?;
        let mut bytes = [0; 4096];
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return Some(End::Closed),
                Ok(count) => {
                    self.heard = Heard::at(Instant::now());
                    self.inbox.extend_from_slice(&bytes[..count]);
                    // The rest is for the next round; and a peer cannot fill the memory with an endless stream.
                    if count < bytes.len() || self.inbox.len() > 16 * bytes.len() {
                        return None;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Some(End::Closed),
            }
        }
    }

    /// Queues a message; [`flush`](Link::flush) sends it.
    pub fn post(&mut self, message: &Message) {
        if self.stream.is_some() {
            message.write(&mut self.outbox);
        }
    }

    /// A heartbeat, unless the peer is leaving, believes that this rank is, or has not read the last one.
    pub fn post_heartbeat(&mut self) {
        if !self.left && !self.peer_left && self.outbox.is_empty() {
            self.post(&Message::Heartbeat);
        }
    }

    /// Says goodbye, once, unless the peer has left already.
    pub fn post_goodbye(&mut self) {
        if !self.left && !self.peer_left {
            self.left = true;
            self.post(&Message::Goodbye);
        }
    }

    /// Whether nothing more has to be said or heard before this rank may close the connection.
    pub fn is_parted(&self) -> bool {
        let owes_nothing = self.acknowledged || (self.peer_left && !self.left);
        self.stream.is_none() || (owes_nothing && self.outbox.is_empty())
    }

    /// Whether an end of the connection is the good one.
    pub fn may_end(&self) -> bool {
        self.peer_left || self.acknowledged
    }

    /// The silence of a peer that ought to be heard, if it is too long.
    pub fn too_silent(&mut self, beat: &Beat) -> Option<std::time::Duration> {
        let silence = self.heard.too_silent(beat);
        if self.stream.is_none() || self.may_end() { None } else { silence }
    }

    /// Sends what is queued as far as the kernel takes it.
    pub fn flush(&mut self) {
        while let (Some(mut stream), false) = (self.stream.as_ref(), self.outbox.is_empty()) {
            match stream.write(&self.outbox) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Reading tells what has become of the peer, after its last words.
                Err(_) => self.outbox.clear(),
            }
        }
    }

    /// Closes the connection. What the peer sent in the meantime is read first: closing over unread bytes
    /// would reset the connection and could cost the peer the last words of this rank.
    pub fn close(&mut self) {
        if let Some(stream) = &self.stream {
            let _ = stream.shutdown(Shutdown::Write);
            self.fill();
        }
        self.stream = None;
    }
}
