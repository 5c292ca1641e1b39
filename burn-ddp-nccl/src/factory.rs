//! From ranks that can reach each other to a communicator in NCCL.
//!
//! Everything that ranks must know of each other before NCCL travels in one exchange over the group's own connections,
//! NCCL's id included: a peer that dies meanwhile is noticed there, where a wait on the store would run into its limit.
#![allow(unsafe_code)]

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn_ddp::communicator::{
    CommunicatorFactory, Deadline, Engine, HostCommunicator, HostEngine, Opened, Setup,
};
use burn_ddp::{CommunicatorKind, Result};

use crate::agreement::{Record, Way, decide};
use crate::device::DeviceInfo;
use crate::library::{Symbols, Version};
use crate::{DeviceAccess, NcclComm, NcclCommunicator, NcclEngine, Queue, UniqueId};

/// Makes the queue of a communicator, on the thread that is to use it.
pub type QueueMaker = Arc<dyn Fn() -> Result<Box<dyn Queue>> + Send + Sync>;

/// Makes an NCCL communicator for each group, or one through host memory where the ranks come to that.
#[derive(Clone)]
pub struct NcclFactory<A> {
    access: A,
    kind: CommunicatorKind,
    device: DeviceInfo,
    nccl: Result<(Symbols, Version)>,
    queue: QueueMaker,
}

impl<A> NcclFactory<A> {
    /// For a rank that drives `device`, was asked for `kind`, and has `nccl` or an error that says why not.
    ///
    /// # Safety
    ///
    /// The symbols are NCCL's or keep its contract. `access` gives memory of `device`, and `queue` makes streams of it and
    /// makes it the current one of the thread that calls it.
    pub unsafe fn new(
        access: A,
        kind: CommunicatorKind,
        device: DeviceInfo,
        nccl: Result<(Symbols, Version)>,
        queue: QueueMaker,
    ) -> Self {
        Self { access, kind, device, nccl, queue }
    }

    /// What all ranks say of themselves, in rank order.
    fn exchange(&self, root: bool, host: &mut HostEngine, deadline: Deadline) -> Result<Vec<Record>> {
        let id = match &self.nccl {
            Ok((symbols, _)) if root && self.kind != CommunicatorKind::Host => Some(UniqueId::new(symbols)?),
            _ => None,
        };
        let record = Record {
            host: burn_ddp_comm::net::host::host_name(),
            device: self.device.clone(),
            kind: self.kind,
            nccl: self.nccl.as_ref().map(|(_, version)| *version).map_err(ToString::to_string),
            id: id.map(|id| id.as_bytes().to_vec()),
        };
        host.exchange("a rank's record of its device", &record, deadline)
    }
}

impl<B: Backend, A: DeviceAccess<B> + Clone> CommunicatorFactory<B> for NcclFactory<A> {
    fn open(&self, setup: Setup, device: &B::Device, mut host: HostEngine) -> Result<Opened<B>> {
        let Setup { name, info, options, deadline, liveness } = setup;
        let records = self.exchange(info.rank.is_root(), &mut host, deadline);
        let records = records.map_err(|error| error.context(format!("connect on {}", info.rank)))?;
        let way = decide(&records).inspect_err(|_| {
            // All ranks find it alike: none leaves, and is taken for the cause, before each holds the error itself.
            let _ = host.exchange("an empty message", &(), deadline);
        })?;
        let symbols = match (way, &self.nccl) {
            (Way::Nccl, Ok((symbols, _))) => *symbols,
            (Way::Nccl, Err(error)) => return Err(error.clone()),
            (Way::Host(reason), _) => {
                if let (Some(reason), true) = (reason, info.rank.is_root()) {
                    tracing::warn!(group = name, "{reason}; tensors go through host memory");
                }
                return Ok(Opened { communicator: Box::new(HostCommunicator), engine: host.into_engine() });
            }
        };
        tracing::info!(group = name, "{} of {}: tensors go by NCCL", info.rank, info.world_size);
        let id = records.first().and_then(|record| record.id.as_deref()).unwrap_or_default();
        let id = UniqueId::from_bytes(id)?;
        let (rank, world_size) = (info.rank, info.world_size);
        let communicator = NcclCommunicator::new(self.access.clone(), &info, device.clone());
        let queue = self.queue.clone();
        let engine = move || {
            // SAFETY: of the caller of `new`, and the queue is made on this thread.
            let comm = unsafe {
                NcclComm::connect(symbols, &id, rank, world_size, queue()?, liveness.clone(), deadline)
            }?;
            Ok(Box::new(NcclEngine::new(comm, host, liveness, options.timeout)) as Box<dyn Engine>)
        };
        Ok(Opened { communicator: Box::new(communicator), engine: Box::new(engine) })
    }
}
