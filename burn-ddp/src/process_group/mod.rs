//! The process group of tensors: a [`Group`] of ranks and the communicator that moves their tensors.
//!
//! Ranks, threads, order and failure are the group's ([`burn_ddp_comm::group`]); what is added here are tensors. A
//! collective stages them on the caller's thread, queues their memory for the communication thread, and makes tensors
//! again in [`Work::wait`]. In a world of one the tensors are returned as they are.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn_ddp_comm::group::Group;
use burn_ddp_comm::store::Store;
use burn_ddp_comm::{CommunicatorKind, Error, GroupOptions, Rank, RankInfo, Result};

use crate::communicator::{
    Communicator, CommunicatorFactory, HostCommunicator, HostEngine, MakeEngine, Opened, Setup,
};

mod collectives;
mod kind;

pub(crate) use burn_ddp_comm::group::BackwardLease;
pub use burn_ddp_comm::group::{GroupStats, OpStats, Work};
pub use kind::GroupKind;

/// Ranks that communicate with each other. Clones are handles to the same group. When the last one is dropped, this
/// rank says goodbye to its peers.
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
    /// Dropped first: the communication thread ends before the caller's half of the communicator.
    group: Group,
    /// `None` in a world of one.
    communicator: Option<Box<dyn Communicator<B>>>,
    /// `None` where tensors travel through host memory.
    factory: Option<Arc<dyn CommunicatorFactory<B>>>,
    device: B::Device,
}

impl<B: Backend> ProcessGroup<B> {
    /// The group that the process environment describes (torchrun's variables, `BURN_DDP_*` limits). Without
    /// RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: a world of one.
    ///
    /// # Errors
    /// Wrong or incomplete variables, a rank that is taken, a port in use, and peers that do not appear within
    /// [`GroupOptions::rendezvous_timeout`], each by name.
    pub fn from_env(device: &B::Device) -> Result<Self> {
        Self::new(RankInfo::from_env()?, GroupOptions::from_env()?, device)
    }

    /// The group that `info` describes; see [`ProcessGroup::from_env`]. Tensors travel through host memory.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::from_env`]; `Config` where `options` ask for NCCL.
    pub fn new(info: RankInfo, options: GroupOptions, device: &B::Device) -> Result<Self> {
        if options.communicator == CommunicatorKind::Nccl {
            return Err(Error::config(format!(
                "BURN_DDP_COMM=nccl: this group of backend {} has no NCCL; make it with burn_ddp_nccl::process_group, \
                 or set BURN_DDP_COMM=host",
                B::name(device)
            )));
        }
        Self::connect(info, options, device, None)
    }

    /// The group that `info` describes, with a communicator that `factory` makes: for crates that bring one.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::from_env`] and of `factory`.
    pub fn with_factory(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        factory: Arc<dyn CommunicatorFactory<B>>,
    ) -> Result<Self> {
        Self::connect(info, options, device, Some(factory))
    }

    fn connect(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        factory: Option<Arc<dyn CommunicatorFactory<B>>>,
    ) -> Result<Self> {
        let connected = Group::with_engine(info, options, |setup, host| open(&factory, device, setup, host))?;
        Ok(Self::of(connected, factory, device))
    }

    /// The typed group over a connected one.
    fn of(
        (group, communicator): (Group, Option<Box<dyn Communicator<B>>>),
        factory: Option<Arc<dyn CommunicatorFactory<B>>>,
        device: &B::Device,
    ) -> Self {
        let (rank, world_size) = (group.rank(), group.world_size());
        tracing::info!(group = group.name(), "{rank} of {world_size}: device {device:?}");
        Self(Arc::new(Inner { group, communicator, factory, device: device.clone() }))
    }

    /// A group of one, whatever the environment says.
    pub fn solo(device: &B::Device) -> Self {
        Self::of((Group::solo(), None), None, device)
    }

