//! Ranks that communicate: the group, its communication thread, and the work handed to it.
//!
//! ```text
//!   program's thread                    communication thread               other ranks
//!   submit(operation, memory) --queue--> engine.run(operation, memory) <--> the same operation
//!          |                                       |
//!       Work::wait <-----------reply---------------'
//!
//!   control thread: heartbeats, aborts, goodbyes on connections of their own
//! ```
//!
//! All collectives of a group run on one thread in the order of the calls, because equal order is what makes them match
//! on all ranks. The caller continues and holds a [`Work`]. The first error ends the group: ranks are out of step from
//! then on, so every later call returns that first cause instead of waiting for something that cannot come.
//!
//! A world of one has no thread and no socket, unless [`GroupOptions::connect_alone`] asks for them; its collectives
//! return their input.
//!
//! ```no_run
//! use burn_ddp_comm::{ReduceOp, group::Group};
//!
//! # fn main() -> burn_ddp_comm::Result<()> {
//! let group = Group::from_env()?;
//! let gradient = vec![0.5_f32; 1000];
//! let mean = group.all_reduce(gradient, ReduceOp::Mean).wait()?;
//! println!("rank {} of {}: {}", group.rank().0, group.world_size(), mean[0]);
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use crate::control::Control;
use crate::deadline::Deadline;
use crate::environment::RankInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::net::address::local_address;
use crate::options::GroupOptions;
use crate::rank::Rank;
use crate::rendezvous::PeerInfo;
use crate::store::{MemoryStore, PrefixStore, Store, TcpStore};
use crate::transport::Liveness;

mod attached;
mod collectives;
mod connect;
mod engine;
mod host_engine;
mod lease;
mod memory;
mod split;
mod stats;
mod thread;
mod work;

pub use connect::{Connection, connect};
pub use engine::{Engine, MakeEngine, Setup};
pub use host_engine::HostEngine;
pub use lease::BackwardLease;
pub use memory::{DeviceMemory, HostMemory, Memory, Number, Segment, Staged};
pub use stats::{GroupStats, OpStats};
pub use work::Work;

use attached::Attached;
use lease::LeaseState;
use stats::Counters;
use thread::CommunicationThread;

/// Ranks that communicate with each other. Clones are handles to the same group; dropping the last one says goodbye to
/// the peers.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    name: String,
    info: RankInfo,
    options: GroupOptions,
    counters: Arc<Counters>,
    /// Number of splits so far, from which the next subgroups get their names.
    splits: AtomicUsize,
    /// Token held by everything but gradient buckets whose collectives run during backward passes. It is shared with
    /// the groups that were split from this one and with the group that this one was split from.
    backward_users: Arc<()>,
    lease: LeaseState,
    attached: Attached,
    /// `None` in a world of one.
    connected: Option<Connected>,
}

/// State of a group whose ranks are connected. Fields are dropped in this order: the thread ends first, then the
/// control channel says goodbye, and the store, which others may still need until then, goes last.
struct Connected {
    thread: Mutex<CommunicationThread>,
    control: Control,
    liveness: Liveness,
    peers: Vec<PeerInfo>,
    store: Arc<dyn Store>,
}

impl Drop for Inner {
    /// Tells the peers why this rank leaves, before its connections close and peers can tell only that it left.
    fn drop(&mut self) {
        self.connected.iter().for_each(|connected| connected.control.abort_if_panicking());
        self.abort_if_broken();
    }
}

impl Inner {
    /// Ends the group if it was marked as broken; see [`Group::mark_broken`].
    fn abort_if_broken(&self) {
        if let (Some(connected), Some(error)) = (&self.connected, self.lease.broken()) {
            connected.control.abort(&error);
        }
    }
}

impl Group {
    /// The group that the process environment describes (torchrun's variables, `BURN_DDP_*` limits). Without any of
    /// them: a world of one.
    ///
    /// # Errors
    /// `Config` for wrong or incomplete variables; `Timeout` for peers that do not appear within
    /// [`GroupOptions::rendezvous_timeout`]; a rank that is taken, a port in use, each by name.
    pub fn from_env() -> Result<Self> {
        Self::new(RankInfo::from_env()?, GroupOptions::from_env()?)
    }

    /// The group that `info` describes, with the [`HostEngine`]: its collectives take memory of the host.
    ///
    /// # Errors
    /// Those of [`Group::from_env`].
    pub fn new(info: RankInfo, options: GroupOptions) -> Result<Self> {
        Ok(Self::with_engine(info, options, host_engine)?.0)
    }

