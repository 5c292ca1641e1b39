//! Ranks that communicate: the group, its one communication thread, and the work handed to it.
//!
//! All collectives of a group run on one thread in the order in which they were called, because order is what
//! makes them match on all ranks; the caller goes on and gets a [`Work`] to wait for. The first error ends the
//! group: operations of different ranks are out of step from then on, so every later call returns that first
//! cause instead of waiting for something that cannot come.
//!
//! A world of one has no thread and no socket: its collectives are their own result.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use burn::tensor::backend::Backend;

use crate::communicator::{Communicator, CommunicatorFactory};
use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::options::{CommunicatorKind, GroupOptions};
use crate::rank::{Rank, RankInfo};
use crate::rendezvous;
use crate::store::{MemoryStore, PrefixStore, Store, TcpStore};
use crate::transport::shm::CallerBusy;
use crate::transport::{Liveness, PeerInfo};

#[cfg(feature = "train")]
mod attached;
mod collectives;
mod connect;
mod kind;
mod split;
mod stats;
mod thread;
mod turn;
mod work;

pub use kind::GroupKind;
pub use stats::{GroupStats, OpStats};
pub(crate) use turn::Turn as BackwardLease;
pub use work::Work;

use connect::Unconnected;
use stats::Counters;
use thread::CommunicationThread;

/// Ranks that communicate with each other. Clones are handles to the same group; when the last one is dropped
/// this rank takes leave of its peers.
///
/// `B` is the backend of the tensors that are sent: for a training loop on `Autodiff<Ddp<Flex>>` that is
/// `Ddp<Flex>`, the backend of its gradients.
pub struct ProcessGroup<B: Backend>(Arc<Inner<B>>);

impl<B: Backend> Clone for ProcessGroup<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Inner<B: Backend> {
    name: String,
    info: RankInfo,
    device: B::Device,
    options: GroupOptions,
    /// `None` where tensors travel through host memory.
    factory: Option<Arc<dyn CommunicatorFactory<B>>>,
    counters: Arc<Counters>,
    splits: AtomicUsize,
    /// Shared with the groups it was split into and from.
    in_backward: Arc<InBackward>,
    /// Who sends during a backward pass.
    turns: turn::Turns,
    #[cfg(feature = "train")]
    attached: attached::Attached,
    /// `None` in a world of one.
    connected: Option<Connected<B>>,
}

/// Held by everybody whose collectives run during backward passes, besides buckets of gradients.
#[derive(Default)]
struct InBackward(Arc<()>);

/// What a group of several ranks has. Fields are dropped in this order: the thread ends first, then the
/// control channel says goodbye, and the store, which others may still need until then, goes last.
struct Connected<B: Backend> {
    thread: Mutex<CommunicationThread>,
    communicator: Box<dyn Communicator<B>>,
    control: Control,
    liveness: Liveness,
    peers: Vec<PeerInfo>,
    caller: CallerBusy,
    store: Arc<dyn Store>,
}

/// Says why this rank leaves before its thread and its connections go, from which peers could tell only that it has.
impl<B: Backend> Drop for Inner<B> {
    fn drop(&mut self) {
        self.connected.iter().for_each(|connected| connected.control.tell_of_panic());
        self.tell_of_broken();
    }
}

impl<B: Backend> Inner<B> {
    /// Ends the group if buckets have left without the rest.
    fn tell_of_broken(&self) {
        if let (Some(connected), Some(error)) = (&self.connected, self.turns.broken()) {
            connected.control.abort(&error);
        }
    }
}

impl<B: Backend> ProcessGroup<B> {
    /// The group that the process environment describes (torchrun's variables, `BURN_DDP_*` limits). Without
    /// any of them: a world of one.
    ///
    /// # Errors
    /// Wrong or incomplete variables, a rank that is taken, a port in use, and peers that do not appear within
    /// [`GroupOptions::rendezvous_timeout`], each by name.
    pub fn from_env(device: &B::Device) -> Result<Self> {
        Self::new(RankInfo::from_env()?, GroupOptions::from_env()?, device)
    }

