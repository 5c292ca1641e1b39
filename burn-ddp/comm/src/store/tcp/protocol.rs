//! The bytes between a client of the store and its server.
//!
//! ```text
//!   magic   version   length of message   length of value   message   value
//!   4       2         2                   4                 ...       ...     bytes; numbers are little-endian
//! ```
//!
//! Messages are encoded, values travel as they are. Any program may connect to the port and send anything. So both
//! lengths are checked against their limits as soon as the header is there, memory grows with the bytes that have
//! arrived and not with those that a header announces, and a client may send values only after its hello.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::net::codec;
use crate::rank::Rank;
use crate::store::claim::Claim;

/// Longest key.
pub(super) const KEY_LIMIT: usize = 4 << 10;
/// Longest value.
pub(super) const VALUE_LIMIT: usize = 64 << 20;
/// Longest message, which holds a key, a claim, the text of an error, or the remarks.
const MESSAGE_LIMIT: usize = 16 << 10;
/// Longest text of an error.
const TEXT_LIMIT: usize = 8 << 10;
/// Longest remark.
const REMARK_LIMIT: usize = 600;
/// Most remarks; so many of the longest fit into a message.
pub(super) const REMARKS: usize = 16;
const MAGIC: [u8; 4] = *b"BDDP";
const VERSION: u16 = 2;
/// Bytes of a header.
const HEADER: usize = 12;
/// Name of the messages in errors.
const MESSAGE: &str = "a message of the store";

/// Request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// First request on every connection. `client` numbers the clients of a process; `serves` is set if the sender
    /// tried to serve the store itself.
    Hello { claim: Claim, client: u64, serves: bool },
    /// Sets the key to the value of the frame.
    Set { key: String },
    /// Asks for the value of the key and waits for it.
    Get { key: String, wait_ms: u64 },
    /// Adds to the counter.
    Add { key: String, delta: i64 },
    /// Asks for the facts about absent processes.
    Remarks,
    /// Ends all connections of the client. A process that ends without it is lost.
    Bye,
}

/// Answer of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Response {
    /// Hello, Set or Bye was accepted.
    Done,
    /// The value is the value of the frame.
    Value,
    /// The counter after the addition.
    Count(i64),
    /// One fact about each absent process.
    Remarks(Vec<String>),
    /// No process set the key in time.
    NotSet,
    /// The hello was refused.
    Refused(String),
    /// The store has failed; `lost` is the rank whose loss is the cause, if there is one.
    Failed { text: String, lost: Option<Rank> },
    /// Rank 0 has finished. The only message that answers no request.
    Finished,
}

/// A complete frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StoreFrame {
    message: Vec<u8>,
    /// The value that goes with the message; often empty.
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

impl StoreFrame {
    /// Decodes the message.
    pub(super) fn message<T: DeserializeOwned>(&self) -> Result<T, Malformed> {
        codec::decode(MESSAGE, &self.message).map_err(|_| Malformed::Undecodable)
    }
}

/// Header and message of a frame whose value has `value_len` bytes.
///
/// # Errors
/// `Config` when message or value are over their limits.
pub(super) fn encode(message: &impl Serialize, value_len: usize) -> Result<Vec<u8>> {
    if value_len > VALUE_LIMIT {
        return Err(Error::config(format!(
            "a store value of {value_len} bytes is over the limit of {VALUE_LIMIT}: send large data through \
             the process group"
        )));
    }
    let message = codec::encode(MESSAGE, message)?;
    if message.len() > MESSAGE_LIMIT {
        return Err(Error::config(format!(
            "a store message of {} bytes is over the limit of {MESSAGE_LIMIT}: the run id or host name is too long",
            message.len()
        )));
    }
    let mut bytes = Vec::with_capacity(HEADER + message.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((message.len() as u16).to_le_bytes());
    bytes.extend((value_len as u32).to_le_bytes());
    bytes.extend(message);
    Ok(bytes)
}

/// `text`, cut to the longest that an answer can carry.
pub(super) fn cut_text(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_LIMIT));
    text
}

/// `text`, cut to the longest of a remark.
pub(super) fn cut_remark(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(REMARK_LIMIT));
    text
}

/// Cuts received bytes into frames.
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
    /// A buffer that refuses frames with a value: a sender that has not sent its hello may fill no more memory than
    /// one.
    pub(super) fn without_values() -> Self {
        Self { value_limit: 0, ..Self::default() }
    }

    /// Accepts frames with a value from now on.
    pub(super) fn allow_values(&mut self) {
        self.value_limit = VALUE_LIMIT;
    }

    /// Appends received bytes.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// True if all received bytes were taken as frames.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the next frame, if it is complete.
    ///
    /// # Errors
    /// The reason for which the bytes are no frame of this protocol.
    pub(super) fn take(&mut self) -> Result<Option<StoreFrame>, Malformed> {
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
        let message_len = usize::from(u16::from_le_bytes([c0, c1]));
        let value_len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if message_len > MESSAGE_LIMIT || value_len > self.value_limit {
            return Err(Malformed::TooLong);
        }
        let value_at = HEADER + message_len;
        if self.bytes.len() < value_at + value_len {
            return Ok(None);
        }
        let rest = self.bytes.split_off(value_at + value_len);
        let mut message = std::mem::replace(&mut self.bytes, rest);
        let value = message.split_off(value_at);
        message.drain(..HEADER);
        Ok(Some(StoreFrame { message, value }))
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
        let mut buffer = FrameBuffer::without_values();
        buffer.extend(header);
        assert_eq!(buffer.take(), Err(Malformed::TooLong));
        buffer.allow_values();
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
