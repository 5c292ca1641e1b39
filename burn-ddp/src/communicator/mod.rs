//! The extension point for communicators: tensors become memory, an engine moves it, and it becomes tensors again.
//!
//! The traits that a crate implements to bring a communicator of its own (NCCL, MPI) are in this module; hand the
//! factory to [`ProcessGroup::with_factory`](crate::ProcessGroup::with_factory). A [`Communicator`] is no communicator
//! in the sense of MPI, a set of ranks: it converts tensors to memory and back.
//!
//! ```text
//! caller's thread          Communicator::stage     tensors -> Staged (host bytes, or device pointers with a fence)
//! communication thread     Engine::run             Staged -> Staged; makes no call of Burn
//! caller's thread          Communicator::unstage   Staged -> tensors
//! ```
//!
//! A collective has three stages because tensors may not travel between threads freely; only [`Staged`] crosses
//! threads. A [`CommunicatorFactory`] makes both halves when the ranks of a group are connected.

use burn::tensor::backend::Backend;
use burn::tensor::ops::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::TensorMetadata;
use burn_ddp_comm::{DType, Error, Result};

mod host;

pub use burn_ddp_comm::Operation;
pub use burn_ddp_comm::collective::chunk;
pub use burn_ddp_comm::deadline::Deadline;
pub use burn_ddp_comm::group::{
    DeviceMemory, Engine, HostEngine, HostMemory, MakeEngine, Memory, Segment, Setup, Staged,
};
pub use burn_ddp_comm::transport::Liveness;
pub use host::HostCommunicator;
pub(crate) use host::into_data;

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

    /// The device of the tensor.
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

/// Turns tensors into memory an [`Engine`] can move, and back. Called on the caller's thread.
pub trait Communicator<B: Backend>: Send + Sync + 'static {
    /// Takes the memory out of `tensors`, for `operation`. Several tensors may become one segment. Memory for a result
    /// of another size is allocated here, because an engine of a device cannot.
    ///
    /// # Errors
    /// `Config` for tensors that cannot travel; it ends the group.
    fn stage(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Result<Staged>;

    /// Makes the tensors of `staged`, with the shapes, types and devices of `layouts`.
    ///
    /// # Errors
    /// `Config` for memory of another communicator.
    fn unstage(&self, staged: Staged, layouts: &[Layout<B>]) -> Result<Vec<AnyTensor<B>>>;
}

/// Makes the two halves of a communicator for a group, and for each group that is split off it. Implement it to plug in
/// a communicator; the group keeps its control channel, and a [`HostEngine`] for bytes and barriers.
pub trait CommunicatorFactory<B: Backend>: Send + Sync + 'static {
    /// Makes the communicator of the connected ranks that `setup` describes, for tensors on `device`. All ranks call
    /// it, as their last step of start-up. Until the communication thread takes `host`, ranks can exchange bytes over
    /// it.
    ///
    /// # Errors
    /// Any error ends the start-up on all ranks.
    fn open(&self, setup: Setup, device: &B::Device, host: HostEngine) -> Result<Opened<B>>;
}

/// The two halves of a communicator.
pub struct Opened<B: Backend> {
    /// The caller's half.
    pub communicator: Box<dyn Communicator<B>>,
    /// Makes the communication thread's half, on that thread.
    pub engine: MakeEngine,
}

/// Shape, type and device of a tensor that is made of memory.
#[derive(Clone, Debug)]
pub struct Layout<B: Backend> {
    /// Sizes of all dimensions.
    pub shape: Vec<usize>,
    /// Burn's element type.
    pub dtype: burn::tensor::DType,
    /// Device of the tensor.
    pub device: B::Device,
}

impl<B: Backend> Layout<B> {
    /// The layout of `tensor`.
    pub fn of(tensor: &AnyTensor<B>) -> Self {
        Self { shape: tensor.shape(), dtype: tensor.dtype(), device: tensor.device() }
    }
}
