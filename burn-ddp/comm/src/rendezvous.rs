//! Rendezvous: each rank publishes a record of itself in the store and gets the records of all.
//!
//! ```text
//!   1  add 1 to claimed/RANK             more than 1: two processes claim this rank        ──┐
//!   2  set record/RANK                                                                       │ set complete to
//!   3  add 1, and the own world size     the sum shows that the ranks have other world sizes ┤ Refused
//!      in the upper half, to arrived     all have arrived: set complete to All(records)      │
//!   4  get complete: the records of all ranks, or the error ───────────────────<─────────────┘
//! ```
//!
//! All ranks wait for one key, so the error that one rank finds reaches the others at once. If each waited for the
//! record of every peer, they would run into their deadlines.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use derive_new::new;
use serde::{Deserialize, Serialize};

use crate::deadline::{Deadline, seconds};
use crate::error::{Error, ErrorKind, Result};
use crate::net::codec;
use crate::rank::Rank;
use crate::store::Store;

const COMPLETE: &str = "complete";
const ARRIVED: &str = "arrived";
/// Largest world size; so many of them can be added up in the upper half of a counter.
const WORLD_LIMIT: usize = 1 << 15;
/// Most ranks that a message lists; it counts the rest.
const LISTED: usize = 16;

/// Name of all values in the store in errors.
const RECORD: &str = "a rendezvous record in the store";

/// One rank as its peers see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, new)]
pub struct PeerInfo {
    /// Its position in the group.
    pub rank: Rank,
    /// Name of its host.
    #[new(into)]
    pub host: String,
    /// Its process id on that host.
    pub pid: u32,
    /// Address at which it accepts connections of its peers.
    pub address: SocketAddr,
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {} on host {})", self.rank, self.pid, self.host)
    }
}

/// Value of the key `complete`.
#[derive(Serialize, Deserialize)]
enum Completion {
    /// The records of all ranks, in rank order.
    All(Vec<PeerInfo>),
    /// The error of all ranks.
    Refused(String),
}

/// Publishes `me`, waits until all `world_size` ranks have arrived, at most until `deadline`, and returns their records
/// in rank order.
///
/// The keys are used once: give every exchange a [`PrefixStore`](crate::store::PrefixStore) of its own.
///
/// # Errors
/// `Config` on every rank when a rank is claimed twice or the world sizes differ; `Timeout` naming the ranks that have
/// not arrived, and the errors of the store.
pub fn exchange(
    store: &dyn Store,
    me: &PeerInfo,
    world_size: usize,
    deadline: Deadline,
) -> Result<Vec<PeerInfo>> {
    if me.rank.0 >= world_size || world_size > WORLD_LIMIT {
        return Err(Error::config(format!(
            "{} in a world of {world_size}: ranks go from 0 to WORLD_SIZE - 1, and WORLD_SIZE to {WORLD_LIMIT}",
            me.rank
        )));
    }
    if let Some(problem) = arrive(store, me, world_size, deadline)? {
        store.set(COMPLETE, &codec::encode(RECORD, &Completion::Refused(problem))?)?;
    }
    let bytes = match store.get(COMPLETE, deadline.remaining()) {
        Err(error) if error.kind() == ErrorKind::Timeout => {
            return Err(missing_ranks(store, world_size, deadline.limit()).unwrap_or(error));
        }
        other => other?,
    };
    match codec::decode(RECORD, &bytes)? {
        Completion::All(peers) => Ok(peers),
        Completion::Refused(problem) => Err(Error::config(problem)),
    }
}

/// Fails the exchange of all other ranks: `me` cannot take part, because of `error`.
///
/// # Errors
/// Those of the store.
pub(crate) fn refuse(store: &dyn Store, me: Rank, error: &Error) -> Result<()> {
    store.set(COMPLETE, &codec::encode(RECORD, &Completion::Refused(format!("{me} failed: {error}")))?)
}

/// Publishes `me`, and all records if it is the last to arrive. Returns the error of the group, if it finds one.
fn arrive(store: &dyn Store, me: &PeerInfo, world_size: usize, deadline: Deadline) -> Result<Option<String>> {
    if store.add(&format!("claimed/{}", me.rank.0), 1)? > 1 {
        // The first of the two may be about to publish its record; without it the message is only less precise.
        let wait = deadline.remaining().min(Duration::from_secs(1));
        let first = match store.get(&record_key(me.rank), wait) {
            Ok(bytes) => codec::decode::<PeerInfo>(RECORD, &bytes)?.to_string(),
            Err(error) if error.kind() == ErrorKind::Timeout => "another process".into(),
            Err(error) => return Err(error),
        };
        return Ok(Some(format!(
            "{} is claimed twice: by {first} and by {me}; give every process a RANK of its own",
            me.rank
        )));
    }
    store.set(&record_key(me.rank), &codec::encode(RECORD, me)?)?;
    // Arrivals and the sum of their world sizes are one counter, so that the first rank whose size differs from those
    // before it finds the difference, in any order of arrival.
    let total = store.add(ARRIVED, ((world_size as i64) << 32) + 1)?;
    let (arrived, sum) = (total & 0xFFFF_FFFF, total >> 32);
    if sum != arrived * world_size as i64 {
        return Ok(Some(format!(
            "ranks disagree on the number of processes: {me} has WORLD_SIZE={world_size}, another rank has \
             another value"
        )));
    }
    if arrived == world_size as i64 {
        let records = (0..world_size).map(|rank| record(store, Rank(rank))).collect::<Result<Vec<_>>>()?;
        store.set(COMPLETE, &codec::encode(RECORD, &Completion::All(records))?)?;
    }
    Ok(None)
}

