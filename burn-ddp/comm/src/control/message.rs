//! The messages of the control channel: one byte of kind, four of length, then the body.

use crate::error::{Error, ErrorKind};
use crate::rank::Rank;

/// Longest text of a cause; a longer one is cut.
const LONGEST_TEXT: usize = 16 * 1024;
/// Bytes of kind and length.
const HEADER: usize = 5;
/// Bytes of a cause before its text.
const CAUSE: usize = 5;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The sender is alive.
    Heartbeat,
    /// The group has ended.
    Abort(Cause),
    /// The sender leaves the group without an error.
    Goodbye,
    /// The sender has received the goodbye of the other side. It is the last message to a peer that has said goodbye.
    GoodbyeAcknowledged,
}

/// The first cause of a group's end, as ranks pass it on. It keeps the rank that it is about, so that no chain like
/// "rank 0 failed: rank 1 failed: rank 0 failed" arises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cause {
    /// Set if the rank is lost and not failed.
    lost: bool,
    about: Rank,
    text: String,
}

impl Cause {
    /// The cause of `error`, which `me` sends to others.
    pub fn new(me: Rank, error: &Error) -> Self {
        let (lost, about, mut text) = match error.kind() {
            ErrorKind::PeerLost(peer) => (true, peer, error.to_string()),
            ErrorKind::PeerFailed(peer) => (false, peer, error.to_string()),
            _ => (false, me, format!("{me} failed: {error}")),
        };
        text.truncate(text.floor_char_boundary(LONGEST_TEXT));
        Self { lost, about, text }
    }

    /// The error of rank `me`, which has received this cause from `sender`.
    pub fn into_error(self, me: Rank, sender: Rank) -> Error {
        let Self { lost, about, text } = self;
        // A living rank is not lost to itself: the sender has given it up, and has failed for that reason.
        if about == me {
            return Error::new(ErrorKind::PeerFailed(sender), format!("{sender} failed: {text}"));
        }
        let kind = if lost { ErrorKind::PeerLost(about) } else { ErrorKind::PeerFailed(about) };
        Error::new(kind, text)
    }
}

impl Message {
    /// Appends the message to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let (kind, length) = match self {
            Message::Heartbeat => (1, 0),
            Message::Abort(cause) => (2, CAUSE + cause.text.len()),
            Message::Goodbye => (3, 0),
            Message::GoodbyeAcknowledged => (4, 0),
        };
        out.push(kind);
        out.extend_from_slice(&(length as u32).to_le_bytes());
        if let Message::Abort(Cause { lost, about, text }) = self {
            out.push(u8::from(*lost));
            out.extend_from_slice(&(about.0 as u32).to_le_bytes());
            out.extend_from_slice(text.as_bytes());
        }
    }

    /// Takes the first message off `bytes`, if it is complete.
    ///
    /// # Errors
    /// `Err` when the bytes are no message of this protocol.
    pub fn take(bytes: &mut Vec<u8>) -> Result<Option<Message>, ()> {
        let Some((&[kind, ref length @ ..], rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        let longest = if kind == 2 { CAUSE + LONGEST_TEXT } else { 0 };
        if length > longest {
            return Err(());
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = match kind {
            1 => Message::Heartbeat,
            2 => Message::Abort(cause(body)?),
            3 => Message::Goodbye,
            4 => Message::GoodbyeAcknowledged,
            _ => return Err(()),
        };
        bytes.drain(..HEADER + length);
        Ok(Some(message))
    }
}

fn cause(body: &[u8]) -> Result<Cause, ()> {
    let (&[lost, ref about @ ..], text) = body.split_first_chunk::<CAUSE>().ok_or(())?;
    let text = String::from_utf8(text.to_vec()).map_err(|_| ())?;
    Ok(Cause { lost: lost == 1, about: Rank(u32::from_le_bytes(*about) as usize), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(message: Message) {
        let mut bytes = Vec::new();
        message.write(&mut bytes);
        for cut in 0..bytes.len() {
            assert_eq!(Message::take(&mut bytes[..cut].to_vec()), Ok(None));
        }
        Message::Heartbeat.write(&mut bytes);
        assert_eq!(Message::take(&mut bytes), Ok(Some(message)));
        assert_eq!(Message::take(&mut bytes), Ok(Some(Message::Heartbeat)));
        assert!(bytes.is_empty());
    }

    fn received(error: &Error, sender: Rank, me: Rank) -> Error {
        Cause::new(sender, error).into_error(me, sender)
    }

    #[test]
    fn messages_arrive_as_they_left() {
        let error = Error::new(ErrorKind::Mismatch, "größer");
        for message in
            [Message::Goodbye, Message::GoodbyeAcknowledged, Message::Abort(Cause::new(Rank(3), &error))]
        {
            round_trip(message);
        }
    }

    #[test]
    fn other_bytes_are_refused_before_they_are_stored() {
        for bytes in [&[9, 0, 0, 0, 0][..], &[1, 1, 0, 0, 0], &[2, 255, 255, 255, 255], &[2, 1, 0, 0, 0, 7]] {
            assert_eq!(Message::take(&mut bytes.to_vec()), Err(()), "{bytes:?}");
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let error = Error::new(ErrorKind::Io, "ä".repeat(LONGEST_TEXT));
        let cause = Cause::new(Rank(10), &error);
        assert!(cause.text.len() <= LONGEST_TEXT);
        round_trip(Message::Abort(cause));
    }

    #[test]
    fn the_origin_stays_however_often_it_is_told() {
        let first = received(&Error::new(ErrorKind::Mismatch, "x"), Rank(1), Rank(0));
        let second = received(&first, Rank(0), Rank(2));
        for error in [first, second] {
            assert_eq!(error.kind(), ErrorKind::PeerFailed(Rank(1)));
            assert_eq!(error.to_string(), "rank 1 failed: x");
        }
        let lost = Error::new(ErrorKind::PeerLost(Rank(2)), "rank 2 is lost");
        assert_eq!(received(&lost, Rank(1), Rank(0)).kind(), ErrorKind::PeerLost(Rank(2)));
        let given_up = received(&lost, Rank(1), Rank(2));
        assert_eq!(given_up.kind(), ErrorKind::PeerFailed(Rank(1)));
        assert_eq!(given_up.to_string(), "rank 1 failed: rank 2 is lost");
    }
}