    /// The group that `info` describes, with an engine that `make` provides.
    ///
    /// When all ranks are connected, each rank calls `make` on the calling thread, as the last step of start-up. `make`
    /// gets a description of the group and a [`HostEngine`], by which ranks can exchange what their engines need
    /// ([`HostEngine::exchange`]). It returns two values: a [`MakeEngine`], which the communication thread calls to
    /// make the engine, and a value of any type, which `with_engine` returns beside the group. The engine may keep the
    /// [`HostEngine`] for operations on memory of the host.
    ///
    /// A world of one that is not connected ([`GroupOptions::connect_alone`]) has no engine: `make` is not called, and
    /// the value is `None`.
    ///
    /// # Errors
    /// Those of [`Group::from_env`] and of `make`. An error of `make` ends the group on all ranks.
    pub fn with_engine<T>(
        info: RankInfo,
        options: GroupOptions,
        make: impl FnOnce(Setup, HostEngine) -> Result<(MakeEngine, T)>,
    ) -> Result<(Self, Option<T>)> {
        let start = Start::new(info, options);
        if start.is_alone() {
            return Ok((start.build(None), None));
        }
        let deadline = Deadline::after(start.options.rendezvous_timeout);
        if start.info.world_size == 1 {
            return start.connect(
                Arc::new(MemoryStore::default()),
                Ipv4Addr::LOCALHOST.into(),
                deadline,
                make,
            );
        }
        let interface = start.options.interface.as_deref();
        // A wrong interface is found before any peer waits for this rank.
        local_address(interface, Ipv4Addr::LOCALHOST.into())?;
        let store = TcpStore::from_rank_info(&start.info, start.options.rendezvous_timeout)?;
        let address = local_address(interface, store.local_addr().ip())?;
        let run = format!("{}.{}", start.info.run_id, start.info.restart_count);
        start.connect(Arc::new(PrefixStore::new(Arc::new(store), run)), address, deadline, make)
    }

    /// A group of one, whatever the environment says.
    pub fn solo() -> Self {
        Start::new(RankInfo::solo(), GroupOptions::new()).build(None)
    }

    /// A group over any store that all its ranks share; ranks listen on `address`. Tests put several ranks into one
    /// process with it.
    ///
    /// # Errors
    /// Those of [`Group::from_env`], but for the environment's.
    pub fn over_store(
        info: RankInfo,
        options: GroupOptions,
        store: Arc<dyn Store>,
        address: IpAddr,
    ) -> Result<Self> {
        let deadline = Deadline::after(options.rendezvous_timeout);
        Ok(Start::new(info, options).connect(store, address, deadline, host_engine)?.0)
    }

    /// This process's position in the group.
    pub fn rank(&self) -> Rank {
        self.0.info.rank
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.0.info.world_size
    }

    /// The launcher's description of this process (of a subgroup: with the subgroup's rank and size).
    pub fn info(&self) -> &RankInfo {
        &self.0.info
    }

    /// Name of the group, unique in a run: `"0"` for the group of all ranks.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Limits of this group.
    pub fn options(&self) -> &GroupOptions {
        &self.0.options
    }

    /// True if collectives go through the communication thread: in every group of several ranks, and in a world of one
    /// if [`GroupOptions::connect_alone`] asks for it.
    pub fn is_connected(&self) -> bool {
        self.0.connected.is_some()
    }

    /// Address at which each rank listens, in rank order; empty in a world of one.
    pub fn peers(&self) -> Vec<SocketAddr> {
        let connected = self.0.connected.iter();
        connected.flat_map(|connected| connected.peers.iter().map(|peer| peer.address)).collect()
    }

    /// Collectives so far, by name, with bytes and the time spent in waiting for them.
    pub fn stats(&self) -> GroupStats {
        self.0.counters.read()
    }

    /// The first error of the group, if it has ended.
    pub fn cause(&self) -> Option<Error> {
        self.0.connected.as_ref().and_then(|connected| connected.liveness.cause())
    }

    /// Ends the group on all ranks: every wait, here and there, returns an error with `reason`.
    pub fn abort(&self, reason: &str) {
        self.fail(&Error::new(ErrorKind::Aborted, reason));
    }

    /// Ends the group on all ranks because of `cause`; only the first cause of a group counts.
    pub fn fail(&self, cause: &Error) {
        if let Some(connected) = &self.0.connected {
            connected.control.abort(cause);
        }
    }

    /// Leaves with the outcome of the program: after `Ok` peers read that this rank has finished, after `Err` they read
    /// the error as a failure of this rank. Without it a rank that returns an error looks to its peers as if it had
    /// finished, because dropping a group cannot know why.
    ///
    /// # Errors
    /// `outcome`, unchanged.
    pub fn finish<T, E: fmt::Display>(&self, outcome: Result<T, E>) -> Result<T, E> {
        if let Err(error) = &outcome {
            self.abort(&error.to_string());
        }
        self.0.abort_if_broken();
        outcome
    }

