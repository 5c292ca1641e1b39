//! From a store that all ranks share to ranks that can reach each other.
//!
//! It stands below the communicator and knows no tensor, because whoever has bytes to reduce (a benchmark, a second
//! binding) needs a group without needing Burn.

use std::net::IpAddr;
use std::sync::Arc;

use crate::collective::Collectives;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::options::GroupOptions;
use crate::rank::RankInfo;
use crate::rendezvous;
use crate::shm::ComputeHint;
use crate::store::{PrefixStore, Store};
use crate::topology::{ShmOptions, Topology};
use crate::transport::tcp::{Listener, TcpTransport};
use crate::transport::{Liveness, PeerInfo};

/// A rank that is connected with all others.
pub struct Joined {
    /// Operations over the connections.
    pub collectives: Collectives,
    /// Heartbeats, aborts and goodbyes; dropping it takes leave.
    pub control: Control,
    /// What is known of the peers.
    pub liveness: Liveness,
    /// All ranks, in rank order.
    pub peers: Vec<PeerInfo>,
    /// Set while the thread that wants the results computes and the collectives run on another thread.
    pub compute: ComputeHint,
}

/// Connects the rank that `info` describes with all others of the group `name`, which meet in `store`; it listens on
/// `address`. Ranks of one host share its memory, as `options` say. All ranks have to come by `deadline`.
///
/// # Errors
/// What a rank finds wrong with the group, on all ranks; `Timeout` and `PeerLost` with the ranks that are missing.
pub fn join(
    store: &Arc<dyn Store>,
    name: &str,
    info: &RankInfo,
    options: &GroupOptions,
    address: IpAddr,
    deadline: Deadline,
) -> Result<Joined> {
    let (rank, world_size) = (info.rank, info.world_size);
    let stage = |stage: &str| PrefixStore::new(store.clone(), format!("group/{name}/{stage}"));
    let (addresses, connections) = (stage("address"), stage("connected"));
    let meet = || {
        let listener = Listener::bind(address)?;
        let host = hostname::get().map(|host| host.to_string_lossy().into_owned()).unwrap_or_default();
        let me = PeerInfo::new(rank, host, std::process::id(), listener.address()?);
        let peers = rendezvous::exchange(&addresses, &me, world_size, deadline)?;
        let scope = format!("{}.{}/{name}", info.run_id, info.restart_count);
        let mesh = listener.connect(rank, &scope, &peers, deadline)?;
        // Heartbeats begin together: a rank that still waits for a connection is not silent, it is missing.
        rendezvous::exchange(&connections, &me, world_size, deadline)?;
        Ok((peers, mesh))
    };
    let (peers, mesh) = meet().inspect_err(|error: &Error| {
        // What this rank found by itself, and others may be waiting for it. A store that is gone says so itself.
        if matches!(error.kind(), ErrorKind::Io | ErrorKind::PeerLost(_)) {
            for stage in [&addresses, &connections] {
                let _ = rendezvous::refuse(stage, rank, error);
            }
        }
    })?;
    let liveness = Liveness::new(world_size);
    let mut transport = TcpTransport::new(rank, mesh.data, liveness.clone())?;
    let control = Control::start(rank, mesh.control, liveness.clone(), options.peer_timeout)?;
    let compute = ComputeHint::default();
    let shm = ShmOptions {
        transport: options.transport,
        host: options.host.clone().unwrap_or_else(|| peers[rank.0].host.clone()),
        limit: options.shared_memory,
        compute: compute.clone(),
    };
    let topology = Topology::discover(&mut transport, &shm, &liveness, deadline);
    let topology = topology.inspect_err(|error| control.abort(error))?;
    let collectives = Collectives::new(Box::new(transport), topology, options.timeout);
    Ok(Joined { collectives, control, liveness, peers, compute })
}