    /// The group that `info` describes; see [`ProcessGroup::from_env`]. Tensors travel through host memory.
    pub fn new(info: RankInfo, options: GroupOptions, device: &B::Device) -> Result<Self> {
        if options.communicator == CommunicatorKind::Nccl {
            return Err(Error::config(format!(
                "BURN_DDP_COMM=nccl: this group of backend {} has no NCCL; make it with burn_ddp_nccl::process_group, or \
                 set BURN_DDP_COMM=host",
                B::name(device)
            )));
        }
        Self::begin(info, options, device, None)
    }

    /// The group that `info` describes, with a communicator of `factory`'s making: for crates that bring one.
    pub fn with_factory(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        factory: Arc<dyn CommunicatorFactory<B>>,
    ) -> Result<Self> {
        Self::begin(info, options, device, Some(factory))
    }

    fn begin(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        factory: Option<Arc<dyn CommunicatorFactory<B>>>,
    ) -> Result<Self> {
        let group = Unconnected::new(info, options, device, factory);
        if group.is_alone() {
            return Ok(group.build(None));
        }
        let deadline = Deadline::after(group.options.rendezvous_timeout);
        if group.info.world_size == 1 {
            return group.connect(Arc::new(MemoryStore::default()), Ipv4Addr::LOCALHOST.into(), deadline);
        }
        let interface = group.options.interface.as_deref();
        // Before anybody is kept waiting for a rank that cannot come.
        rendezvous::local_address(interface, Ipv4Addr::LOCALHOST.into())?;
        let store = TcpStore::from_rank_info(&group.info, group.options.rendezvous_timeout)?;
        let address = rendezvous::local_address(interface, store.local_addr().ip())?;
        let run = format!("{}.{}", group.info.run_id, group.info.restart_count);
        group.connect(Arc::new(PrefixStore::new(Arc::new(store), run)), address, deadline)
    }

    /// A group of one, whatever the environment says.
    pub fn solo(device: &B::Device) -> Self {
        let (info, options) = (RankInfo::solo(), GroupOptions::new());
        Unconnected::new(info, options, device, None).build(None)
    }

    /// A group over any store that all its ranks share; ranks listen on `address`. This is how tests put
    /// several ranks into one process.
    pub fn over_store(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        store: Arc<dyn Store>,
        address: IpAddr,
    ) -> Result<Self> {
        let deadline = Deadline::after(options.rendezvous_timeout);
        let group = Unconnected::new(info, options, device, None);
        group.connect(store, address, deadline)
    }

    /// This process's position in the group.
    pub fn rank(&self) -> Rank {
        self.0.info.rank
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.0.info.world_size
    }

    /// What the launcher said of this process (of a subgroup: with the subgroup's rank and size).
    pub fn info(&self) -> &RankInfo {
        &self.0.info
    }

    /// The device that this rank was made for.
    pub fn device(&self) -> &B::Device {
        &self.0.device
    }

    /// Whether collectives travel: not in a world of one, unless [`GroupOptions::connect_alone`] asks for it.
    pub(crate) fn is_connected(&self) -> bool {
        self.0.connected.is_some()
    }

    /// Whether tensors travel through host memory, where reading one costs nothing.
    pub(crate) fn in_host_memory(&self) -> bool {
        self.0.factory.is_none()
    }

    /// To be held for as long as collectives of this group may run during backward passes.
    #[cfg(feature = "train")]
    pub(crate) fn use_in_backward(&self) -> Arc<()> {
        self.0.in_backward.0.clone()
    }

    /// Whether anybody holds what [`ProcessGroup::use_in_backward`] gives, of this group or of one that comes of the same
    /// group by [`ProcessGroup::split`]: a pass that waits in the one for a rank that is behind with the other may wait for
    /// ever where the device runs one collective at a time.
    pub(crate) fn is_used_in_backward(&self) -> bool {
        Arc::strong_count(&self.0.in_backward.0) > 1
    }

