//! The one seam NCCL and MPI plug into: lists of tensors in, lists of tensors out.
//!
//! A collective has three stages because tensors may not travel between threads freely. On the caller's
//! thread [`Communicator::stage`] turns tensors into plain memory (host bytes, or device pointers with a
//! fence); on the group's communication thread an [`Engine`] moves that memory and makes no Burn call; back on
//! the caller's thread [`Communicator::unstage`] makes tensors of it. Only [`Staged`] crosses threads.

use std::any::Any;
use std::fmt;

use burn::tensor::backend::Backend;
use burn::tensor::ops::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Bytes, TensorMetadata};
use burn_ddp_comm::{Rank, RankInfo};

use crate::deadline::Deadline;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::options::GroupOptions;
use crate::transport::{Liveness, OpKind};

mod host;

pub(crate) use host::into_data;
pub use host::{HostCommunicator, HostEngine};

/// A tensor of any kind and number of dimensions.
#[derive(Clone, Debug)]
pub enum AnyTensor<B: Backend> {
    /// A float tensor.
    Float(FloatTensor<B>),
    /// An integer tensor.
    Int(IntTensor<B>),
    /// A boolean tensor; moved as bytes, never reduced.
    Bool(BoolTensor<B>),
}

impl<B: Backend> AnyTensor<B> {
    /// Sizes of all dimensions.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Float(tensor) => tensor.shape().to_vec(),
            Self::Int(tensor) => tensor.shape().to_vec(),
            Self::Bool(tensor) => tensor.shape().to_vec(),
        }
    }

    /// Burn's element type.
    pub fn dtype(&self) -> burn::tensor::DType {
        match self {
            Self::Float(tensor) => tensor.dtype(),
            Self::Int(tensor) => tensor.dtype(),
            Self::Bool(tensor) => tensor.dtype(),
        }
    }

    /// The device it lives on.
    pub fn device(&self) -> B::Device {
        match self {
            Self::Float(tensor) => B::float_device(tensor),
            Self::Int(tensor) => B::int_device(tensor),
            Self::Bool(tensor) => B::bool_device(tensor),
        }
    }

    /// The float tensor in it.
    ///
    /// # Errors
    /// When it is of another kind.
    pub fn into_float(self) -> Result<FloatTensor<B>> {
        match self {
            Self::Float(tensor) => Ok(tensor),
            other => Err(Error::config(format!("expected a float tensor, got {:?}", other.dtype()))),
        }
    }
}

/// The wire type of Burn's `dtype`.
///
/// # Errors
/// Names the type when it cannot travel.
pub fn wire_dtype(dtype: burn::tensor::DType) -> Result<DType> {
    use burn::tensor::DType as Burn;
    Ok(match dtype {
        Burn::F64 => DType::F64,
        Burn::F32 => DType::F32,
        Burn::F16 => DType::F16,
        Burn::BF16 => DType::BF16,
        Burn::I64 => DType::I64,
        Burn::I32 => DType::I32,
        Burn::U8 | Burn::Bool(_) => DType::U8,
        other => {
            return Err(Error::config(format!(
                "tensors of {other:?} cannot be sent between ranks: cast to f32, f64, f16, bf16, i32, i64 or u8"
            )));
        }
    })
}

/// One tensor's memory on its way through an [`Engine`].
#[derive(Debug)]
pub struct Segment {
    /// Element type on the wire.
    pub dtype: DType,
    /// Where the elements are.
    pub memory: Memory,
}

/// Where a segment's elements are.
#[derive(Debug)]
pub enum Memory {
    /// In this process.
    Host(Bytes),
    /// On a device, known only to the communicator that staged it.
    Device(Box<dyn DeviceMemory>),
}

impl Memory {
    /// Bytes of the elements in it.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(memory) => memory.bytes(),
        }
    }
}

/// Device memory of a communicator that reduces tensors where they are.
pub trait DeviceMemory: Any + Send + fmt::Debug {
    /// Bytes of the elements in it, without what lies between them.
    fn bytes(&self) -> usize;

