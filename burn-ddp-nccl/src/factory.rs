//! Makes the communicator of a group whose ranks are already connected by `burn-ddp`.
//!
//! Everything that ranks must know of each other before NCCL travels in one exchange over the group's own connections,
//! NCCL's id included: a peer that dies meanwhile is noticed there, while a wait on the store would last until its
//! timeout.
#![allow(unsafe_code)]

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn_ddp::communicator::{
    CommunicatorFactory, Deadline, Engine, HostCommunicator, HostEngine, Opened, Setup,
};
use burn_ddp::{CommunicatorKind, Result};
use burn_ddp_comm::net::host::host_name;

use crate::comm::NcclComm;
use crate::communicator::NcclCommunicator;
use crate::device::DeviceInfo;
use crate::device_buffer::DeviceAccess;
use crate::engine::NcclEngine;
use crate::library::{Symbols, Version};
use crate::selection::{Record, Selection, select};
use crate::stream::Stream;
use crate::unique_id::UniqueId;

/// Makes the stream of a communicator, on the thread that is to use it.
pub type StreamMaker = Arc<dyn Fn() -> Result<Box<dyn Stream>> + Send + Sync>;

/// Makes an NCCL communicator for each group, or one through host memory if the ranks select that.
#[derive(Clone)]
pub struct NcclFactory<A> {
    access: A,
    kind: CommunicatorKind,
    device: DeviceInfo,
    nccl: Result<(Symbols, Version)>,
    stream: StreamMaker,
}

impl<A> NcclFactory<A> {
    /// The factory of a rank that drives `device`, was asked for `kind`, and has `nccl` or an error that says why not.
    ///
    /// # Safety
    ///
    /// The symbols are NCCL's or keep its contract. `access` gives memory of `device`, and `stream` makes streams of it
    /// and makes it the current device of the thread that calls it.
    pub unsafe fn new(
        access: A,
        kind: CommunicatorKind,
        device: DeviceInfo,
        nccl: Result<(Symbols, Version)>,
        stream: StreamMaker,
    ) -> Self {
        Self { access, kind, device, nccl, stream }
    }

    /// The records of all ranks, in rank order.
    fn exchange(&self, root: bool, host: &mut HostEngine, deadline: Deadline) -> Result<Vec<Record>> {
        let id = match &self.nccl {
            Ok((symbols, _)) if root && self.kind != CommunicatorKind::Host => Some(UniqueId::new(symbols)?),
            _ => None,
        };
        let record = Record {
            host: host_name(),
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
        let selection = select(&records).inspect_err(|_| {
            // All ranks find the same error. None leaves before each has it, or its leaving would be taken for the
            // cause.
            let _ = host.exchange("an empty message", &(), deadline);
        })?;
        let symbols = match (selection, &self.nccl) {
            (Selection::Nccl, Ok((symbols, _))) => *symbols,
            (Selection::Nccl, Err(error)) => return Err(error.clone()),
            (Selection::Host(reason), _) => {
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
        let stream = self.stream.clone();
        let engine = move || {
            // SAFETY: of the caller of `new`, and the stream is made on this thread.
            let comm = unsafe {
                NcclComm::connect(symbols, &id, rank, world_size, stream()?, liveness.clone(), deadline)
            }?;
            Ok(Box::new(NcclEngine::new(comm, host, liveness, options.timeout)) as Box<dyn Engine>)
        };
        Ok(Opened { communicator: Box::new(communicator), engine: Box::new(engine) })
    }
}
