//! The bytes between a client of the store and its server.
//!
//! A frame is a header of 12 bytes (magic, version, the two lengths that follow; little-endian), a control
//! message in postcard, and a value as it is, which therefore is never encoded element by element. Whatever
//! connects to the port may send anything, so the lengths are checked against their limits before a byte is
//! kept, and memory grows with what has really arrived, not with what a header promises;
//! and before its hello nobody may send a value at all.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::Claim;

/// Longest key.
pub(super) const KEY_LIMIT: usize = 4 << 10;
/// Longest value.
pub(super) const VALUE_LIMIT: usize = 64 << 20;
/// Longest control message: a key, or a claim, or the text of an error.
const CONTROL_LIMIT: usize = 16 << 10;
/// Longest text of an error; the rest of the control message is its frame.
const TEXT_LIMIT: usize = 8 << 10;
/// Longest remark, and how many there may be: together they fit into a control message.
const REMARK_LIMIT: usize = 600;
pub(super) const REMARKS: usize = 16;
const MAGIC: [u8; 4] = *b"BDDP";
const VERSION: u16 = 2;
const HEADER: usize = 12;

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// First on every connection. `client` tells apart the clients of one process; `serves` when the sender
    /// wanted to serve the store itself.
    Hello { claim: Claim, client: u64, serves: bool },
    /// Set the key to the value of the frame.
    Set { key: String },
    /// The value of the key, waiting so long for it.
    Get { key: String, wait_ms: u64 },
    /// Add to the counter.
    Add { key: String, delta: i64 },
    /// What there is to say of processes that are not there.
    Remarks,
    /// The client takes leave with all of its connections; who goes without it is lost.
    Bye,
}

/// What the server answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Response {
    /// Hello, Set or Bye is accepted.
    Done,
    /// The value is the value of the frame.
    Value,
    /// The counter after the addition.
    Count(i64),
    /// One for each process.
    Remarks(Vec<String>),
    /// Nobody set the key in time.
    NotSet,
    /// This hello is not accepted.
    Refused(String),
    /// The store as a whole has failed; by the loss of a rank, if there is one.
    Failed { text: String, lost: Option<Rank> },
    /// Rank 0 has finished. The one message that comes unasked.
    Finished,
}

/// A complete frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    control: Vec<u8>,
    /// The bytes that accompany the control message, often none.
    pub(super) value: Vec<u8>,
}

/// Bytes that are not a frame of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    Foreign,
    Version(u16),
    TooLong,
    Undecodable,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::Foreign => f.write_str("it does not speak the protocol of the burn-ddp store"),
            Malformed::Version(version) => write!(
                f,
                "it speaks version {version} of the store's protocol and this process version {VERSION}: all \
                 ranks must run the same build"
            ),
            Malformed::TooLong => f.write_str("it sent a message over the limit"),
            Malformed::Undecodable => f.write_str("it sent a message that cannot be decoded"),
        }
    }
}

impl Frame {
    /// The control message.
    pub(super) fn message<T: DeserializeOwned>(&self) -> Result<T, Malformed> {
        postcard::from_bytes(&self.control).map_err(|_| Malformed::Undecodable)
    }
}

/// Header and control message of a frame whose value has `value_len` bytes.
pub(super) fn encode(message: &impl Serialize, value_len: usize) -> Result<Vec<u8>> {
    if value_len > VALUE_LIMIT {
        return Err(Error::config(format!(
            "a store value of {value_len} bytes is over the limit of {VALUE_LIMIT}: send large data through \
             the process group"
        )));
    }
    let mut bytes = Vec::from(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; HEADER - 6]);
    bytes = postcard::to_extend(message, bytes)
        .map_err(|error| Error::config(format!("cannot encode a message of the store: {error}")))?;
    let control_len = bytes.len() - HEADER;
    if control_len > CONTROL_LIMIT {
        return Err(Error::config(format!(
            "a store message of {control_len} bytes is over the limit of {CONTROL_LIMIT}: the run id or host \
             name is too long"
        )));
    }
    bytes[6..8].copy_from_slice(&(control_len as u16).to_le_bytes());
    bytes[8..12].copy_from_slice(&(value_len as u32).to_le_bytes());
    Ok(bytes)
}

/// `text`, cut to what an answer can carry.
pub(super) fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_LIMIT));
    text
}

/// `text`, cut to what one of [`REMARKS`] can be.
pub(super) fn remark(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(REMARK_LIMIT));
    text
}

