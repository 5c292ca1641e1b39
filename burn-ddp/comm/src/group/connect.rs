//! From a store that all ranks share to ranks that are connected.
//!
//! ```text
//! listen -> exchange addresses through the store -> connect to every peer -> exchange "connected"
//!        -> heartbeats begin -> find the ranks that share this host's memory -> collectives
//! ```
//!
//! Heartbeats begin on all ranks together, after the second exchange: a rank that still waits for a connection is
//! missing, not silent.

use std::net::IpAddr;
use std::sync::Arc;

use crate::collective::Collectives;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::environment::RankInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::net::host::host_name;
use crate::options::GroupOptions;
use crate::rendezvous::{self, PeerInfo};
use crate::shm::ComputeHint;
use crate::store::{PrefixStore, Store};
use crate::topology::{ShmOptions, Topology};
use crate::transport::Liveness;
use crate::transport::tcp::{Listener, TcpTransport};

/// A rank that is connected to all others.
pub struct Connection {
    /// Collective operations over the connections.
    pub collectives: Collectives,
    /// Heartbeats, aborts and goodbyes; dropping it says goodbye.
    pub control: Control,
    /// State of the peers and the cause for which the group has ended.
    pub liveness: Liveness,
    /// All ranks, in rank order.
    pub peers: Vec<PeerInfo>,
    /// The flag that the group sets and the shared memory of this rank reads.
    pub compute: ComputeHint,
}

/// Connects the rank that `info` describes to all others of the group `name`, which meet in `store`; it listens on
/// `address`. Ranks of one host share its memory, as `options` say. All ranks have to come by `deadline`.
///
/// # Errors
/// `Config` on all ranks for a rank that is taken twice or for different world sizes; `Timeout` and `PeerLost` with the
/// ranks that are missing; `Io` for a socket.
pub fn connect(
    store: &Arc<dyn Store>,
    name: &str,
    info: &RankInfo,
    options: &GroupOptions,
    address: IpAddr,
    deadline: Deadline,
) -> Result<Connection> {
    let (rank, world_size) = (info.rank, info.world_size);
    let stage = |stage: &str| PrefixStore::new(store.clone(), format!("group/{name}/{stage}"));
    let (addresses, connections) = (stage("address"), stage("connected"));
    let meet = || {
        let listener = Listener::bind(address)?;
        let me = PeerInfo::new(rank, host_name(), std::process::id(), listener.address()?);
        let peers = rendezvous::exchange(&addresses, &me, world_size, deadline)?;
        let scope = format!("{}.{}/{name}", info.run_id, info.restart_count);
        let mesh = listener.connect(rank, &scope, &peers, deadline)?;
        rendezvous::exchange(&connections, &me, world_size, deadline)?;
        Ok((peers, mesh))
    };
    let (peers, mesh) = meet().inspect_err(|error: &Error| {
        // Peers may be waiting for what only this rank knows. A store that is gone tells them itself.
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
    Ok(Connection { collectives, control, liveness, peers, compute })
}
