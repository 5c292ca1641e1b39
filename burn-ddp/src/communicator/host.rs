//! The communicator of this crate: tensors travel through host memory.

use std::any::Any;

use burn::tensor::{TensorData, backend::Backend};
use burn_backend::{Bytes, ExecutionError, read_sync};
use burn_ddp_comm::{Error, ErrorKind, Operation, Result};

use super::{AnyTensor, Communicator, HostMemory, Layout, Memory, Segment, Staged, wire_dtype};

/// Stages tensors through host memory. Flex and NdArray move unique contiguous tensors in and out without a
/// copy; other backends copy from and to their device.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostCommunicator;

/// The memory of a tensor, as Burn hands it out.
#[derive(Debug)]
struct TensorBytes(Bytes);

impl HostMemory for TensorBytes {
    fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl<B: Backend> Communicator<B> for HostCommunicator {
    fn stage(&self, _: Operation, tensors: Vec<AnyTensor<B>>) -> Result<Staged> {
        let segment = |tensor| {
            let data = into_data(tensor)?;
            let memory = Memory::Host(Box::new(TensorBytes(data.bytes)));
            Ok(Segment { dtype: wire_dtype(data.dtype)?, memory })
        };
        tensors.into_iter().map(segment).collect()
    }

    fn unstage(&self, staged: Staged, layouts: &[Layout<B>]) -> Result<Vec<AnyTensor<B>>> {
        let tensor = |(segment, layout): (Segment, &Layout<B>)| {
            let data = TensorData::from_bytes(into_burn_bytes(segment)?, layout.shape.clone(), layout.dtype);
            Ok(match layout.dtype {
                burn::tensor::DType::Bool(_) => AnyTensor::Bool(B::bool_from_data(data, &layout.device)),
                dtype if dtype.is_float() => AnyTensor::Float(B::float_from_data(data, &layout.device)),
                _ => AnyTensor::Int(B::int_from_data(data, &layout.device)),
            })
        };
        staged.into_iter().zip(layouts).map(tensor).collect()
    }
}

/// Reads a tensor to the host, moving its memory where the backend can.
pub(crate) fn into_data<B: Backend>(tensor: AnyTensor<B>) -> Result<TensorData> {
    let unreadable = |error: ExecutionError| {
        Error::with_source(ErrorKind::Io, "cannot read a tensor from its device", format!("{error:?}"))
    };
    match tensor {
        AnyTensor::Float(tensor) => read_sync(B::float_into_data(tensor)),
        AnyTensor::Int(tensor) => read_sync(B::int_into_data(tensor)),
        AnyTensor::Bool(tensor) => read_sync(B::bool_into_data(tensor)),
    }
    .map_err(unreadable)
}

/// Moves a segment's memory into Burn's type: a tensor's own memory, or a `Vec` that an engine made for a result.
fn into_burn_bytes(segment: Segment) -> Result<Bytes> {
    let memory: Box<dyn Any> = match segment.memory {
        Memory::Host(memory) => memory,
        Memory::Device(memory) => {
            return Err(Error::config(format!("device memory {memory:?} given to the host communicator")));
        }
    };
    let foreign = |_| Error::config(format!("memory of {} that no engine of this crate made", segment.dtype));
    memory
        .downcast::<TensorBytes>()
        .map(|bytes| bytes.0)
        .or_else(|memory| memory.downcast::<Vec<u8>>().map(|bytes| Bytes::from_bytes_vec(*bytes)))
        .or_else(|memory| memory.downcast::<Vec<u16>>().map(|elements| Bytes::from_elems(*elements)))
        .or_else(|memory| memory.downcast::<Vec<u32>>().map(|elements| Bytes::from_elems(*elements)))
        .or_else(|memory| memory.downcast::<Vec<u64>>().map(|elements| Bytes::from_elems(*elements)))
        .map_err(foreign)
}
