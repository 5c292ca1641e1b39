//! How a group comes about: its ranks meet, connect, and agree on what moves their tensors.
//!
//! All of it happens before there is a group, so that nobody ever holds one that is half connected.

use std::net::IpAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use burn::tensor::backend::Backend;

#[cfg(feature = "train")]
use super::attached;
use super::stats::Counters;
use super::thread::CommunicationThread;
use super::{Connected, Inner, ProcessGroup};
use crate::communicator::{CommunicatorFactory, Engine, HostCommunicator, HostEngine, Meeting, Opened};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::join::{Joined, join};
use crate::options::GroupOptions;
use crate::rank::RankInfo;
use crate::store::Store;

/// What is known of a group before its ranks have met.
pub(super) struct Unconnected<B: Backend> {
    pub(super) name: String,
    pub(super) info: RankInfo,
    pub(super) options: GroupOptions,
    pub(super) device: B::Device,
    pub(super) factory: Option<Arc<dyn CommunicatorFactory<B>>>,
    /// The parent's, if it has one.
    pub(super) in_backward: Arc<super::InBackward>,
}

impl<B: Backend> Unconnected<B> {
    /// A group that is no part of another.
    pub(super) fn new(
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        factory: Option<Arc<dyn CommunicatorFactory<B>>>,
    ) -> Self {
        Self { name: "0".into(), info, options, device: device.clone(), factory, in_backward: Arc::default() }
    }

    pub(super) fn is_alone(&self) -> bool {
        self.info.world_size == 1 && !self.options.connect_alone
    }

    pub(super) fn connect(
        self,
        store: Arc<dyn Store>,
        address: IpAddr,
        deadline: Deadline,
    ) -> Result<ProcessGroup<B>> {
        if self.is_alone() {
            return Ok(self.build(None));
        }
        let joined = join(&store, &self.name, &self.info, &self.options, address, deadline)?;
        let Joined { collectives, control, liveness, peers, caller } = joined;
        let host = HostEngine::new(collectives);
        let meeting = Meeting {
            name: self.name.clone(),
            info: self.info.clone(),
            device: self.device.clone(),
            options: self.options.clone(),
            deadline,
            liveness: liveness.clone(),
        };
        let open = || {
            let opened = match &self.factory {
                Some(factory) => factory.open(meeting, host)?,
                None => Opened {
                    communicator: Box::new(HostCommunicator),
                    engine: Box::new(|| Ok(Box::new(host) as Box<dyn Engine>)),
                },
            };
            let thread = CommunicationThread::spawn(opened.engine, liveness.clone())?;
            Ok((opened.communicator, thread))
        };
        // An error that came from the group itself is its cause already, and told.
        let (communicator, thread) = open().inspect_err(|error| control.abort(error))?;
        let thread = Mutex::new(thread);
        Ok(self.build(Some(Connected { thread, communicator, control, liveness, peers, caller, store })))
    }

    pub(super) fn build(self, connected: Option<Connected<B>>) -> ProcessGroup<B> {
        let (info, device) = (&self.info, &self.device);
        tracing::info!(group = self.name, "{} of {}: device {device:?}", info.rank, info.world_size);
        ProcessGroup(Arc::new(Inner {
            name: self.name,
            info: self.info,
            device: self.device,
            options: self.options,
            factory: self.factory,
            counters: Arc::new(Counters::new(connected.as_ref().map(|connected| connected.caller.clone()))),
            splits: AtomicUsize::new(0),
            in_backward: self.in_backward,
            turns: super::turn::Turns::default(),
            #[cfg(feature = "train")]
            attached: attached::Attached::default(),
            connected,
        }))
    }
}
