//! The control connection with one peer, and the goodbyes of both ends.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::heartbeat::{DueHeartbeat, LastHeard};
use super::message::Message;
use crate::rank::Rank;

/// End of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The peer has closed it, or it was cut.
    Closed,
    /// The peer has sent bytes that are no control messages.
    Garbage,
}

pub(super) struct PeerConnection {
    pub peer: Rank,
    /// `None` when it has ended.
    stream: Option<TcpStream>,
    /// Received bytes that are no complete message yet.
    incoming: Vec<u8>,
    /// Bytes that the kernel has not taken yet.
    outgoing: Vec<u8>,
    heard: LastHeard,
    /// This rank has said goodbye.
    left: bool,
    /// The peer has said goodbye.
    peer_left: bool,
    /// The peer has acknowledged the goodbye of this rank.
    acknowledged: bool,
}

impl PeerConnection {
    pub fn new(peer: Rank, stream: TcpStream, now: Instant) -> Self {
        Self {
            peer,
            stream: Some(stream),
            incoming: Vec::new(),
            outgoing: Vec::new(),
            heard: LastHeard::at(now),
            left: false,
            peer_left: false,
            acknowledged: false,
        }
    }

    /// The socket while the connection is open.
    pub fn stream(&self) -> Option<&TcpStream> {
        self.stream.as_ref()
    }

    /// True if messages wait to be sent.
    pub fn has_output(&self) -> bool {
        self.stream.is_some() && !self.outgoing.is_empty()
    }

    /// Reads all messages that have arrived, and the end of the connection if it comes after them.
    pub fn read(&mut self) -> (Vec<Message>, Option<End>) {
        let mut end = self.fill();
        let mut messages = Vec::new();
        loop {
            match Message::take(&mut self.incoming) {
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
            self.acknowledged |= *message == Message::GoodbyeAcknowledged;
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
                    self.heard = LastHeard::at(Instant::now());
                    self.incoming.extend_from_slice(&bytes[..count]);
                    // The rest is left for the next call, so that a peer cannot fill the memory with an endless stream.
                    if count < bytes.len() || self.incoming.len() > 16 * bytes.len() {
                        return None;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Some(End::Closed),
            }
        }
    }

    /// Queues a message for [`flush`](PeerConnection::flush).
    pub fn queue(&mut self, message: &Message) {
        if self.stream.is_some() {
            message.write(&mut self.outgoing);
        }
    }

    /// Queues a heartbeat, unless one of the two ranks is leaving or the peer has not read the last one.
    pub fn queue_heartbeat(&mut self) {
        if !self.left && !self.peer_left && self.outgoing.is_empty() {
            self.queue(&Message::Heartbeat);
        }
    }

    /// Queues a goodbye, once, unless the peer has left already.
    pub fn queue_goodbye(&mut self) {
        if !self.left && !self.peer_left {
            self.left = true;
            self.queue(&Message::Goodbye);
        }
    }

    /// True if this rank may close the connection: no goodbye or acknowledgement is still to be sent or received.
    pub fn goodbye_complete(&self) -> bool {
        let acknowledged = self.acknowledged || (self.peer_left && !self.left);
        self.stream.is_none() || (acknowledged && self.outgoing.is_empty())
    }

    /// True if the peer may close the connection without counting as lost.
    pub fn peer_may_close(&self) -> bool {
        self.peer_left || self.acknowledged
    }

    /// The silence of the peer if it is too long, unless the peer may be silent.
    pub fn too_silent(&mut self, heartbeat: &DueHeartbeat) -> Option<Duration> {
        let silence = self.heard.too_silent(heartbeat);
        if self.stream.is_none() || self.peer_may_close() { None } else { silence }
    }

    /// Sends as many queued bytes as the kernel takes.
    pub fn flush(&mut self) {
        while let (Some(mut stream), false) = (self.stream.as_ref(), self.outgoing.is_empty()) {
            match stream.write(&self.outgoing) {
                Ok(count) => drop(self.outgoing.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Reading will find the end of the connection, after the peer's last messages.
                Err(_) => self.outgoing.clear(),
            }
        }
    }

    /// Closes the connection. It reads the bytes that have arrived before, because closing a socket with unread bytes
    /// resets the connection, and the peer could lose the last message of this rank.
    pub fn close(&mut self) {
        if let Some(stream) = &self.stream {
            let _ = stream.shutdown(Shutdown::Write);
            self.fill();
        }
        self.stream = None;
    }
}
