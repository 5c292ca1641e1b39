//! The connections between communicators of the fake: an address in the id, and the sockets of `burn-ddp`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn_ddp::{Error, ErrorKind, Rank, RankInfo, Result};
use burn_ddp_comm::collective::Collectives;
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::rendezvous::{PeerInfo, exchange};
use burn_ddp_comm::store::{MemoryStore, Store, TcpStore};
use burn_ddp_comm::topology::Topology;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_comm::transport::tcp::{Listener, TcpTransport};
use socket2::{Domain, Socket, Type};

use super::lock;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Longer than any test: ending a wait is the task of the communicator under test.
const LIMIT: Duration = Duration::from_secs(120);

/// Ports of ids: bound and not listening, so that the system gives them to no other socket and rank 0's store can
/// listen.
static PORTS: Mutex<Vec<Socket>> = Mutex::new(Vec::new());

/// The bytes of an id: the address where rank 0 will be found.
pub(super) fn invite() -> [u8; 128] {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_reuse_address(true).expect("an option");
    socket.bind(&SocketAddr::from((HERE, 0)).into()).expect("a port");
    let port = socket.local_addr().ok().and_then(|address| address.as_socket()).expect("an address").port();
    lock(&PORTS).push(socket);
    let mut id = [0; 128];
    id[..2].copy_from_slice(&port.to_be_bytes());
    id
}

/// The connections of one communicator.
pub(super) struct Wire {
    pub(super) collectives: Mutex<Collectives>,
    liveness: Liveness,
    _store: Arc<dyn Store>,
}

impl Wire {
    /// Ends transfers in progress.
    pub(super) fn cut(&self) {
        self.liveness.fail(Error::new(ErrorKind::Aborted, "the fake's communicator was aborted"));
    }
}

/// Connects `rank` with all that have the same id.
pub(super) fn meet(id: &[u8], rank: usize, world_size: usize) -> Result<Wire> {
    let (rank, deadline) = (Rank(rank), Deadline::after(LIMIT));
    let port = u16::from_be_bytes([id[0], id[1]]);
    let store: Arc<dyn Store> = if world_size == 1 {
        Arc::new(MemoryStore::default())
    } else {
        let info = RankInfo {
            rank,
            world_size,
            local_rank: rank.0,
            local_world_size: world_size,
            master: Some((HERE.to_string(), port)),
            run_id: format!("fake-{port}"),
            ..RankInfo::solo()
        };
        Arc::new(TcpStore::from_rank_info(&info, LIMIT)?)
    };
    let listener = Listener::bind(HERE)?;
    let me = PeerInfo::new(rank, "here", std::process::id(), listener.address()?);
    let peers = exchange(&*store, &me, world_size, deadline)?;
    let mesh = listener.connect(rank, &format!("fake-{port}"), &peers, deadline)?;
    let liveness = Liveness::new(world_size);
    let transport = TcpTransport::new(rank, mesh.data, liveness.clone())?;
    let mut collectives = Collectives::new(Box::new(transport), Topology::separate(world_size), LIMIT);
    // Rank 0 serves the store and may exit as soon as it has connected.
    collectives.barrier()?;
    Ok(Wire { collectives: Mutex::new(collectives), liveness, _store: store })
}
