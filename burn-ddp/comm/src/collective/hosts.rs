//! Which ranks share a host's memory, and how they come to.
//!
//! All ranks tell each other what they need, over the wire they already have, and compute the same table from it. Two
//! ranks are on one host if they give the same name for it and one could connect to the other's socket, which is tried and
//! not guessed. If a host cannot provide the memory, all of its ranks do without it, and the first of them says so.

use serde::{Deserialize, Serialize};

use super::Collectives;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::options::TransportKind;
use crate::rank::Rank;
use crate::shm::{ComputeHint, RegionLayout, SharedRegion, ShmAddress, ShmConnection, ShmListener};
use crate::transport::Liveness;

/// What one rank wants of its host's memory.
#[derive(Clone, Debug)]
pub struct Sharing {
    /// Whether it wants any.
    pub transport: TransportKind,
    /// The host it takes itself to be on; it looks for peers of the same name only.
    pub host: String,
    /// Most bytes that the ranks of one host may reserve together.
    pub limit: Option<usize>,
    /// Whether the thread that calls the collectives computes meanwhile.
    pub caller: ComputeHint,
}

/// The ranks of a group by host.
pub(super) struct Hosts {
    /// Ranks that share memory, in ascending order; hosts in the order of their first ranks.
    pub(super) table: Vec<Vec<Rank>>,
    /// This rank's.
    pub(super) mine: usize,
    /// What it shares with the others of its host, if there are any.
    pub(super) region: Option<SharedRegion>,
}

/// How often ranks tell each other something before they share memory.
const EXCHANGES: u64 = 3;

/// What a rank says of itself.
#[derive(Serialize, Deserialize)]
struct Introduction {
    required: bool,
    host: String,
    offer: Option<ShmAddress>,
    /// Cores it may run on.
    cores: Vec<u32>,
    /// How many of them its quota lets it use.
    quota: usize,
    limit: Option<usize>,
    /// Why it has no offer, if it wanted one.
    trouble: Option<String>,
}

