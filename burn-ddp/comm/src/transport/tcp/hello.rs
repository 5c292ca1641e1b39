//! The first bytes on a connection: who calls, for which group, and what for.
//!
//! A listening port hears from anybody: health checks, port scans, a rank of another run that read an old
//! address. A connection counts only when it has introduced itself, and the caller only counts on it when the
//! other side has answered with its own rank.

use crate::rank::Rank;

/// What a connection carries.
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
/// To be raised with any change of what travels between ranks.
const VERSION: u16 = 1;
/// Magic, version, length of the group's name; then its bytes, the purpose and the rank.
const FIXED: usize = 8 + 2 + 4;
const ACK: &[u8; 8] = b"ddp-here";
/// Longest name of a group.
pub(super) const LONGEST_GROUP: usize = 1024;

/// What the bytes of a caller amount to so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Nothing wrong, but this many bytes are missing.
    Lacks(usize),
    /// Not a member of this group.
    Foreign,
    /// A complete introduction.
    Member(Rank, Purpose),
}

fn opening(group: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FIXED + group.len() + 5);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(group.len() as u32).to_le_bytes());
    bytes.extend_from_slice(group.as_bytes());
    bytes
}

/// What `rank` says when it calls.
pub(super) fn hello(group: &str, rank: Rank, purpose: Purpose) -> Vec<u8> {
    let mut bytes = opening(group);
    bytes.push(purpose as u8);
    bytes.extend_from_slice(&(rank.0 as u32).to_le_bytes());
    bytes
}

/// Judges what a caller has said so far; it is never asked for more than an introduction has.
pub(super) fn hear(bytes: &[u8], group: &str) -> Heard {
    let opening = opening(group);
    let known = bytes.len().min(opening.len());
    if bytes[..known] != opening[..known] {
        return Heard::Foreign;
    }
    let whole = opening.len() + 5;
    let [purpose, rank @ ..] = &bytes[known..] else {
        return Heard::Lacks(whole - bytes.len());
    };
    let Some(purpose) = Purpose::ALL.into_iter().find(|one| *one as u8 == *purpose) else {
        return Heard::Foreign;
    };
    match <[u8; 4]>::try_from(rank) {
        Ok(rank) => Heard::Member(Rank(u32::from_le_bytes(rank) as usize), purpose),
        Err(_) => Heard::Lacks(whole.saturating_sub(bytes.len())),
    }
}

/// What `rank` answers to a member's call.
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
            assert_eq!(hear(&bytes[..cut], "run/0"), Heard::Lacks(bytes.len() - cut));
        }
        assert_eq!(hear(&bytes, "run/0"), Heard::Member(Rank(7), Purpose::Control));
    }

    #[test]
    fn strangers_are_known_by_their_first_wrong_byte() {
        assert_eq!(hear(b"GET", "run"), Heard::Foreign);
        assert_eq!(hear(&hello("other", Rank(1), Purpose::Data), "run"), Heard::Foreign);
        assert_eq!(hear(&hello("run2", Rank(1), Purpose::Data)[..FIXED], "run"), Heard::Foreign);
        let mut bytes = hello("run", Rank(1), Purpose::Data);
        bytes[FIXED + 3] = 9;
        assert_eq!(hear(&bytes, "run"), Heard::Foreign);
    }
}