    /// A group over any store that all its ranks share; ranks listen on `address`. Tests put several ranks into one
    /// process with it.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::from_env`], but for the environment's.
    pub fn over_store(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        store: Arc<dyn Store>,
        address: IpAddr,
    ) -> Result<Self> {
        let group = Group::over_store(info, options, store, address)?;
        let communicator =
            group.is_connected().then(|| Box::new(HostCommunicator) as Box<dyn Communicator<B>>);
        Ok(Self::of((group, communicator), None, device))
    }

    /// Divides the ranks of this group into subgroups. Ranks that give the same `color` form one subgroup; its ranks
    /// are numbered in ascending order of `key`, and those of equal keys in the order of this group. A rank that gives
    /// no color gets `None`. All ranks of this group must call it. This group stays usable, and the failure of one
    /// group does not end another.
    ///
    /// # Errors
    /// The first error of this group. If a rank cannot connect to its subgroup, it returns the reason, the others
    /// return `PeerFailed` with the first such rank, and this group ends.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let Inner { group, factory, device, .. } = &*self.0;
        let part = group.split_with(color, key, |setup, host| open(factory, device, setup, host))?;
        Ok(part.map(|connected| Self::of(connected, factory.clone(), device)))
    }

    /// This process's position in the group.
    pub fn rank(&self) -> Rank {
        self.0.group.rank()
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.0.group.world_size()
    }

    /// The launcher's description of this process (of a subgroup: with the subgroup's rank and size).
    pub fn info(&self) -> &RankInfo {
        self.0.group.info()
    }

    /// The device that this rank was made for.
    pub fn device(&self) -> &B::Device {
        &self.0.device
    }

    /// Limits of this group.
    pub fn options(&self) -> &GroupOptions {
        self.0.group.options()
    }

    /// Address at which each rank listens, in rank order; empty in a world of one.
    pub fn peers(&self) -> Vec<SocketAddr> {
        self.0.group.peers()
    }

    /// Collectives so far, by name, with bytes and the time spent in waiting for them.
    pub fn stats(&self) -> GroupStats {
        self.0.group.stats()
    }

    /// Ends the group on all ranks: every wait, here and there, returns an error with `reason`.
    pub fn abort(&self, reason: &str) {
        self.0.group.abort(reason);
    }

    /// Leaves with the outcome of the training: after `Ok` peers read that this rank has finished, after `Err` they
    /// read the error as a failure of this rank. Without it a rank that returns an error looks to its peers as if it
    /// had finished, because dropping a group cannot know why.
    ///
    /// # Errors
    /// `outcome`, unchanged.
    pub fn finish<T, E: fmt::Display>(&self, outcome: Result<T, E>) -> Result<T, E> {
        self.0.group.finish(outcome)
    }

    /// The first error of the group, if it has ended.
    pub fn cause(&self) -> Option<Error> {
        self.0.group.cause()
    }

    /// The ranks of this group, without its tensors.
    pub(crate) fn ranks(&self) -> &Group {
        &self.0.group
    }

    /// True if collectives go through the communication thread; see [`Group::is_connected`].
    pub(crate) fn is_connected(&self) -> bool {
        self.0.group.is_connected()
    }

    /// True if tensors travel through host memory, where reading one costs nothing.
    pub(crate) fn in_host_memory(&self) -> bool {
        self.0.factory.is_none()
    }

    /// Ends the group on all ranks because of `cause`; see [`Group::fail`].
    pub(crate) fn fail(&self, cause: &Error) {
        self.0.group.fail(cause);
    }

    /// See [`Group::barrier_then`].
    pub(crate) fn barrier_then(&self, error: Error) -> Error {
        self.0.group.barrier_then(error)
    }
}

/// Makes both halves of the communicator of connected ranks.
fn open<B: Backend>(
    factory: &Option<Arc<dyn CommunicatorFactory<B>>>,
    device: &B::Device,
    setup: Setup,
    host: HostEngine,
) -> Result<(MakeEngine, Box<dyn Communicator<B>>)> {
    match factory {
        Some(factory) => {
            let Opened { communicator, engine } = factory.open(setup, device, host)?;
            Ok((engine, communicator))
        }
        None => Ok((host.into_engine(), Box::new(HostCommunicator))),
    }
}
