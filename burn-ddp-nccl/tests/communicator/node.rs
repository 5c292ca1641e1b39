//! The parts of a process group that a communicator needs: the store, the id and the control channel.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use burn_ddp::{Rank, RankInfo, Result};
use burn_ddp_comm::collective::Collectives;
use burn_ddp_comm::control::Control;
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::rendezvous::{PeerInfo, exchange};
use burn_ddp_comm::store::{Store, TcpStore};
use burn_ddp_comm::topology::Topology;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_comm::transport::tcp::{Listener, TcpTransport};
use burn_ddp_nccl::{NcclComm, Stream, UniqueId};
use std::sync::Arc;

use crate::fake::{FakeStream, symbols};

/// Enough for everything that is meant to succeed.
pub const LIMIT: Duration = Duration::from_secs(20);

/// This rank. Fields are dropped in this order: goodbye first, then the store that others may need until then.
pub struct Node {
    pub rank: Rank,
    pub world_size: usize,
    pub liveness: Liveness,
    id: UniqueId,
    _control: Control,
    _store: Arc<dyn Store>,
}

impl Node {
    /// Connects to the other ranks by TCP, as a process group does before it connects by NCCL.
    pub fn connect_tcp() -> Result<Self> {
        let info = RankInfo::from_env()?;
        let (rank, world_size, deadline) = (info.rank, info.world_size, Deadline::after(LIMIT));
        let store: Arc<dyn Store> = Arc::new(TcpStore::from_rank_info(&info, LIMIT)?);
        if rank.is_root() {
            store.set("id", UniqueId::new(&symbols())?.as_bytes())?;
        }
        let id = UniqueId::from_bytes(&store.get("id", LIMIT)?)?;
        let listener = Listener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
        let me = PeerInfo::new(rank, "here", std::process::id(), listener.address()?);
        let peers = exchange(&*store, &me, world_size, deadline)?;
        let mesh = listener.connect(rank, "test", &peers, deadline)?;
        let liveness = Liveness::new(world_size);
        let control = Control::start(rank, mesh.control, liveness.clone(), Duration::from_secs(5))?;
        // No rank may exit before the others are done with the store. Frames of the barrier arrive after their rank has
        // exited.
        let data = TcpTransport::new(rank, mesh.data, Liveness::new(world_size))?;
        Collectives::new(Box::new(data), Topology::separate(world_size), LIMIT).barrier()?;
        Ok(Self { rank, world_size, liveness, id, _control: control, _store: store })
    }

    pub fn connect(&self, limit: Duration) -> Result<NcclComm> {
        self.connect_in(self.liveness.clone(), Box::new(FakeStream::new()), limit)
    }

    /// Connects with a stream and a liveness of the test's choice.
    pub fn connect_in(&self, life: Liveness, stream: Box<dyn Stream>, limit: Duration) -> Result<NcclComm> {
        let deadline = Deadline::after(limit);
        // SAFETY: the fake keeps NCCL's contract and has no device; the stream is its own.
        unsafe { NcclComm::connect(symbols(), &self.id, self.rank, self.world_size, stream, life, deadline) }
    }
}

/// Memory for a collective, aligned for every dtype.
pub struct Buffer {
    words: Vec<u64>,
    length: usize,
}

impl Buffer {
    pub fn new(bytes: &[u8]) -> Self {
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        Self { words, length: bytes.len() }
    }

    pub fn pointer(&mut self) -> *mut std::ffi::c_void {
        self.words.as_mut_ptr().cast()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_ne_bytes()).take(self.length).collect()
    }
}
