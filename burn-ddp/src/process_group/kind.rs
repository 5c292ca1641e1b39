//! Which kinds of tensors a group takes.

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Bool, Float, Int, TensorKind, TensorPrimitive};

use crate::communicator::AnyTensor;
use burn_ddp_comm::{Error, Result};

/// Burn's tensor kinds, in and out of [`AnyTensor`]. Quantized float tensors are dequantized.
pub trait GroupKind<B: Backend>: TensorKind<B> + BasicOps<B> + 'static {
    /// From this kind's primitive.
    fn into_any(primitive: Self::Primitive) -> AnyTensor<B>;

    /// To this kind's primitive.
    ///
    /// # Errors
    /// When `tensor` is of another kind.
    fn from_any(tensor: AnyTensor<B>) -> Result<Self::Primitive>;
}

impl<B: Backend> GroupKind<B> for Float {
    fn into_any(primitive: TensorPrimitive<B>) -> AnyTensor<B> {
        AnyTensor::Float(primitive.tensor())
    }

    fn from_any(tensor: AnyTensor<B>) -> Result<TensorPrimitive<B>> {
        tensor.into_float().map(TensorPrimitive::Float)
    }
}

impl<B: Backend> GroupKind<B> for Int {
    fn into_any(primitive: Self::Primitive) -> AnyTensor<B> {
        AnyTensor::Int(primitive)
    }

    fn from_any(tensor: AnyTensor<B>) -> Result<Self::Primitive> {
        match tensor {
            AnyTensor::Int(tensor) => Ok(tensor),
            other => Err(Error::config(format!("expected an integer tensor, got {:?}", other.dtype()))),
        }
    }
}

impl<B: Backend> GroupKind<B> for Bool {
    fn into_any(primitive: Self::Primitive) -> AnyTensor<B> {
        AnyTensor::Bool(primitive)
    }

    fn from_any(tensor: AnyTensor<B>) -> Result<Self::Primitive> {
        match tensor {
            AnyTensor::Bool(tensor) => Ok(tensor),
            other => Err(Error::config(format!("expected a boolean tensor, got {:?}", other.dtype()))),
        }
    }
}
