//! Tensors as memory that NCCL can reach, and tensors again.
//!
//! NCCL wants an address, and a backend hides it. [`DeviceAccess`] is how a backend gives it away; it is a value of its
//! own, so that a test can put host memory in the place of a device. Everything else is here, once for all backends.
//!
//! A list of tensors becomes one bucket, for three reasons. One call of NCCL on 25 MB is faster than hundreds on
//! kilobytes. A gradient is seldom contiguous memory (CUDA tensors of two dimensions have padded rows), a bucket of one
//! dimension is. And NCCL writes where it reads, which is allowed in memory that nobody else can see: a bucket is made
//! here, from nothing, by operations that consume it, and is seen by nobody until it is made into tensors. Every
//! collective is in place, so no engine has to allocate and a bucket is one allocation.
//!
//! In a bucket of several tensors each begins at a multiple of 512 bytes, the alignment of CUDA's rows, and the bucket
//! ends at one. There cubecl cuts tensors whose size is such a multiple out as views; the others, which are the small
//! ones, are copied.
//!
//! Boolean tensors go through host memory: a gradient never is one, and NCCL would reduce them as numbers.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Float, Int, Shape, Tensor};
use burn_ddp::communicator::{
    AnyTensor, Communicator, HostCommunicator, Layout, Memory, Operation, Segment, Staged, wire_dtype,
};
use burn_ddp::process_group::GroupKind;
use burn_ddp::{Error, ErrorKind, RankInfo, Result};

mod bucket;

pub(crate) use bucket::Bucket;
use bucket::Plan;

/// How NCCL reaches the tensors of backend `B`.
///
/// # Safety
///
/// Until it is given back to [`close`](DeviceAccess::close) or dropped, `kept` holds the memory of the buffer valid for
/// reads and writes by the device of the group, and nobody else reads or writes it once the fence has been waited for.
pub unsafe trait DeviceAccess<B: Backend>: Send + Sync + 'static {
    /// Keeps the memory alive and unshared.
    type Kept: Send + 'static;

    /// The memory of `tensor`, which has one dimension and is the caller's alone. Called on the thread that made the
    /// tensor; the fence begins here.
    fn open(&self, tensor: AnyTensor<B>) -> Result<DeviceBuffer<Self::Kept>>;

    /// The tensor again, on the thread that waited for the collective, after it is done.
    fn close(&self, kept: Self::Kept) -> Result<AnyTensor<B>>;
}

/// The memory of a tensor.
#[derive(Debug)]
pub struct DeviceBuffer<K> {
    /// Where it begins, as the device counts (CUDA's `CUdeviceptr`).
    pub address: usize,
    /// Its size.
    pub bytes: usize,
    /// See [`DeviceAccess::Kept`].
    pub kept: K,
    /// The end of everything that writes into it.
    pub fence: Fence,
}

/// The end of everything that was enqueued on the submitting thread's stream before the fence was made. The
/// communication thread waits for it, and makes no other call of Burn.
pub struct Fence(Box<dyn FnOnce() -> Result<()> + Send>);

impl Fence {
    /// A fence that is reached when `wait` returns.
    pub fn new(wait: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Blocks until the fence is reached.
    ///
    /// # Errors
    ///
    /// When the device has failed in the work before the fence.
    pub fn wait(self) -> Result<()> {
        (self.0)()
    }
}

impl std::fmt::Debug for Fence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fence")
    }
}

/// The caller's half of the communicator; the other one is [`NcclEngine`](crate::NcclEngine).
#[derive(Debug)]
pub struct NcclCommunicator<B: Backend, A> {
    access: A,
    rank: usize,
    world_size: usize,
    device: B::Device,
}

impl<B: Backend, A: DeviceAccess<B>> NcclCommunicator<B, A> {
    /// For the rank of `info`, whose tensors are all on `device`.
    pub fn new(access: A, info: &RankInfo, device: B::Device) -> Self {
        Self { access, rank: info.rank.0, world_size: info.world_size, device }
    }

    /// One segment of all `tensors`, whose kind is `K`.
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
        // A tensor without elements changes nothing, and to Burn a size of 0 in a reshape means "as before".
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

    /// The one element type of `layouts`, for Burn and on the wire, all of which must be on this rank's device.
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

    /// The tensors of `layouts`, whose kind is `K`.
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

/// The part `place` of `whole`, which is `whole` itself where it is all of it.
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