/// The error of a wait that timed out, which names the missing ranks; `None` if the store fails.
fn missing_ranks(store: &dyn Store, world_size: usize, limit: Duration) -> Option<Error> {
    let (mut present, mut missing) = (Vec::new(), Vec::new());
    for rank in (0..world_size).map(Rank) {
        match record(store, rank) {
            Ok(peer) => present.push(peer.to_string()),
            Err(error) if error.kind() == ErrorKind::Timeout => missing.push(rank.to_string()),
            Err(_) => return None,
        }
    }
    let missing = if missing.is_empty() {
        "no rank, but the last to arrive did not finish".into()
    } else {
        list_of(&missing)
    };
    let mut text = format!(
        "waited {} s; missing: {missing} of {world_size}; present: {}",
        seconds(limit),
        list_of(&present)
    );
    for remark in store.remarks() {
        text.push_str("; ");
        text.push_str(&remark);
    }
    Some(Error::new(ErrorKind::Timeout, text))
}

fn list_of(names: &[String]) -> String {
    let shown = names[..names.len().min(LISTED)].join(", ");
    match names.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn record_key(rank: Rank) -> String {
    format!("record/{}", rank.0)
}

fn record(store: &dyn Store, rank: Rank) -> Result<PeerInfo> {
    codec::decode(RECORD, &store.get(&record_key(rank), Duration::ZERO)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MemoryStore, PrefixStore};
    use std::sync::Arc;
    use std::time::Instant;

    fn peer(rank: usize) -> PeerInfo {
        let address = ([127, 0, 0, 1], 4000 + rank as u16).into();
        PeerInfo::new(Rank(rank), "here", 100 + rank as u32, address)
    }

    /// One thread for each (rank, world size); results in the order given.
    fn run(ranks: &[(usize, usize)], timeout: Duration) -> Vec<Result<Vec<PeerInfo>>> {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .iter()
                .map(|&(rank, world)| {
                    let store = store.clone();
                    scope.spawn(move || exchange(&store, &peer(rank), world, Deadline::after(timeout)))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn everybody_gets_all_records_in_order() {
        for result in run(&[(3, 4), (1, 4), (0, 4), (2, 4)], Duration::from_secs(20)) {
            assert_eq!(result.unwrap(), (0..4).map(peer).collect::<Vec<_>>());
        }
        assert_eq!(run(&[(0, 1)], Duration::ZERO)[0].as_ref().unwrap(), &[peer(0)]);
    }

    #[test]
    fn who_cannot_take_part_ends_the_wait_of_the_others() {
        let store = MemoryStore::default();
        let waiting = store.clone();
        let limit = Deadline::after(Duration::from_secs(20));
        let thread = std::thread::spawn(move || exchange(&waiting, &peer(0), 2, limit));
        refuse(&store, Rank(1), &Error::config("no file descriptors")).unwrap();
        let error = thread.join().unwrap().unwrap_err().to_string();
        assert_eq!(error, "rank 1 failed: no file descriptors");
        assert!(limit.remaining() > Duration::from_secs(10));
    }

    #[test]
    fn the_missing_are_named() {
        for result in run(&[(0, 4), (2, 4)], Duration::from_millis(300)) {
            let error = result.expect_err("two of four");
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            assert!(text.contains("waited 0.3 s; missing: rank 1, rank 3 of 4; present: rank 0"), "{text}");
        }
    }

    /// A store that knows why a rank is missing.
    struct Knowing(MemoryStore);

    impl Store for Knowing {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.0.set(key, value)
        }

        fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
            self.0.get(key, timeout)
        }

        fn add(&self, key: &str, delta: i64) -> Result<i64> {
            self.0.add(key, delta)
        }

        fn remarks(&self) -> Vec<String> {
            vec!["refused: rank 1 because of this".into(), "refused: rank 1 because of that".into()]
        }
    }

    #[test]
    fn what_the_store_knows_of_the_missing_is_said() {
        let store = PrefixStore::new(Arc::new(Knowing(MemoryStore::default())), "group");
        let deadline = Deadline::after(Duration::from_millis(100));
        let error = exchange(&store, &peer(0), 2, deadline).expect_err("rank 1 is missing");
        let end = "on host here); refused: rank 1 because of this; refused: rank 1 because of that";
        assert!(error.to_string().starts_with("waited 0.1 s; missing: rank 1 of 2"), "{error}");
        assert!(error.to_string().ends_with(end), "{error}");
    }

    fn all_refused_at_once(ranks: &[(usize, usize)], words: &[&str]) {
        let start = Instant::now();
        for result in run(ranks, Duration::from_secs(20)) {
            let error = result.expect_err("must be refused");
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            for word in words {
                assert!(error.to_string().contains(word), "{error} lacks {word}");
            }
        }
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    }

    #[test]
    fn a_rank_taken_twice_is_an_error_for_all() {
        all_refused_at_once(&[(0, 3), (1, 3), (1, 3)], &["rank 1 is claimed twice", "pid 101 on host here"]);
    }

    #[test]
    fn another_world_size_is_an_error_for_all() {
        all_refused_at_once(&[(0, 3), (1, 4)], &["WORLD_SIZE="]);
        all_refused_at_once(&[(0, 4), (1, 3), (2, 3)], &["WORLD_SIZE="]);
    }

    #[test]
    fn a_rank_outside_of_its_world_is_refused() {
        all_refused_at_once(&[(2, 2)], &["rank 2", "world of 2"]);
    }
}
