//! How ranks find each other: everybody publishes one record and gets the records of all.
//!
//! All ranks wait on one key, `complete`, which the last to arrive sets. So an error found by one rank (a rank
//! taken twice, another world size) is published under the same key and reaches the others at once, where a
//! wait for each peer's own key would run into its deadline.

use std::net::{IpAddr, TcpListener};
use std::time::Duration;

use if_addrs::Interface;
use serde::{Deserialize, Serialize};

use crate::deadline::{Deadline, seconds};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::store::Store;
use crate::transport::PeerInfo;

const COMPLETE: &str = "complete";
const ARRIVED: &str = "arrived";
/// So many world sizes of this limit can be added up in the upper half of a counter.
const WORLD_LIMIT: usize = 1 << 15;
/// Ranks listed in a message before the rest is only counted.
const LISTED: usize = 16;

/// What `complete` holds.
#[derive(Serialize, Deserialize)]
enum Outcome {
    /// The records of all ranks, in the order of their ranks.
    All(Vec<PeerInfo>),
    /// What is wrong with the group.
    Refused(String),
}

/// Publishes `me` and returns the records of all `world_size` ranks, in their order, once all have come, which
/// they have to by `deadline`.
///
/// The keys are used once: give every exchange over one store a
/// [`PrefixStore`](crate::store::PrefixStore) of its own.
///
/// # Errors
/// `Config` on every rank when a rank is taken twice or the world sizes differ; `Timeout` naming the ranks that
/// have not come, and the errors of the store.
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
        store.set(COMPLETE, &encode(&Outcome::Refused(problem))?)?;
    }
    let bytes = match store.get(COMPLETE, deadline.remaining()) {
        Err(error) if error.kind() == ErrorKind::Timeout => {
            return Err(absence(store, world_size, deadline.limit()).unwrap_or(error));
        }
        other => other?,
    };
    match decode(&bytes)? {
        Outcome::All(peers) => Ok(peers),
        Outcome::Refused(problem) => Err(Error::config(problem)),
    }
}

/// Ends an exchange for all who still wait in it: `me` cannot take part, because of `error`.
pub fn refuse(store: &dyn Store, me: Rank, error: &Error) -> Result<()> {
    store.set(COMPLETE, &encode(&Outcome::Refused(format!("{me} failed: {error}")))?)
}

/// Publishes `me`, and all records if it is the last. Returns what is wrong with the group, if anything is.
fn arrive(store: &dyn Store, me: &PeerInfo, world_size: usize, deadline: Deadline) -> Result<Option<String>> {
    if store.add(&format!("claimed/{}", me.rank.0), 1)? > 1 {
        // The first of the two may be about to publish itself; without its name the message is still true.
        let wait = deadline.remaining().min(Duration::from_secs(1));
        let first = match store.get(&record_key(me.rank), wait) {
            Ok(bytes) => decode::<PeerInfo>(&bytes)?.to_string(),
            Err(error) if error.kind() == ErrorKind::Timeout => "another process".into(),
            Err(error) => return Err(error),
        };
        return Ok(Some(format!(
            "{} is claimed twice: by {first} and by {me}; give every process a RANK of its own",
            me.rank
        )));
    }
    store.set(&record_key(me.rank), &encode(me)?)?;
    // Arrivals and the sum of their world sizes are one counter, so that the first rank with another size
    // than those before it is found by itself, in whatever order they come.
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
        store.set(COMPLETE, &encode(&Outcome::All(records))?)?;
    }
    Ok(None)
}

/// The error for a wait that has ended, naming who is missing; `None` if the store does not tell.
fn absence(store: &dyn Store, world_size: usize, limit: Duration) -> Option<Error> {
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
        listed(&missing)
    };
    let mut text = format!(
        "waited {} s; missing: {missing} of {world_size}; present: {}",
        seconds(limit),
        listed(&present)
    );
    for remark in store.remarks() {
        text.push_str("; ");
        text.push_str(&remark);
    }
    Some(Error::new(ErrorKind::Timeout, text))
}