impl Collectives {
    /// Finds the ranks that share this host's memory, and uses it with them from the next operation on. All ranks call it,
    /// over a wire that connects all of them, by `deadline`.
    ///
    /// # Errors
    /// What ended the operation; on all ranks `Io` naming rank and reason if one for which
    /// [`TransportKind::Shm`] was asked cannot share memory with all ranks of its host's name. For
    /// [`TransportKind::Auto`] that is a warning.
    pub fn share_memory(&mut self, sharing: &Sharing, liveness: &Liveness, deadline: Deadline) -> Result<()> {
        let (me, world_size) = (self.rank().0, self.world_size());
        // The user's first operation is number 0, and numbers never go back: they tell who is ahead.
        self.sequence = self.sequence.wrapping_sub(EXCHANGES);
        let wanted = sharing.transport != TransportKind::Tcp && world_size > 1;
        let (door, trouble) = match wanted.then(|| ShmListener::bind(world_size)) {
            None => (None, None),
            Some(Ok(door)) => (Some(door), None),
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        let all: Vec<Introduction> = self.tell(
            &Introduction {
                required: sharing.transport == TransportKind::Shm,
                host: sharing.host.clone(),
                offer: door.as_ref().map(|door| door.address().clone()),
                cores: cores(),
                quota: std::thread::available_parallelism().map_or(1, usize::from),
                limit: sharing.limit,
                trouble,
            },
            deadline,
        )?;
        // The first rank of this host that can be reached; ranks that nobody offers anything are alone.
        let visit = (door.is_some()).then(|| {
            (0..me)
                .filter(|rank| all[*rank].host == sharing.host)
                .find_map(|rank| Some((rank, ShmConnection::connect(all[rank].offer.as_ref()?).ok()?)))
        });
        let (first, visit) = visit.flatten().map_or((me, None), |(rank, visit)| (rank, Some(visit)));
        let firsts: Vec<usize> = self.tell(&first, deadline)?;
        if let Some(rank) = (0..world_size).find(|rank| firsts[*rank] > *rank) {
            let text = format!("{} says that it has reached rank {}", Rank(rank), firsts[rank]);
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        let table = table(&firsts);
        let mine = table.iter().position(|host| host.contains(&Rank(me))).unwrap_or(0);
        // Half of what is left: a board that does not come about in time is a reason for TCP, of which all have to hear.
        let soon = Deadline::after(deadline.remaining() / 2);
        let made = (table[mine].len() > 1)
            .then(|| board(&table[mine], me, &all, door, visit, liveness, &sharing.caller, soon));
        let trouble = made.as_ref().and_then(|made| made.as_ref().err()).map(ToString::to_string);
        let troubles: Vec<Option<String>> = self.tell(&trouble, deadline)?;
        let hosts = match Self::settle(table, &all, &troubles, me) {
            Ok(hosts) => hosts,
            Err(error) => {
                // All ranks find it alike; nobody leaves before all have.
                let _ = self.within(deadline.remaining(), Self::barrier);
                return Err(error);
            }
        };
        let mine = hosts.iter().position(|host| host.contains(&Rank(me))).unwrap_or(0);
        let board = if hosts[mine].len() > 1 { made.transpose()? } else { None };
        tracing::info!("{} of {world_size}: {}", Rank(me), describe(&hosts));
        self.hosts =
            hosts.iter().any(|host| host.len() > 1).then_some(Hosts { table: hosts, mine, region: board });
        Ok(())
    }

    /// What everybody has to tell, in rank order.
    fn tell<T: Serialize + for<'a> Deserialize<'a>>(
        &mut self,
        mine: &T,
        deadline: Deadline,
    ) -> Result<Vec<T>> {
        let failed = |error: postcard::Error| {
            Error::with_source(ErrorKind::Mismatch, "cannot read what a peer says of its host", error)
        };
        let mine = postcard::to_stdvec(mine).map_err(failed)?;
        let all = self.within(deadline.remaining(), |all| all.all_gather_bytes(&mine))?;
        all.iter().map(|bytes| postcard::from_bytes(bytes).map_err(failed)).collect()
    }

    /// The table in which a host that had trouble is divided into single ranks. Everybody comes to the same.
    fn settle(
        table: Vec<Vec<Rank>>,
        all: &[Introduction],
        troubles: &[Option<String>],
        me: usize,
    ) -> Result<Vec<Vec<Rank>>> {
        let mut hosts = Vec::new();
        for host in table {
            // Who reserves says more than who then receives nothing.
            let trouble = host.iter().find_map(|rank| Some((*rank, troubles[rank.0].as_ref()?)));
            match trouble {
                None => hosts.push(host),
                Some((_, text)) => {
                    let refused = host.iter().any(|rank| all[rank.0].required);
                    if host[0].0 == me && !refused {
                        tracing::warn!(
                            "{text}: the {} ranks of host {} talk over TCP",
                            host.len(),
                            all[me].host
                        );
                    }
                    hosts.extend(host.into_iter().map(|rank| vec![rank]));
                }
            }
        }
        hosts.sort_by_key(|host| host[0]);
        // Who asked for shared memory has it with all ranks of its host's name, or nobody starts.
        for host in &hosts {
            for rank in host.iter().filter(|rank| all[rank.0].required) {
                let apart = (0..all.len())
                    .map(Rank)
                    .find(|other| all[other.0].host == all[rank.0].host && !host.contains(other));
                let Some(other) = apart else { continue };
                let reason = (0..all.len())
                    .filter(|other| all[*other].host == all[rank.0].host)
                    .find_map(|rank| all[rank].trouble.as_ref().or(troubles[rank].as_ref()))
                    .map_or(
                        "neither can reach the other's Unix socket, or it was told to use TCP",
                        String::as_str,
                    );
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "{rank} shares no memory with {other} on host {}: {reason}; set BURN_DDP_TRANSPORT=auto to let \
                         them talk over TCP",
                        all[rank.0].host
                    ),
                ));
            }
        }
        if let Some(trouble) = &all[me].trouble {
            tracing::warn!("{trouble}: {} talks over TCP", Rank(me));
        }
        Ok(hosts)
    }
}

/// Ranks by the rank whose door they have reached. Who has reached one that itself went to another stays alone.
fn table(firsts: &[usize]) -> Vec<Vec<Rank>> {
    let mut hosts: Vec<Vec<Rank>> = Vec::new();
    for (rank, first) in firsts.iter().enumerate() {
        let first = if firsts[*first] == *first { *first } else { rank };
        match hosts.iter_mut().find(|host| host[0].0 == first) {
            Some(host) => host.push(Rank(rank)),
            None => hosts.push(vec![Rank(rank)]),
        }
    }
    hosts
}

