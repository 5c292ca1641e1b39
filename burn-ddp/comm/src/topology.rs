//! The ranks of a group by host, and the memory that the ranks of a host share. It is found out before the collectives
//! are made, and given to them.
//!
//! All ranks tell each other what they need, over the transport they already have, and compute the same hosts from it:
//!
//! ```text
//! exchange 1   host name, address of this rank's listener, cores, limits
//!              each rank connects to the lowest rank of its host's name that it can reach
//! exchange 2   the rank that was reached (itself if none)        ─▶ hosts: ranks by the rank that they have reached
//!              the first rank of each host reserves memory and sends it to the others
//! exchange 3   the reason if that has failed                     ─▶ a host that failed is divided into single ranks
//! ```
//!
//! Two ranks are on one host if they give the same name for it and one can connect to the other's socket, which is
//! tried and not guessed. If a host cannot provide the memory, all of its ranks do without it, and its first rank
//! warns.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{codec, host};
use crate::operation::Operation;
use crate::options::TransportKind;
use crate::rank::Rank;
use crate::shm::{ComputeHint, RegionLayout, SharedRegion, ShmAddress, ShmConnection, ShmListener};
use crate::transport::exchange::Exchange;
use crate::transport::{Header, Liveness, Transport};

/// Sequence number of the first of the three exchanges. The first operation of the collectives is number 0, and numbers
/// never go down, because they tell which rank is ahead: so the exchanges have the numbers before 0, wrapped around.
const FIRST_EXCHANGE: u64 = 3u64.wrapping_neg();

/// The shared memory that one rank asks for.
#[derive(Clone, Debug)]
pub struct ShmOptions {
    /// [`TransportKind::Tcp`] asks for none, `Auto` for what can be had, `Shm` for all or an error.
    pub transport: TransportKind,
    /// The host that it takes itself to be on; it shares memory with peers that give the same name only.
    pub host: String,
    /// Most bytes that the ranks of one host may reserve together.
    pub limit: Option<usize>,
    /// The flag that the shared memory of this rank reads.
    pub compute: ComputeHint,
}

/// The ranks of a group by host, and the memory that this rank shares with the others of its host.
pub struct Topology {
    /// Ranks that share memory, in ascending order; hosts in the order of their first ranks.
    pub(crate) hosts: Vec<Vec<Rank>>,
    /// The memory that this rank shares with the others of its host, if there are any.
    pub(crate) region: Option<SharedRegion>,
}

impl Topology {
    /// The topology of `world_size` ranks that share no memory.
    pub fn separate(world_size: usize) -> Self {
        Self { hosts: (0..world_size).map(|rank| vec![Rank(rank)]).collect(), region: None }
    }

    /// Finds the ranks that share this host's memory, and shares it with them. All ranks call it, over a transport that
    /// connects all of them, by `deadline`.
    ///
    /// # Errors
    /// The error that ended an exchange; on all ranks `Io` naming rank and reason if one that asked for
    /// [`TransportKind::Shm`] cannot share memory with all ranks of its host's name. For [`TransportKind::Auto`] that
    /// is a warning.
    pub fn discover(
        transport: &mut dyn Transport,
        options: &ShmOptions,
        liveness: &Liveness,
        deadline: Deadline,
    ) -> Result<Self> {
        let (me, world_size) = (transport.rank().0, transport.world_size());
        let mut setup = Setup { transport, sequence: FIRST_EXCHANGE, deadline };
        let wanted = options.transport != TransportKind::Tcp && world_size > 1;
        let listener = wanted.then(|| ShmListener::bind(world_size)).transpose();
        let all = setup.all_gather(&HostReport::new(options, &listener))?;
        let listener = listener.unwrap_or_default();
        let connection = listener.as_ref().and_then(|_| connect_to_first(&all, me));
        let (first, connection) =
            connection.map_or((me, None), |(rank, connection)| (rank, Some(connection)));
        let hosts = group_by_host(&setup.all_gather(&first)?)?;
        let host = &hosts[host_of(&hosts, Rank(me))];
        // Half of the time that is left: if the memory is not there in time, all ranks have to hear of it and use TCP.
        let soon = Deadline::after(deadline.remaining() / 2);
        let shared = (host.len() > 1).then(|| {
            let layout = layout(host, &all)?;
            let mapping = match (listener, connection) {
                (_, Some(connection)) => connection.receive(&layout, liveness, soon)?,
                (Some(listener), None) => listener.share(&layout, liveness, soon)?,
                (None, None) => return Err(Error::new(ErrorKind::Io, "no way to the memory of this host")),
            };
            let position = host.iter().position(|rank| rank.0 == me).unwrap_or(0);
            Ok(SharedRegion::new(layout, position, mapping, liveness.clone(), options.compute.clone()))
        });
        let trouble = shared.as_ref().and_then(|shared| shared.as_ref().err()).map(ToString::to_string);
        let troubles: Vec<Option<String>> = setup.all_gather(&trouble)?;
        let hosts = match divide(hosts, &all, &troubles, me) {
            Ok(hosts) => hosts,
            Err(error) => {
                // All ranks come to the same error, and none leaves before all have.
                let _ = setup.exchange(Operation::Barrier).barrier();
                return Err(error);
            }
        };
        let region = if hosts[host_of(&hosts, Rank(me))].len() > 1 { shared.transpose()? } else { None };
        tracing::info!("{} of {world_size}: {}", Rank(me), describe(&hosts));
        Ok(Self { hosts, region })
    }