fn listed(names: &[String]) -> String {
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
    decode(&store.get(&record_key(rank), Duration::ZERO)?)
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|error| Error::config(format!("cannot encode a rendezvous record: {error}")))
}

fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("the store holds a rendezvous record of another form ({error}): all ranks must run the same build"),
        )
    })
}

/// The address to advertise to peers and to listen on: `seen`, the local end of the connection to the store,
/// unless BURN_DDP_IFACE made a `choice`, which is the name of an interface or an address of this host.
///
/// # Errors
/// `Config` naming the interfaces of this host when the choice is none of them, or when there is no choice and
/// `seen` is a link-local address, which means nothing to peers.
pub fn local_address(choice: Option<&str>, seen: IpAddr) -> Result<IpAddr> {
    let seen = seen.to_canonical();
    let Some(choice) = choice.map(str::trim) else {
        // Only this host knows through which of its interfaces.
        if matches!(seen, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
            return Err(Error::config(format!(
                "MASTER_ADDR leads through {seen}, an address that peers cannot use (it is link-local): set \
                 BURN_DDP_IFACE to an interface with another address, or MASTER_ADDR to another address"
            )));
        }
        return Ok(seen);
    };
    let interfaces = if_addrs::get_if_addrs().map_err(|error| {
        Error::io(format!("cannot list the interfaces for BURN_DDP_IFACE={choice}"), error)
    })?;
    if let Ok(address) = choice.parse::<IpAddr>() {
        // Whether an address is ours is not in the list: all of 127.0.0.0/8 is, with one entry.
        return match TcpListener::bind((address, 0)) {
            Ok(_) => Ok(address),
            Err(error) => {
                Err(no_such(choice, &format!("not an address of this host ({error})"), &interfaces))
            }
        };
    }
    let mut found: Vec<IpAddr> = interfaces
        .iter()
        .filter(|interface| interface.name == choice)
        // A link-local address means nothing without the interface, which no peer can know.
        .filter(|interface| !interface.is_link_local())
        .map(Interface::ip)
        .collect();
    // The family of the store's connection is known to work.
    found.sort_by_key(|ip| (ip.is_ipv4() != seen.is_ipv4(), ip.is_ipv6()));
    found.first().copied().ok_or_else(|| no_such(choice, "no interface with an address", &interfaces))
}

fn no_such(choice: &str, problem: &str, interfaces: &[Interface]) -> Error {
    let found: Vec<String> =
        interfaces.iter().map(|interface| format!("{} {}", interface.name, interface.ip())).collect();
    Error::config(format!(
        "BURN_DDP_IFACE={choice}: {problem}; this host has {}",
        if found.is_empty() { "no interface".into() } else { found.join(", ") }
    ))
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

    #[test]
    fn the_address_is_seen_or_chosen() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(local_address(None, ip("10.1.2.3")).unwrap(), ip("10.1.2.3"));
        assert_eq!(local_address(None, ip("::ffff:10.1.2.3")).unwrap(), ip("10.1.2.3"));
        assert_eq!(local_address(Some("127.0.0.2"), ip("10.1.2.3")).unwrap(), ip("127.0.0.2"));
        let error = local_address(None, ip("fe80::1")).expect_err("of one link only");
        assert!(error.to_string().contains("BURN_DDP_IFACE"), "{error}");
        let interfaces = if_addrs::get_if_addrs().unwrap();
        let lo = interfaces.iter().find(|interface| interface.ip() == ip("127.0.0.1")).unwrap();
        assert_eq!(local_address(Some(&lo.name), ip("10.1.2.3")).unwrap(), ip("127.0.0.1"));
        for choice in ["nosuch0", "192.0.2.1", ""] {
            let error = local_address(Some(choice), ip("10.1.2.3")).expect_err("not of this host");
            assert_eq!(error.kind(), ErrorKind::Config);
            for word in [format!("BURN_DDP_IFACE={choice}"), format!("{} 127.0.0.1", lo.name)] {
                assert!(error.to_string().contains(&word), "{error} lacks {word}");
            }
        }
    }
}
