//! Ranks that communicate: the group, its one communication thread, and the work handed to it.
//!
//! All collectives of a group run on one thread in the order in which they were called, because order is what
//! makes them match on all ranks; the caller goes on and gets a [`Work`] to wait for. The first error ends the
//! group: operations of different ranks are out of step from then on, so every later call returns that first
//! cause instead of waiting for something that cannot come.
//!
//! A world of one has no thread and no socket: its collectives are their own result.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Tensor, backend::Backend};
use burn_backend::Bytes;

use crate::collective::Collectives;
use crate::communicator::{
    AnyTensor, Communicator, HostCommunicator, HostEngine, Layout, Memory, Operation, Segment, Staged,
};
use crate::control::Control;
use crate::deadline::Deadline;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::options::GroupOptions;
use crate::rank::{Rank, RankInfo};
use crate::rendezvous;
use crate::store::{PrefixStore, Store, TcpStore};
use crate::transport::{Listener, Liveness, PeerInfo, TcpTransport};

mod kind;
mod stats;
mod thread;
mod work;

pub use kind::GroupKind;
pub use stats::{GroupStats, OpStats};
pub use work::Work;

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
    counters: Arc<Counters>,
    splits: AtomicUsize,
    /// `None` in a world of one.
    connected: Option<Connected<B>>,
}

/// What a group of several ranks has. Fields are dropped in this order: the thread ends first, then the
/// control channel says goodbye, and the store, which others may still need until then, goes last.
struct Connected<B: Backend> {
    thread: Mutex<CommunicationThread>,
    communicator: Box<dyn Communicator<B>>,
    control: Control,
    liveness: Liveness,
    peers: Vec<PeerInfo>,
    store: Arc<dyn Store>,
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

    /// The group that `info` describes; see [`ProcessGroup::from_env`].
    pub fn new(info: RankInfo, options: GroupOptions, device: &B::Device) -> Result<Self> {
        if info.world_size == 1 {
            return Ok(Self::build("0".into(), info, options, device, None));
        }
        let store = TcpStore::from_rank_info(&info, options.rendezvous_timeout)?;
        let address = rendezvous::local_address(options.interface.as_deref(), store.local_addr().ip())?;
        let run = format!("{}.{}", info.run_id, info.restart_count);
        let store = Arc::new(PrefixStore::new(Arc::new(store), run));
        Self::connect("0".into(), info, options, device, store, address)
    }

    /// A group of one, whatever the environment says.
    pub fn solo(device: &B::Device) -> Self {
        Self::build("0".into(), RankInfo::solo(), GroupOptions::new(), device, None)
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
        Self::connect("0".into(), info, options, device, store, address)
    }

    fn connect(
        name: String,
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        store: Arc<dyn Store>,
        address: IpAddr,
    ) -> Result<Self> {
        if info.world_size == 1 {
            return Ok(Self::build(name, info, options, device, None));
        }
        let (rank, world_size) = (info.rank, info.world_size);
        let deadline = Deadline::after(options.rendezvous_timeout);
        let listener = Listener::bind(address)?;
        let host = hostname::get().map(|host| host.to_string_lossy().into_owned()).unwrap_or_default();
        let me = PeerInfo::new(rank, host, std::process::id(), listener.address()?);
        let scope = PrefixStore::new(store.clone(), format!("group/{name}"));
        let peers = rendezvous::exchange(&scope, &me, world_size, deadline.remaining())?;
        let mesh = listener.connect(rank, &name, &peers, deadline)?;
        let liveness = Liveness::new(world_size);
        let transport = TcpTransport::new(rank, mesh.data, liveness.clone())?;
        let control = Control::start(rank, mesh.control, liveness.clone(), options.peer_timeout)?;
        let engine = HostEngine::new(Collectives::new(Box::new(transport), options.timeout));
        let connected = Connected {
            thread: Mutex::new(CommunicationThread::spawn(Box::new(engine), liveness.clone())?),
            communicator: Box::new(HostCommunicator),
            control,
            liveness,
            peers,
            store,
        };
        Ok(Self::build(name, info, options, device, Some(connected)))
    }

    fn build(
        name: String,
        info: RankInfo,
        options: GroupOptions,
        device: &B::Device,
        connected: Option<Connected<B>>,
    ) -> Self {
        tracing::info!(group = name, "{} of {}: device {device:?}", info.rank, info.world_size);
        Self(Arc::new(Inner {
            name,
            info,
            device: device.clone(),
            options,
            counters: Arc::default(),
            splits: AtomicUsize::new(0),
            connected,
        }))
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

    /// The element-wise reduction of all ranks' `tensor`, on every rank. Shapes must be equal.
    pub fn all_reduce<const D: usize, K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        op: ReduceOp,
    ) -> Work<Tensor<B, D, K>> {
        self.one(Operation::AllReduce(op), tensor, |shape, _| shape)
    }