    /// True if any two ranks share memory.
    pub(crate) fn shares_memory(&self) -> bool {
        self.hosts.iter().any(|host| host.len() > 1)
    }
}

/// Index of the host that has `rank`.
pub(crate) fn host_of(hosts: &[Vec<Rank>], rank: Rank) -> usize {
    hosts.iter().position(|host| host.contains(&rank)).unwrap_or(0)
}

/// The name of what ranks exchange, in errors.
const MESSAGE: &str = "what a peer says of its host";

/// The exchanges of all ranks before the first operation.
struct Setup<'a> {
    transport: &'a mut dyn Transport,
    /// Of the next exchange.
    sequence: u64,
    deadline: Deadline,
}

impl Setup<'_> {
    fn exchange(&mut self, operation: Operation) -> Exchange<'_> {
        let header = Header::new(operation, self.sequence, DType::U8, 0);
        self.sequence = self.sequence.wrapping_add(1);
        let deadline = Deadline::after(self.deadline.remaining());
        Exchange { transport: &mut *self.transport, header, deadline }
    }

    /// Tells all ranks `mine`; returns what all of them tell, in rank order.
    fn all_gather<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>> {
        let mine = codec::encode(MESSAGE, mine)?;
        let all = self.exchange(Operation::AllGatherBytes).gather_bytes(None, &mine)?;
        all.iter().map(|bytes| codec::decode(MESSAGE, bytes)).collect()
    }
}

/// The facts that a rank tells of itself and its host.
#[derive(Serialize, Deserialize)]
struct HostReport {
    required: bool,
    host: String,
    address: Option<ShmAddress>,
    /// Numbers of the cores on which it may run.
    cores: Vec<u32>,
    /// Count of cores that it may use: those in `cores`, or fewer by a quota (of a cgroup).
    quota: usize,
    limit: Option<usize>,
    /// Why it has no address if it wanted one.
    trouble: Option<String>,
}

impl HostReport {
    fn new(options: &ShmOptions, listener: &Result<Option<ShmListener>>) -> Self {
        let address = listener.as_ref().ok().and_then(Option::as_ref).map(ShmListener::address);
        Self {
            required: options.transport == TransportKind::Shm,
            host: options.host.clone(),
            address: address.cloned(),
            cores: host::cores(),
            quota: std::thread::available_parallelism().map_or(1, usize::from),
            limit: options.limit,
            trouble: listener.as_ref().err().map(ToString::to_string),
        }
    }
}

/// Connects to the first rank before `me` that is on the same host: one of the same host name that can be reached.
fn connect_to_first(all: &[HostReport], me: usize) -> Option<(usize, ShmConnection)> {
    let mut named = (0..me).filter(|rank| all[*rank].host == all[me].host);
    named.find_map(|rank| Some((rank, ShmConnection::connect(all[rank].address.as_ref()?).ok()?)))
}

/// Ranks by the rank that they have reached. A rank that has reached one that itself reached another stays alone.
///
/// # Errors
/// `Mismatch` for a rank that says that it has reached a later one.
fn group_by_host(firsts: &[usize]) -> Result<Vec<Vec<Rank>>> {
    if let Some((rank, first)) = firsts.iter().enumerate().find(|(rank, first)| *first > rank) {
        let text = format!("{} says that it has reached rank {first}", Rank(rank));
        return Err(Error::new(ErrorKind::Mismatch, text));
    }
    let mut hosts: Vec<Vec<Rank>> = Vec::new();
    for (rank, first) in firsts.iter().enumerate() {
        let first = if firsts[*first] == *first { *first } else { rank };
        match hosts.iter_mut().find(|host| host[0].0 == first) {
            Some(host) => host.push(Rank(rank)),
            None => hosts.push(vec![Rank(rank)]),
        }
    }
    Ok(hosts)
}

/// The layout of the memory of `host`.
fn layout(host: &[Rank], all: &[HostReport]) -> Result<RegionLayout> {
    let layout = RegionLayout { members: host.to_vec(), cores: shared_cores(host, all) };
    let limit = host.iter().filter_map(|rank| all[rank.0].limit).min();
    match limit.filter(|limit| *limit < layout.bytes()) {
        None => Ok(layout),
        Some(limit) => Err(Error::new(
            ErrorKind::Io,
            format!(
                "shared memory for {} ranks takes {} bytes, but {limit} are allowed",
                host.len(),
                layout.bytes()
            ),
        )),
    }
}