    /// Value of type `T` that is kept with this group, made when it is first asked for.
    pub fn attached<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        self.0.attached.get()
    }

    /// A token that its holder keeps while its collectives may run during backward passes.
    pub fn use_in_backward(&self) -> Arc<()> {
        self.0.backward_users.clone()
    }

    /// True if a token of [`Group::use_in_backward`] is held, of this group or of one that is related to it by
    /// [`Group::split`]. Related groups count because a rank uses one device for all of them. Where a device runs one
    /// collective at a time, two ranks could wait for ever: each in another group, for the other.
    pub fn is_used_in_backward(&self) -> bool {
        Arc::strong_count(&self.0.backward_users) > 1
    }

    /// The lease under which gradient buckets are sent while a backward pass runs; `None` while another holds it.
    pub fn acquire_backward_lease(&self) -> Option<BackwardLease> {
        self.0.lease.acquire()
    }

    /// Counts a gradient bucket that is sent while a backward pass runs.
    pub fn count_in_backward(&self) {
        self.0.counters.count_in_backward();
    }

    /// Marks the group as broken because of `error`: some gradient buckets of an optimizer step were sent, and the
    /// others never will be. The group does not end at once, because this rank may be leaving with an error of its own.
    /// It ends with `error` at its next collective, in [`Group::finish`], or when its last handle is dropped.
    pub fn mark_broken(&self, error: Error) {
        self.0.lease.mark_broken(error);
    }

    /// Passes a barrier and returns `error`, which every rank has found in the same way: no rank is told of another's
    /// failure before it holds the error itself.
    pub fn barrier_then(&self, error: Error) -> Error {
        let _ = self.barrier();
        error
    }

    /// Compares `mine` over all ranks; `what` names it. All ranks must call it.
    ///
    /// # Errors
    /// `Mismatch` on all ranks, naming the first rank that differs from rank 0 and both values.
    pub fn compare(&self, what: &str, mine: String) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let all = self.all_gather_bytes(mine.into_bytes())?;
        let Some(rank) = (1..all.len()).find(|rank| all[*rank] != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]);
        let (first, other) = (text(0), text(rank));
        let rank = Rank(rank);
        let message = format!("{what} differ: rank 0 has {first}; {rank} has {other}; give all the same");
        Err(self.barrier_then(Error::new(ErrorKind::Mismatch, message)))
    }

    /// Agrees on whether any rank has found an error: for checks that mostly fail alike, so that each rank reports what
    /// it found and not that another has failed. All ranks must call it.
    ///
    /// # Errors
    /// This rank's error, or else that of the first rank that has one.
    pub fn agree_on_error<T>(&self, found: Result<T>) -> Result<T> {
        let mine = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let all = self.all_gather_bytes(mine.into_bytes())?;
        let first = all.iter().position(|text| !text.is_empty());
        match (found, first) {
            (Ok(value), None) => Ok(value),
            (Ok(_), Some(rank)) => {
                let text = String::from_utf8_lossy(&all[rank]).into_owned();
                let error = Error::new(ErrorKind::PeerFailed(Rank(rank)), text).context(Rank(rank));
                Err(self.barrier_then(error))
            }
            (Err(error), _) => Err(self.barrier_then(error)),
        }
    }
}

/// Makes the host engine itself the engine of a group.
fn host_engine(_: Setup, host: HostEngine) -> Result<(MakeEngine, ())> {
    Ok((host.into_engine(), ()))
}

/// A group whose ranks are not connected yet. It is a type of its own, so that no caller holds a [`Group`] that is half
/// connected.
struct Start {
    name: String,
    info: RankInfo,
    options: GroupOptions,
    /// Token of the group that this one is split from, or a new one.
    backward_users: Arc<()>,
}

impl Start {
    /// A group that was not split from another.
    fn new(info: RankInfo, options: GroupOptions) -> Self {
        Self { name: "0".into(), info, options, backward_users: Arc::default() }
    }

    fn is_alone(&self) -> bool {
        self.info.world_size == 1 && !self.options.connect_alone
    }

    fn connect<T>(
        self,
        store: Arc<dyn Store>,
        address: IpAddr,
        deadline: Deadline,
        make: impl FnOnce(Setup, HostEngine) -> Result<(MakeEngine, T)>,
    ) -> Result<(Group, Option<T>)> {
        if self.is_alone() {
            return Ok((self.build(None), None));
        }
        let connection = connect(&store, &self.name, &self.info, &self.options, address, deadline)?;
        let Connection { collectives, control, liveness, peers, compute } = connection;
        let setup = Setup {
            name: self.name.clone(),
            info: self.info.clone(),
            options: self.options.clone(),
            deadline,
            liveness: liveness.clone(),
        };
        let make = || {
            let (engine, value) = make(setup, HostEngine::new(collectives))?;
            Ok((CommunicationThread::spawn(engine, liveness.clone())?, value))
        };
        // An error that came from the group itself is its cause already, and the peers know it.
        let (thread, value) = make().inspect_err(|error| control.abort(error))?;
        let thread = Mutex::new(thread);
        let counters = Counters::new(Some(compute));
        let connected = Connected { thread, control, liveness, peers, store };
        Ok((self.build(Some((connected, counters))), Some(value)))
    }

    fn build(self, connected: Option<(Connected, Counters)>) -> Group {
        let (connected, counters) = connected.unzip();
        Group(Arc::new(Inner {
            name: self.name,
            info: self.info,
            options: self.options,
            counters: Arc::new(counters.unwrap_or_else(|| Counters::new(None))),
            splits: AtomicUsize::new(0),
            backward_users: self.backward_users,
            lease: LeaseState::default(),
            attached: Attached::default(),
            connected,
        }))
    }
}