    /// The right to send while a backward pass runs, unless another has it.
    pub(crate) fn acquire_backward_lease(&self) -> Option<BackwardLease> {
        self.0.turns.take()
    }

    /// What a floor above keeps for as long as the group lives: one value of each type, made when first asked for.
    #[cfg(feature = "train")]
    pub(crate) fn attached<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        self.0.attached.get()
    }

    /// Limits of this group.
    pub fn options(&self) -> &GroupOptions {
        &self.0.options
    }

    /// Where each rank listens, in rank order; empty in a world of one.
    pub fn peers(&self) -> Vec<SocketAddr> {
        let connected = self.0.connected.iter();
        connected.flat_map(|connected| connected.peers.iter().map(|peer| peer.address)).collect()
    }

    /// Collectives so far, by kind, with bytes and the time spent in waiting for them.
    pub fn stats(&self) -> GroupStats {
        self.0.counters.read()
    }

    /// Ends the group on all ranks: every wait, here and there, returns an error with `reason`.
    pub fn abort(&self, reason: &str) {
        self.fail(&Error::new(ErrorKind::Aborted, reason));
    }

    /// Takes leave with the outcome of the training: after `Ok` peers read that this rank has finished, after `Err`
    /// they read the error, as a failure of this rank. Without it a rank that returns an error looks to its peers as
    /// if it had finished, because dropping a group cannot know why.
    pub fn finish<T, E: fmt::Display>(&self, outcome: Result<T, E>) -> Result<T, E> {
        if let Err(error) = &outcome {
            self.abort(&error.to_string());
        }
        self.0.tell_of_broken();
        outcome
    }

    /// Ends the group because of `cause`; for floors above that find an error of their own.
    pub(crate) fn fail(&self, cause: &Error) {
        if let Some(connected) = &self.0.connected {
            connected.control.abort(cause);
        }
    }

    /// Buckets that were sent have no others after them, because of `error`: the group ends with it as soon as it is used or
    /// left. Not at once, because this rank may be on its way out with a cause of its own.
    pub(crate) fn break_off(&self, error: Error) {
        self.0.turns.end(error);
    }

    /// For an error that every rank finds in what it has received, and so finds alike: passes a barrier, so that no
    /// rank is told of another's failure before it holds the error itself.
    pub(crate) fn agreed(&self, error: Error) -> Error {
        let _ = self.barrier();
        error
    }

    /// Compares what all ranks say of themselves; `what` names it. All ranks must call it.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] on all ranks, naming the first that differs from rank 0, and what both said.
    pub(crate) fn compare(&self, what: &str, mine: String) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let all = self.all_gather_bytes(mine.into_bytes())?;
        let Some(rank) = (1..all.len()).find(|rank| all[*rank] != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]);
        let (first, other) = (text(0), text(rank));
        let rank = Rank(rank);
        let message = format!("{what} differ: rank 0 has {first}; {rank} has {other}; give all the same");
        Err(self.agreed(Error::new(ErrorKind::Mismatch, message)))
    }

    /// An error that any rank found before this point, on every rank: its own, or else the first rank's. For
    /// checks that mostly fail alike, so that each rank reports what it found and not that another has failed. All
    /// ranks must call it.
    #[cfg(feature = "train")]
    pub(crate) fn alike<T>(&self, found: Result<T>) -> Result<T> {
        let mine = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let all = self.all_gather_bytes(mine.into_bytes())?;
        let first = all.iter().position(|text| !text.is_empty());
        match (found, first) {
            (Ok(value), None) => Ok(value),
            (Ok(_), Some(rank)) => {
                let text = String::from_utf8_lossy(&all[rank]).into_owned();
                Err(self.agreed(Error::new(ErrorKind::PeerFailed(Rank(rank)), text).context(Rank(rank))))
            }
            (Err(error), _) => Err(self.agreed(error)),
        }
    }

    /// The first error of the group, if it has ended.
    pub fn cause(&self) -> Option<Error> {
        self.0.connected.as_ref().and_then(|connected| connected.liveness.cause())
    }
}