#[allow(clippy::too_many_arguments, reason = "what the two ways to a board need")]
fn board(
    host: &[Rank],
    me: usize,
    all: &[Introduction],
    door: Option<ShmListener>,
    visit: Option<ShmConnection>,
    liveness: &Liveness,
    caller: &ComputeHint,
    deadline: Deadline,
) -> Result<SharedRegion> {
    let plan = RegionLayout { members: host.to_vec(), cores: shared_cores(host, all) };
    let limit = host.iter().filter_map(|rank| all[rank.0].limit).min();
    if let Some(limit) = limit.filter(|limit| *limit < plan.bytes()) {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "shared memory for {} ranks takes {} bytes, but {limit} are allowed",
                host.len(),
                plan.bytes()
            ),
        ));
    }
    let position = host.iter().position(|rank| rank.0 == me).unwrap_or(0);
    let mapping = match (door, visit) {
        (_, Some(visit)) => visit.receive(&plan, liveness, deadline)?,
        (Some(door), None) => door.share(&plan, liveness, deadline)?,
        (None, None) => return Err(Error::new(ErrorKind::Io, "no way to the memory of this host")),
    };
    Ok(SharedRegion::new(plan, position, mapping, liveness.clone(), caller.clone()))
}

/// Cores on which at least one rank of `host` may run, as far as quotas let it.
fn shared_cores(host: &[Rank], all: &[Introduction]) -> usize {
    let mut cores: Vec<u32> = host.iter().flat_map(|rank| &all[rank.0].cores).copied().collect();
    cores.sort_unstable();
    cores.dedup();
    let quota = |rank: &Rank| all[rank.0].quota.max(1);
    let limited = host.iter().filter(|rank| quota(rank) < all[rank.0].cores.len()).map(quota).min();
    limited.unwrap_or(usize::MAX).min(cores.len()).max(1)
}

#[cfg(target_os = "linux")]
fn cores() -> Vec<u32> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).map(|core| core as u32).collect()
}

#[cfg(not(target_os = "linux"))]
fn cores() -> Vec<u32> {
    vec![0]
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
        assert_eq!(ranks(&table(&[0, 0, 2, 0, 2])), [vec![0, 1, 3], vec![2, 4]]);
        // Rank 2 has reached rank 1, which is itself with rank 0, where rank 2 cannot go.
        assert_eq!(ranks(&table(&[0, 0, 1])), [vec![0, 1], vec![2]]);
    }

    fn introduction(host: &str, cores: &[u32], quota: usize, required: bool) -> Introduction {
        let (host, cores) = (host.into(), cores.to_vec());
        Introduction { required, host, offer: None, cores, quota, limit: None, trouble: None }
    }

    #[test]
    fn cores_are_counted_once_and_quotas_count() {
        let pinned = [introduction("a", &[0], 1, false), introduction("a", &[1], 1, false)];
        assert_eq!(shared_cores(&[Rank(0), Rank(1)], &pinned), 2);
        let limited =
            [introduction("a", &[0, 1, 2, 3], 2, false), introduction("a", &[0, 1, 2, 3], 2, false)];
        assert_eq!(shared_cores(&[Rank(0), Rank(1)], &limited), 2);
    }

    #[test]
    fn trouble_divides_a_host_and_whoever_asked_for_more_refuses() {
        let trouble = [None, Some("no room".to_string()), None];
        let hosts = || vec![vec![Rank(0), Rank(1)], vec![Rank(2)]];
        let all = |required| {
            [0, 1, 2].map(|rank| introduction(if rank < 2 { "a" } else { "b" }, &[0], 1, required))
        };
        assert_eq!(ranks(&Collectives::settle(hosts(), &all(false), &trouble, 2).unwrap()), [[0], [1], [2]]);
        let error = Collectives::settle(hosts(), &all(true), &trouble, 2).unwrap_err().to_string();
        assert!(
            error.contains("rank 0 shares no memory with rank 1") && error.contains("no room"),
            "{error}"
        );
        assert_eq!(
            ranks(&Collectives::settle(hosts(), &all(true), &[None, None, None], 2).unwrap()),
            [vec![0, 1], vec![2]]
        );
    }
}