    /// For the communicator to get its own type back.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// What crosses from the caller's thread to the communication thread and back.
pub type Staged = Vec<Segment>;

/// A collective operation over staged memory; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reduce over all ranks, the result everywhere.
    AllReduce(ReduceOp),
    /// [`AllReduce`](Operation::AllReduce) of a gradient bucket; it meets no other operation.
    ReduceGradients(ReduceOp),
    /// Reduce over all ranks, rank r keeping chunk r of one segment.
    ReduceScatter(ReduceOp),
    /// The segments of all ranks, one after the other, everywhere; equal lengths.
    AllGather,
    /// The bytes of all ranks everywhere, as one segment a rank; lengths may differ.
    AllGatherBytes,
    /// All ranks' bytes, of any lengths, on this rank only; one segment in, one per rank out.
    GatherBytes(Rank),
    /// The segments of one rank everywhere.
    Broadcast(Rank),
    /// Nothing but waiting for all.
    Barrier,
}

impl Operation {
    /// What its frames and errors say it is.
    pub fn kind(self) -> OpKind {
        match self {
            Self::AllReduce(_) => OpKind::AllReduce,
            Self::ReduceGradients(_) => OpKind::ReduceGradients,
            Self::ReduceScatter(_) => OpKind::ReduceScatter,
            Self::AllGather | Self::AllGatherBytes => OpKind::AllGather,
            Self::Broadcast(_) => OpKind::Broadcast,
            Self::Barrier => OpKind::Barrier,
            Self::GatherBytes(_) => OpKind::Gather,
        }
    }
}

/// Turns tensors into memory an [`Engine`] can move, and back. Called on the caller's thread.
pub trait Communicator<B: Backend>: Send + Sync + 'static {
    /// Takes the memory out of `tensors`, for `operation`: several tensors may become one segment, and room for a
    /// result of another size is made here, because an engine cannot.
    fn stage(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Result<Staged>;

    /// Makes the tensors of `staged`, shaped and placed as `layouts` say.
    fn unstage(&self, staged: Staged, layouts: &[Layout<B>]) -> Result<Vec<AnyTensor<B>>>;
}

/// The communication thread's half: moves memory between ranks, in the order it is called. It lives and dies on that
/// thread.
pub trait Engine {
    /// Runs `operation` on `staged` and returns the result's memory.
    fn run(&mut self, operation: Operation, staged: Staged) -> Result<Staged>;

    /// The group has ended and nothing more will be run. Whoever holds something that peers wait for lets go of it, though
    /// this rank may be busy elsewhere.
    fn abandon(&mut self) {}
}

/// Makes the two halves for a group, and for each group that is split off it. Who implements it brings a communicator
/// of his own; the group keeps the control channel, and a [`HostEngine`] for what is bytes and no tensor.
pub trait CommunicatorFactory<B: Backend>: Send + Sync + 'static {
    /// The communicator of the group whose ranks `meeting` has brought together. All ranks call it, as their last step
    /// of start-up. Until the communication thread has it, `host` is there for ranks to compare notes.
    fn open(&self, meeting: Meeting<B>, host: HostEngine) -> Result<Opened<B>>;
}

/// A group whose ranks can reach each other, as a [`CommunicatorFactory`] finds it.
pub struct Meeting<B: Backend> {
    /// Unique among the groups of a run.
    pub name: String,
    /// This rank, in this group.
    pub info: RankInfo,
    /// The device that this rank was made for.
    pub device: B::Device,
    /// Limits of the group.
    pub options: GroupOptions,
    /// Until when all ranks must be through.
    pub deadline: Deadline,
    /// Why the group has ended, if it has: every wait must look at it.
    pub liveness: Liveness,
}

/// What a [`CommunicatorFactory`] makes.
pub struct Opened<B: Backend> {
    /// The caller's half.
    pub communicator: Box<dyn Communicator<B>>,
    /// Makes the communication thread's half, on that thread.
    pub engine: Box<dyn FnOnce() -> Result<Box<dyn Engine>> + Send>,
}

/// How to make a tensor of memory again.
#[derive(Clone, Debug)]
pub struct Layout<B: Backend> {
    /// Sizes of all dimensions.
    pub shape: Vec<usize>,
    /// Burn's element type.
    pub dtype: burn::tensor::DType,
    /// Where the tensor belongs.
    pub device: B::Device,
}

impl<B: Backend> Layout<B> {
    /// The layout of `tensor`.
    pub fn of(tensor: &AnyTensor<B>) -> Self {
        Self { shape: tensor.shape(), dtype: tensor.dtype(), device: tensor.device() }
    }
}