/// Received bytes, cut into frames.
pub(super) struct FrameBuffer {
    bytes: Vec<u8>,
    value_limit: usize,
}

impl Default for FrameBuffer {
    fn default() -> Self {
        Self { bytes: Vec::new(), value_limit: VALUE_LIMIT }
    }
}

impl FrameBuffer {
    /// For a sender that has not introduced itself: it may fill no more memory than a hello takes.
    pub(super) fn at_door() -> Self {
        Self { value_limit: 0, ..Self::default() }
    }

    /// The sender is known now, and may send values.
    pub(super) fn admit(&mut self) {
        self.value_limit = VALUE_LIMIT;
    }

    /// Appends what has arrived.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether nothing has arrived that was not taken.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The next frame, if all of it is here.
    pub(super) fn take(&mut self) -> Result<Option<Frame>, Malformed> {
        let known = self.bytes.len().min(MAGIC.len());
        if self.bytes[..known] != MAGIC[..known] {
            return Err(Malformed::Foreign);
        }
        let Some(&[_, _, _, _, v0, v1, c0, c1, l0, l1, l2, l3]) = self.bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        let control_len = usize::from(u16::from_le_bytes([c0, c1]));
        let value_len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if control_len > CONTROL_LIMIT || value_len > self.value_limit {
            return Err(Malformed::TooLong);
        }
        let value_at = HEADER + control_len;
        if self.bytes.len() < value_at + value_len {
            return Ok(None);
        }
        let rest = self.bytes.split_off(value_at + value_len);
        let mut control = std::mem::replace(&mut self.bytes, rest);
        let value = control.split_off(value_at);
        control.drain(..HEADER);
        Ok(Some(Frame { control, value }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(message: &Request, value: &[u8]) -> Vec<u8> {
        [encode(message, value.len()).unwrap(), value.to_vec()].concat()
    }

    #[test]
    fn frames_are_cut_wherever_the_bytes_were_split() {
        let set = Request::Set { key: "a".into() };
        let get = Request::Get { key: "b".into(), wait_ms: 7 };
        let bytes = [framed(&set, b"value"), framed(&get, b"")].concat();
        for at in 0..bytes.len() {
            let mut buffer = FrameBuffer::default();
            let mut frames = Vec::new();
            for part in [&bytes[..at], &bytes[at..]] {
                buffer.extend(part);
                while let Some(frame) = buffer.take().unwrap() {
                    frames.push(frame);
                }
            }
            assert!(buffer.is_empty());
            assert_eq!(frames[0].message::<Request>().unwrap(), set);
            assert_eq!(frames[0].value, b"value");
            assert_eq!(frames[1].message::<Request>().unwrap(), get);
        }
    }

    #[test]
    fn wrong_bytes_are_refused_from_the_header_alone() {
        let refused = |bytes: &[u8]| {
            let mut buffer = FrameBuffer::default();
            buffer.extend(bytes);
            buffer.take().expect_err("must be refused")
        };
        assert_eq!(refused(b"GET / HTTP/1.1\r\n"), Malformed::Foreign);
        assert_eq!(refused(b"G"), Malformed::Foreign);
        let mut header = framed(&Request::Set { key: String::new() }, b"");
        header.truncate(HEADER);
        let with = |at: usize, byte: u8| {
            let mut header = header.clone();
            header[at] = byte;
            refused(&header)
        };
        assert_eq!(with(4, 9), Malformed::Version(9));
        assert_eq!(with(7, 255), Malformed::TooLong);
        assert_eq!(with(11, 255), Malformed::TooLong);
    }

    #[test]
    fn a_stranger_may_send_no_value() {
        let header = &framed(&Request::Set { key: "key".into() }, b"v")[..HEADER];
        let mut buffer = FrameBuffer::at_door();
        buffer.extend(header);
        assert_eq!(buffer.take(), Err(Malformed::TooLong));
        buffer.admit();
        assert_eq!(buffer.take(), Ok(None));
    }

    #[test]
    fn nonsense_in_a_frame_is_undecodable() {
        let mut bytes = framed(&Request::Set { key: "key".into() }, b"");
        bytes[HEADER] = 99;
        let mut buffer = FrameBuffer::default();
        buffer.extend(&bytes);
        assert_eq!(buffer.take().unwrap().unwrap().message::<Request>(), Err(Malformed::Undecodable));
    }
}
