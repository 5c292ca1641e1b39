//! The first bytes of a connection between two ranks.
//!
//! ```text
//!   hello:            magic  version  length of group  group  purpose  rank
//!                     8      2        4                ...    1        4       bytes; numbers are little-endian
//!   acknowledgement:  magic  rank
//!                     8      4
//! ```
//!
//! Any program may connect to a listening port: health checks, port scans, a rank of another run with an old address.
//! So the listener keeps a connection only after a hello of its own group, and the caller uses it only after the
//! acknowledgement with the rank that it called.

use crate::rank::Rank;

/// Use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Frames of collectives.
    Data = 1,
    /// Heartbeats, aborts and goodbyes.
    Control = 2,
}

impl Purpose {
    pub(super) const ALL: [Purpose; 2] = [Purpose::Data, Purpose::Control];
}

const MAGIC: &[u8; 8] = b"burn-ddp";
/// Version of all bytes that travel between ranks, to be raised with any change of them.
const VERSION: u16 = 1;
/// Bytes before the group's name.
const FIXED: usize = 8 + 2 + 4;
/// Bytes behind it.
const TAIL: usize = 1 + 4;
const ACK: &[u8; 8] = b"ddp-here";
/// Longest name of a group.
pub(super) const LONGEST_GROUP: usize = 1024;

/// Result of parsing the bytes that a caller has sent so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ParsedHello {
    /// The start of a hello of which this many bytes are missing.
    Incomplete(usize),
    /// No hello of this group.
    Foreign,
    /// A complete hello.
    Member(Rank, Purpose),
}

fn opening(group: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FIXED + group.len() + TAIL);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(group.len() as u32).to_le_bytes());
    bytes.extend_from_slice(group.as_bytes());
    bytes
}

/// The hello of `rank`.
pub(super) fn hello(group: &str, rank: Rank, purpose: Purpose) -> Vec<u8> {
    let mut bytes = opening(group);
    bytes.push(purpose as u8);
    bytes.extend_from_slice(&(rank.0 as u32).to_le_bytes());
    bytes
}

/// Parses the bytes that a caller has sent so far. It never asks for more bytes than a hello has.
pub(super) fn parse_hello(bytes: &[u8], group: &str) -> ParsedHello {
    let opening = opening(group);
    let known = bytes.len().min(opening.len());
    if bytes[..known] != opening[..known] {
        return ParsedHello::Foreign;
    }
    let whole = opening.len() + TAIL;
    let [purpose, rank @ ..] = &bytes[known..] else {
        return ParsedHello::Incomplete(whole - bytes.len());
    };
    let Some(purpose) = Purpose::ALL.into_iter().find(|one| *one as u8 == *purpose) else {
        return ParsedHello::Foreign;
    };
    match <[u8; 4]>::try_from(rank) {
        Ok(rank) => ParsedHello::Member(Rank(u32::from_le_bytes(rank) as usize), purpose),
        Err(_) => ParsedHello::Incomplete(whole.saturating_sub(bytes.len())),
    }
}

/// The answer of `rank` to the hello of a member.
pub(super) fn acknowledgement(rank: Rank) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(ACK);
    bytes[8..].copy_from_slice(&(rank.0 as u32).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_heard_at_its_last_byte() {
        let bytes = hello("run/0", Rank(7), Purpose::Control);
        for cut in 0..bytes.len() {
            assert_eq!(parse_hello(&bytes[..cut], "run/0"), ParsedHello::Incomplete(bytes.len() - cut));
        }
        assert_eq!(parse_hello(&bytes, "run/0"), ParsedHello::Member(Rank(7), Purpose::Control));
    }

    #[test]
    fn strangers_are_known_by_their_first_wrong_byte() {
        assert_eq!(parse_hello(b"GET", "run"), ParsedHello::Foreign);
        assert_eq!(parse_hello(&hello("other", Rank(1), Purpose::Data), "run"), ParsedHello::Foreign);
        assert_eq!(parse_hello(&hello("run2", Rank(1), Purpose::Data)[..FIXED], "run"), ParsedHello::Foreign);
        let mut bytes = hello("run", Rank(1), Purpose::Data);
        bytes[FIXED + 3] = 9;
        assert_eq!(parse_hello(&bytes, "run"), ParsedHello::Foreign);
    }
}
