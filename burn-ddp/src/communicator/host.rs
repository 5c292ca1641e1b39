//! The communicator of this crate: through host memory, over any [`Transport`](crate::transport::Transport).

use burn::tensor::{TensorData, backend::Backend};
use burn_backend::{Bytes, ExecutionError, read_sync};

use crate::collective::{Collectives, chunk};
use crate::communicator::{
    AnyTensor, Communicator, Engine, Layout, Memory, Operation, Segment, Staged, wire_dtype,
};
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// Stages tensors through host memory. Flex and NdArray move unique contiguous tensors in and out without a
/// copy; other backends copy from and to their device.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostCommunicator;

impl<B: Backend> Communicator<B> for HostCommunicator {
    fn stage(&self, _: Operation, tensors: Vec<AnyTensor<B>>) -> Result<Staged> {
        tensors
            .into_iter()
            .map(|tensor| {
                let data = into_data(tensor)?;
                Ok(Segment { dtype: wire_dtype(data.dtype)?, memory: Memory::Host(data.bytes) })
            })
            .collect()
    }

    fn unstage(&self, staged: Staged, layouts: &[Layout<B>]) -> Result<Vec<AnyTensor<B>>> {
        let tensor = |(segment, layout): (Segment, &Layout<B>)| {
            let data = TensorData::from_bytes(host(segment)?.1, layout.shape.clone(), layout.dtype);
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

/// Runs [`Collectives`] over host bytes.
pub struct HostEngine {
    collectives: Collectives,
}

impl HostEngine {
    /// An engine over `collectives`.
    pub fn new(collectives: Collectives) -> Self {
        Self { collectives }
    }

    /// The bytes of all ranks, in rank order; lengths may differ. All ranks call it, by `deadline`.
    pub fn exchange(&mut self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.collectives.within(deadline.remaining(), |all| all.all_gather_bytes(mine))
    }

    /// Checks over the wire that all ranks start the same operation on `count` elements, for an engine that moves
    /// them by other means, divided into tensors as `division` says; see [`Collectives::announce`]. They have to by
    /// `deadline`.
    #[allow(clippy::too_many_arguments, reason = "what is started, and until when")]
    pub fn announce(
        &mut self,
        operation: Operation,
        dtype: DType,
        count: usize,
        division: u64,
        deadline: Deadline,
    ) -> Result<()> {
        let (reduce, root) = match operation {
            Operation::AllReduce(op) | Operation::ReduceGradients(op) | Operation::ReduceScatter(op) => {
                (Some(op), None)
            }
            Operation::Broadcast(root) | Operation::GatherBytes(root) => (None, Some(root)),
            Operation::AllGather | Operation::AllGatherBytes | Operation::Barrier => (None, None),
        };
        self.collectives.within(deadline.remaining(), |all| {
            all.announce(operation.kind(), dtype, reduce, root, count, division)
        })
    }
}

/// Lets `run` see all of `segments` as one run of elements of one type.
fn as_list(
    segments: &mut [(DType, Bytes)],
    run: impl FnOnce(DType, &mut [&mut [u8]]) -> Result<()>,
) -> Result<()> {
    let Some(&(dtype, _)) = segments.first() else {
        return run(DType::U8, &mut []);
    };
    if let Some((other, _)) = segments.iter().find(|(other, _)| *other != dtype) {
        return Err(Error::config(format!(
            "one collective over tensors of {dtype} and of {other}: all must have one dtype"
        )));
    }
    for (_, bytes) in segments.iter_mut() {
        if !(bytes.as_ptr() as usize).is_multiple_of(dtype.size()) {
            // Memory that a user lent may begin anywhere; arithmetic needs elements where elements may be.
            let mut aligned = zeroed(dtype, bytes.len());
            aligned.copy_from_slice(bytes);
            *bytes = aligned;
        }
    }
    let mut list: Vec<&mut [u8]> = segments.iter_mut().map(|(_, bytes)| &mut bytes[..]).collect();
    run(dtype, &mut list)
}

impl Engine for HostEngine {
    fn run(&mut self, operation: Operation, staged: Staged) -> Result<Staged> {
        let mut segments = staged.into_iter().map(host).collect::<Result<Vec<_>>>()?;
        match operation {
            Operation::AllReduce(op) => {
                as_list(&mut segments, |dtype, data| self.collectives.all_reduce(dtype, op, data))?;
            }
            Operation::ReduceGradients(op) => {
                as_list(&mut segments, |dtype, data| self.collectives.reduce_gradients(dtype, op, data))?;
            }
            Operation::Broadcast(root) => {
                as_list(&mut segments, |dtype, data| self.collectives.broadcast(dtype, root, data))?;
            }
            Operation::ReduceScatter(op) => {
                let (dtype, input) = only(segments)?;
                let count = input.len() / dtype.size();
                let mine = chunk(count, self.collectives.world_size(), self.collectives.rank().0);
                let mut output = zeroed(dtype, mine.len() * dtype.size());
                self.collectives.reduce_scatter(dtype, op, &input, &mut output)?;
                segments = vec![(dtype, output)];
            }
            Operation::AllGather => {
                let (dtype, input) = only(segments)?;
                let mut output = zeroed(dtype, input.len() * self.collectives.world_size());
                self.collectives.all_gather(dtype, &input, &mut output)?;
                segments = vec![(dtype, output)];
            }
            Operation::AllGatherBytes => {
                let (_, input) = only(segments)?;
                let gathered = self.collectives.all_gather_bytes(&input)?;
                segments =
                    gathered.into_iter().map(|bytes| (DType::U8, Bytes::from_bytes_vec(bytes))).collect();
            }
            Operation::GatherBytes(root) => {
                let (_, input) = only(segments)?;
                let gathered = self.collectives.gather_bytes(root, &input)?;
                segments =
                    gathered.into_iter().map(|bytes| (DType::U8, Bytes::from_bytes_vec(bytes))).collect();
            }
            Operation::Barrier => self.collectives.barrier()?,
        }
        Ok(segments
            .into_iter()
            .map(|(dtype, bytes)| Segment { dtype, memory: Memory::Host(bytes) })
            .collect())
    }
}

fn host(segment: Segment) -> Result<(DType, Bytes)> {
    match segment.memory {
        Memory::Host(bytes) => Ok((segment.dtype, bytes)),
        Memory::Device(memory) => {
            Err(Error::config(format!("device memory {memory:?} given to the host engine")))
        }
    }
}

fn only(segments: Vec<(DType, Bytes)>) -> Result<(DType, Bytes)> {
    let count = segments.len();
    let mut segments = segments.into_iter();
    match (segments.next(), count) {
        (Some(segment), 1) => Ok(segment),
        _ => Err(Error::config(format!("this collective takes one tensor, got {count}"))),
    }
}

/// Zeroed memory aligned for `dtype`.
fn zeroed(dtype: DType, bytes: usize) -> Bytes {
    match dtype.size() {
        8 => Bytes::from_elems(vec![0u64; bytes / 8]),
        4 => Bytes::from_elems(vec![0u32; bytes / 4]),
        2 => Bytes::from_elems(vec![0u16; bytes / 2]),
        _ => Bytes::from_bytes_vec(vec![0u8; bytes]),
    }
}