    /// The tensor of rank `root` on every rank. Shapes must be equal.
    pub fn broadcast<const D: usize, K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        root: Rank,
    ) -> Work<Tensor<B, D, K>> {
        self.one(Operation::Broadcast(root), tensor, |shape, _| shape)
    }

    /// The tensors of all ranks, joined along the first dimension in rank order. Shapes must be equal.
    pub fn all_gather<const D: usize, K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
    ) -> Work<Tensor<B, D, K>> {
        let world_size = self.world_size();
        self.one(Operation::AllGather, tensor, move |mut shape, _| {
            if let Some(first) = shape.first_mut() {
                *first *= world_size;
            }
            shape
        })
    }

    /// This rank's chunk of the element-wise reduction. Elements are split as evenly as it goes, the first
    /// ranks having one more where the length does not divide.
    pub fn reduce_scatter<K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, 1, K>,
        op: ReduceOp,
    ) -> Work<Tensor<B, 1, K>> {
        self.one(Operation::ReduceScatter(op), tensor, |_, count| vec![count])
    }

    /// [`ProcessGroup::all_reduce`] of several tensors of one dtype as one collective.
    pub fn all_reduce_list(&self, tensors: Vec<AnyTensor<B>>, op: ReduceOp) -> Work<Vec<AnyTensor<B>>> {
        self.list(Operation::AllReduce(op), tensors)
    }

    /// [`ProcessGroup::broadcast`] of several tensors of one dtype as one collective.
    pub fn broadcast_list(&self, tensors: Vec<AnyTensor<B>>, root: Rank) -> Work<Vec<AnyTensor<B>>> {
        self.list(Operation::Broadcast(root), tensors)
    }

    /// The bytes of all ranks, in rank order, on every rank; lengths may differ.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let segment = Segment { dtype: DType::U8, memory: Memory::Host(Bytes::from_bytes_vec(bytes)) };
        self.submit(Operation::AllGatherBytes, Ok(vec![segment]), |staged| {
            staged.into_iter().map(|segment| Ok(host_bytes(segment)?.to_vec())).collect()
        })
        .wait()
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.submit(Operation::Barrier, Ok(Vec::new()), |_| Ok(())).wait()
    }

    /// Ends the group on all ranks: every wait, here and there, returns an error with `reason`.
    pub fn abort(&self, reason: &str) {
        self.fail(&Error::new(ErrorKind::Aborted, reason));
    }

    /// Ends the group because of `cause`; for floors above that find an error of their own.
    pub(crate) fn fail(&self, cause: &Error) {
        if let Some(connected) = &self.0.connected {
            connected.control.abort(cause);
        }
    }

    /// The first error of the group, if it has ended.
    pub fn cause(&self) -> Option<Error> {
        self.0.connected.as_ref().and_then(|connected| connected.liveness.cause())
    }

    /// Divides the group: ranks that give the same `color` form a new group, ordered by `key`, then by rank. All
    /// ranks must call it; one that gives no color gets no group. Groups work independently of each other, and
    /// the failure of one does not end another.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let number = self.0.splits.fetch_add(1, Ordering::Relaxed);
        let mine = postcard::to_stdvec(&(color, key))
            .map_err(|error| Error::with_source(ErrorKind::Io, "cannot encode a color", error))?;
        let mut members = Vec::new();
        for (rank, bytes) in self.all_gather_bytes(mine)?.iter().enumerate() {
            let (theirs, key): (Option<u32>, i64) = postcard::from_bytes(bytes).map_err(|error| {
                Error::with_source(ErrorKind::Mismatch, format!("rank {rank} sent no color"), error)
            })?;
            if color.is_some() && theirs == color {
                members.push((key, rank));
            }
        }
        let Some(color) = color else { return Ok(None) };
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == self.rank().0).unwrap_or_default();
        let info = RankInfo { rank: Rank(rank), world_size: members.len(), ..self.0.info.clone() };
        let name = format!("{}.{number}.{color}", self.0.name);
        let (options, device) = (self.0.options.clone(), &self.0.device);
        let group = match &self.0.connected {
            None => Self::build(name, info, options, device, None),
            Some(connected) => {
                let address = connected.peers[self.rank().0].address.ip();
                Self::connect(name, info, options, device, connected.store.clone(), address)?
            }
        };
        Ok(Some(group))
    }

    fn one<const D: usize, K: GroupKind<B>>(
        &self,
        operation: Operation,
        tensor: Tensor<B, D, K>,
        shape: impl FnOnce(Vec<usize>, usize) -> Vec<usize> + Send + 'static,
    ) -> Work<Tensor<B, D, K>> {
        let tensor = K::into_any(tensor.into_primitive());
        let Some(connected) = &self.0.connected else {
            self.0.counters.count(operation.kind(), 0);
            let result = self.permitted(operation, &tensor).and_then(|()| K::from_any(tensor));
            return Work::ready(result.map(Tensor::from_primitive));
        };
        let mut layout = Layout::of(&tensor);
        let staged =
            self.permitted(operation, &tensor).and_then(|()| connected.communicator.stage(vec![tensor]));
        let group = self.clone();
        self.submit(operation, staged, move |staged| {
            let [segment] = exactly(staged)?;
            let count = match &segment.memory {
                Memory::Host(bytes) => bytes.len() / segment.dtype.size(),
                Memory::Device(_) => layout.shape.iter().product(),
            };
            layout.shape = shape(layout.shape, count);
            K::from_any(group.communicator()?.unstage(segment, &layout)?)
        })
        .map(Tensor::from_primitive)
    }

    fn list(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Work<Vec<AnyTensor<B>>> {
        let Some(connected) = &self.0.connected else {
            self.0.counters.count(operation.kind(), 0);
            return Work::ready(Ok(tensors));
        };
        let layouts: Vec<_> = tensors.iter().map(Layout::of).collect();
        let permitted = tensors.iter().try_for_each(|tensor| self.permitted(operation, tensor));
        let staged = permitted.and_then(|()| connected.communicator.stage(tensors));
        let group = self.clone();
        self.submit(operation, staged, move |staged| {
            let communicator = group.communicator()?;
            staged.into_iter().zip(&layouts).map(|(one, layout)| communicator.unstage(one, layout)).collect()
        })
    }

    fn communicator(&self) -> Result<&dyn Communicator<B>> {
        match &self.0.connected {
            Some(connected) => Ok(connected.communicator.as_ref()),
            None => Err(Error::new(ErrorKind::Aborted, "a world of one has no communicator")),
        }
    }

    fn permitted(&self, operation: Operation, tensor: &AnyTensor<B>) -> Result<()> {
        match (operation, tensor) {
            (Operation::AllReduce(_) | Operation::ReduceScatter(_), AnyTensor::Bool(_)) => {
                Err(Error::config("boolean tensors cannot be reduced: call .int() first"))
            }
            (Operation::Broadcast(root), _) if root.0 >= self.world_size() => Err(Error::config(format!(
                "broadcast from {root}: the group has {} ranks",
                self.world_size()
            ))),
            _ => Ok(()),
        }
    }

    /// Hands staged memory to the communication thread. A rank that cannot take part (`staged` is an error) is
    /// out of step with its peers, so that ends the group.
    fn submit<T>(
        &self,
        operation: Operation,
        staged: Result<Staged>,
        finish: impl FnOnce(Staged) -> Result<T> + Send + 'static,
    ) -> Work<T> {
        let staged = match staged {
            Ok(staged) => staged,
            Err(error) => {
                self.fail(&error);
                return Work::ready(Err(error));
            }
        };
        let bytes = staged
            .iter()
            .map(|segment| match &segment.memory {
                Memory::Host(bytes) => bytes.len(),
                Memory::Device(_) => 0,
            })
            .sum();
        self.0.counters.count(operation.kind(), bytes);
        match &self.0.connected {
            None => Work::ready(finish(staged)),
            Some(connected) => {
                let thread = connected.thread.lock().unwrap_or_else(PoisonError::into_inner);
                Work::pending(thread.submit(operation, staged), finish, self.0.counters.clone())
            }
        }
    }
}

fn exactly(staged: Staged) -> Result<[Segment; 1]> {
    staged.try_into().map_err(|staged: Staged| {
        Error::new(ErrorKind::Mismatch, format!("a collective of one tensor returned {}", staged.len()))
    })
}

fn host_bytes(segment: Segment) -> Result<Bytes> {
    match segment.memory {
        Memory::Host(bytes) => Ok(bytes),
        Memory::Device(memory) => Err(Error::config(format!("expected host bytes, got {memory:?}"))),
    }
}