/// Divides each host that had trouble into single ranks. All ranks come to the same result.
///
/// # Errors
/// `Io` for a rank that requires shared memory and has it not with all ranks of its host's name.
fn divide(
    hosts: Vec<Vec<Rank>>,
    all: &[HostReport],
    troubles: &[Option<String>],
    me: usize,
) -> Result<Vec<Vec<Rank>>> {
    let mut divided = Vec::new();
    for host in hosts {
        // The first rank reserves the memory, so its reason says more than those of ranks that receive nothing.
        match host.iter().find_map(|rank| troubles[rank.0].as_ref()) {
            None => divided.push(host),
            Some(text) => {
                let refused = host.iter().any(|rank| all[rank.0].required);
                if host[0].0 == me && !refused {
                    tracing::warn!("{text}: the {} ranks of host {} talk over TCP", host.len(), all[me].host);
                }
                divided.extend(host.into_iter().map(|rank| vec![rank]));
            }
        }
    }
    divided.sort_by_key(|host| host[0]);
    for host in &divided {
        for rank in host.iter().filter(|rank| all[rank.0].required) {
            let name = &all[rank.0].host;
            let named = || (0..all.len()).filter(|other| all[*other].host == *name);
            let Some(other) = named().map(Rank).find(|other| !host.contains(other)) else { continue };
            let reason =
                named().find_map(|rank| all[rank].trouble.as_ref().or(troubles[rank].as_ref())).map_or(
                    "neither can reach the other's Unix socket, or it was told to use TCP",
                    String::as_str,
                );
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{rank} shares no memory with {other} on host {name}: {reason}; set BURN_DDP_TRANSPORT=auto to let \
                     them talk over TCP"
                ),
            ));
        }
    }
    if let Some(trouble) = &all[me].trouble {
        tracing::warn!("{trouble}: {} talks over TCP", Rank(me));
    }
    Ok(divided)
}

/// Number of cores on which at least one rank of `host` may run, capped by the smallest quota of a rank that has one.
fn shared_cores(host: &[Rank], all: &[HostReport]) -> usize {
    let mut cores: Vec<u32> = host.iter().flat_map(|rank| &all[rank.0].cores).copied().collect();
    cores.sort_unstable();
    cores.dedup();
    let quota = |rank: &Rank| all[rank.0].quota.max(1);
    let limited = host.iter().filter(|rank| quota(rank) < all[rank.0].cores.len()).map(quota).min();
    limited.unwrap_or(usize::MAX).min(cores.len()).max(1)
}

fn describe(hosts: &[Vec<Rank>]) -> String {
    let sharing: Vec<String> = hosts
        .iter()
        .filter(|host| host.len() > 1)
        .map(|host| {
            let ranks: Vec<String> = host.iter().map(|rank| rank.0.to_string()).collect();
            format!("ranks {} share memory", ranks.join(", "))
        })
        .collect();
    if sharing.is_empty() { "all ranks talk over TCP".into() } else { sharing.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(hosts: &[Vec<Rank>]) -> Vec<Vec<usize>> {
        hosts.iter().map(|host| host.iter().map(|rank| rank.0).collect()).collect()
    }

    #[test]
    fn ranks_are_where_their_first_one_is() {
        assert_eq!(ranks(&group_by_host(&[0, 0, 2, 0, 2]).unwrap()), [vec![0, 1, 3], vec![2, 4]]);
        // Rank 2 has reached rank 1, which is itself with rank 0, where rank 2 cannot go.
        assert_eq!(ranks(&group_by_host(&[0, 0, 1]).unwrap()), [vec![0, 1], vec![2]]);
    }

    fn report(host: &str, cores: &[u32], quota: usize, required: bool) -> HostReport {
        let (host, cores) = (host.into(), cores.to_vec());
        HostReport { required, host, address: None, cores, quota, limit: None, trouble: None }
    }

    #[test]
    fn cores_are_counted_once_and_quotas_count() {
        let pinned = [report("a", &[0], 1, false), report("a", &[1], 1, false)];
        assert_eq!(shared_cores(&[Rank(0), Rank(1)], &pinned), 2);
        let limited = [report("a", &[0, 1, 2, 3], 2, false), report("a", &[0, 1, 2, 3], 2, false)];
        assert_eq!(shared_cores(&[Rank(0), Rank(1)], &limited), 2);
    }

    #[test]
    fn trouble_divides_a_host_and_a_rank_that_requires_memory_refuses() {
        let trouble = [None, Some("no room".to_string()), None];
        let hosts = || vec![vec![Rank(0), Rank(1)], vec![Rank(2)]];
        let all =
            |required| [0, 1, 2].map(|rank| report(if rank < 2 { "a" } else { "b" }, &[0], 1, required));
        assert_eq!(ranks(&divide(hosts(), &all(false), &trouble, 2).unwrap()), [[0], [1], [2]]);
        let error = divide(hosts(), &all(true), &trouble, 2).unwrap_err().to_string();
        assert!(
            error.contains("rank 0 shares no memory with rank 1") && error.contains("no room"),
            "{error}"
        );
        assert_eq!(
            ranks(&divide(hosts(), &all(true), &[None, None, None], 2).unwrap()),
            [vec![0, 1], vec![2]]
        );
    }
}
