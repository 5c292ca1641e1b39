//! The half of the communicator on the caller's thread: tensors become one bucket, and a bucket becomes tensors.
//!
//! One bucket for a list of tensors, for three reasons:
//!
//! - One call of NCCL on 25 MB is faster than hundreds on kilobytes.
//! - A gradient is seldom contiguous memory (CUDA tensors of two dimensions have padded rows); a bucket of one
//!   dimension is.
//! - NCCL writes where it reads, which is allowed only in memory that nothing else can see. A bucket is allocated here
//!   and filled by operations that consume it, so it has one owner until it is made into tensors.
//!
//! Every collective is in place: a bucket is one allocation, and no engine allocates.
//!
//! In a bucket of several tensors each begins at a multiple of 512 bytes, the alignment of CUDA's rows, and the bucket
//! ends at one. cubecl cuts tensors whose size is such a multiple out as views; the others, which are the small ones,
//! are copied.
//!
//! Boolean tensors go through host memory: a gradient never is one, and NCCL would reduce them as numbers.

use std::any::Any;
use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Float, Int, Shape, Tensor};
use burn_ddp::communicator::{
    AnyTensor, Communicator, HostCommunicator, Layout, Memory, Operation, Segment, Staged, wire_dtype,
};
use burn_ddp::process_group::GroupKind;
use burn_ddp::{Error, ErrorKind, RankInfo, Result};

use crate::bucket::{Bucket, Plan};
use crate::device_buffer::{DeviceAccess, DeviceBuffer};

/// The half of the communicator on the caller's thread; the other one is [`NcclEngine`](crate::engine::NcclEngine).
#[derive(Debug)]
pub(crate) struct NcclCommunicator<B: Backend, A> {
    access: A,
    rank: usize,
    world_size: usize,
    device: B::Device,
}

impl<B: Backend, A: DeviceAccess<B>> NcclCommunicator<B, A> {
    /// The communicator of the rank of `info`, whose tensors are all on `device`.
    pub(crate) fn new(access: A, info: &RankInfo, device: B::Device) -> Self {
        Self { access, rank: info.rank.0, world_size: info.world_size, device }
    }

    /// Copies all `tensors`, of kind `K`, into one bucket, which is one segment.
    fn pack<K: GroupKind<B>>(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Result<Segment> {
        let layouts: Vec<_> = tensors.iter().map(Layout::of).collect();
        let (dtype, wire) = self.same_dtype(&layouts)?;
        let counts: Vec<usize> = layouts.iter().map(|layout| layout.shape.iter().product()).collect();
        let plan = Plan::new(operation, &counts, wire, self.rank, self.world_size)?;
        if plan.room == 0 {
            let bucket = Box::new(Bucket::empty(plan));
            return Ok(Segment { dtype: wire, memory: Memory::Device(bucket) });
        }
        let mut bucket = Tensor::<B, 1, K>::empty([plan.room], (&self.device, dtype));
        // Tensors without elements are skipped: to Burn a size of 0 in a reshape means "as before".
        let filled = tensors.into_iter().zip(&plan.places).filter(|(_, place)| !place.is_empty());
        for (tensor, place) in filled {
            let flat = K::reshape(K::from_any(tensor)?, Shape::new([place.len()]));
            bucket = bucket.slice_assign([place.clone()], Tensor::from_primitive(flat));
        }
        let buffer = self.access.open(K::into_any(bucket.into_primitive()))?;
        let needed = plan.room * wire.size();
        if buffer.bytes < needed {
            let text = format!("a bucket of {needed} bytes has {} on its device", buffer.bytes);
            return Err(Error::new(ErrorKind::Device, text));
        }
        let DeviceBuffer { address, kept, fence, .. } = buffer;
        let bucket = Bucket::new(plan, address, fence, Box::new(kept), wire);
        Ok(Segment { dtype: wire, memory: Memory::Device(Box::new(bucket)) })
    }

    /// The element type of all `layouts`, as Burn's and as the wire's. They must have one, and be on this rank's
    /// device.
    fn same_dtype(&self, layouts: &[Layout<B>]) -> Result<(burn::tensor::DType, burn_ddp::DType)> {
        let Some(first) = layouts.first() else { return Err(Error::config("no tensor to send")) };
        let wire = wire_dtype(first.dtype)?;
        for layout in layouts {
            let other = wire_dtype(layout.dtype)?;
            if other != wire {
                return Err(Error::config(format!(
                    "one collective over tensors of {wire} and of {other}: all must have one dtype"
                )));
            }
            if layout.device != self.device {
                return Err(Error::config(format!(
                    "a tensor on {:?}, but this group communicates on {:?}: move it with to_device first",
                    layout.device, self.device
                )));
            }
        }
        Ok((first.dtype, wire))
    }

    /// Makes the results in `bucket` into tensors of `layouts` and of kind `K`.
    fn unpack<K: GroupKind<B>>(&self, bucket: Bucket, layouts: &[Layout<B>]) -> Result<Vec<AnyTensor<B>>> {
        let (kept, results) = bucket.into_results();
        let whole = match kept {
            Some(kept) => Some(K::from_any(self.access.close(self.kept(kept)?)?)?),
            None => None,
        };
        let tensor = |(place, layout): (Range<usize>, &Layout<B>)| {
            let shape = Shape::from(layout.shape.clone());
            let primitive = match &whole {
                Some(whole) if !place.is_empty() => {
                    let whole = Tensor::<B, 1, K>::from_primitive(whole.clone());
                    K::reshape(cut(whole, place).into_primitive(), shape)
                }
                _ => K::empty(shape, &layout.device, layout.dtype),
            };
            K::into_any(primitive)
        };
        Ok(results.into_iter().zip(layouts).map(tensor).collect())
    }

    fn kept(&self, kept: Box<dyn Any + Send>) -> Result<A::Kept> {
        let foreign = |_| Error::config("memory of another communicator");
        kept.downcast().map(|kept| *kept).map_err(foreign)
    }
}

/// The elements `place` of `whole`; `whole` itself if these are all of it.
fn cut<B: Backend, K: GroupKind<B>>(whole: Tensor<B, 1, K>, place: Range<usize>) -> Tensor<B, 1, K> {
    if place == (0..whole.dims()[0]) { whole } else { whole.slice([place]) }
}

impl<B: Backend, A: DeviceAccess<B>> Communicator<B> for NcclCommunicator<B, A> {
    fn stage(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Result<Staged> {
        match tensors.first() {
            Some(AnyTensor::Float(_)) => Ok(vec![self.pack::<Float>(operation, tensors)?]),
            Some(AnyTensor::Int(_)) => Ok(vec![self.pack::<Int>(operation, tensors)?]),
            _ => HostCommunicator.stage(operation, tensors),
        }
    }

    fn unstage(&self, mut staged: Staged, layouts: &[Layout<B>]) -> Result<Vec<AnyTensor<B>>> {
        if !matches!(staged[..], [Segment { memory: Memory::Device(_), .. }]) {
            return HostCommunicator.unstage(staged, layouts);
        }
        let (_, bucket) = Bucket::take(&mut staged)?;
        match layouts.first() {
            Some(layout) if layout.dtype.is_float() => self.unpack::<Float>(*bucket, layouts),
            _ => self.unpack::<Int>(*bucket, layouts),
        }
    }
}
