//! The bucket that carries the tensors of one collective through the engine, and its layout.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, often of one")]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr;

use burn_ddp::communicator::{DeviceMemory, Memory, Operation, Staged, chunk};
use burn_ddp::{DType, Error, Result};

use crate::comm::Span;
use crate::device_buffer::Fence;

/// Bytes at whose multiples tensors begin; [`communicator`](crate::communicator) has the reason.
const ALIGNMENT: usize = 512;

/// The layout of a bucket, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Elements of the whole bucket.
    pub(crate) room: usize,
    /// The range of each tensor that is sent.
    pub(crate) places: Vec<Range<usize>>,
    /// The range of each result.
    results: Vec<Range<usize>>,
    /// The span for NCCL: the offsets `send` and `recv`, and the elements sent.
    send: usize,
    recv: usize,
    count: usize,
}

impl Plan {
    pub(crate) fn new(
        operation: Operation,
        counts: &[usize],
        dtype: DType,
        rank: usize,
        world_size: usize,
    ) -> Result<Self> {
        match (operation, counts) {
            (Operation::AllReduce(_) | Operation::ReduceGradients(_) | Operation::Broadcast(_), _) => {
                let (places, room) = side_by_side(counts, ALIGNMENT / dtype.size());
                Ok(Self { room, results: places.clone(), places, send: 0, recv: 0, count: room })
            }
            (Operation::ReduceScatter(_), &[count]) => {
                let mine = chunk(count, world_size, rank);
                let recv = mine.start;
                Ok(Self { room: count, places: vec![0..count], results: vec![mine], send: 0, recv, count })
            }
            (Operation::AllGather, &[count]) => {
                let (room, send) = (count * world_size, count * rank);
                let places = vec![send..send + count];
                Ok(Self { room, places, results: vec![0..room], send, recv: 0, count })
            }
            _ => Err(Error::config(format!("{operation} takes one tensor, got {}", counts.len()))),
        }
    }
}

/// The ranges of tensors of `counts` elements, and their end. A single tensor has its own size; of several each begins,
/// and the last ends, at a multiple of `step` elements.
fn side_by_side(counts: &[usize], step: usize) -> (Vec<Range<usize>>, usize) {
    if let &[count] = counts {
        return (vec![0..count], count);
    }
    let mut end = 0;
    let places = counts.iter().map(|count| {
        let start = end;
        end = (start + count).next_multiple_of(step);
        start..start + count
    });
    (places.collect(), end)
}

/// The tensors of one collective in one piece of device memory.
pub(crate) struct Bucket {
    plan: Plan,
    address: usize,
    fence: Option<Fence>,
    /// `None` for a bucket without elements.
    kept: Option<Box<dyn Any + Send>>,
    dtype: DType,
    done: bool,
}

impl Bucket {
    pub(crate) fn new(
        plan: Plan,
        address: usize,
        fence: Fence,
        kept: Box<dyn Any + Send>,
        dtype: DType,
    ) -> Self {
        Self { plan, address, fence: Some(fence), kept: Some(kept), dtype, done: false }
    }

    /// A bucket of a `plan` without elements.
    pub(crate) fn empty(plan: Plan) -> Self {
        Self { plan, address: 0, fence: None, kept: None, dtype: DType::U8, done: false }
    }

    /// Takes the only segment of `staged`, with its type.
    pub(crate) fn take(staged: &mut Staged) -> Result<(DType, Box<Self>)> {
        match (staged.pop(), staged.len()) {
            (Some(segment), 0) => match segment.memory {
                Memory::Device(memory) => (memory as Box<dyn Any>)
                    .downcast()
                    .map(|bucket| (segment.dtype, bucket))
                    .map_err(|_| Error::config("device memory of another communicator")),
                Memory::Host(_) => Err(Error::config("host memory where a bucket was expected")),
            },
            (_, left) => Err(Error::config(format!("{left} segments beside a bucket"))),
        }
    }

    /// Waits until the kernels that write the bucket are done.
    pub(crate) fn wait_for_fence(&mut self) -> Result<()> {
        self.fence.take().map_or(Ok(()), Fence::wait)
    }

    /// The memory that NCCL is given; `None` if there are no elements.
    pub(crate) fn span(&self) -> Option<Span> {
        let at = |offset: usize| self.address + offset * self.dtype.size();
        self.kept.as_ref().map(|_| Span {
            send: ptr::with_exposed_provenance(at(self.plan.send)),
            recv: ptr::with_exposed_provenance_mut(at(self.plan.recv)),
            count: self.plan.count,
        })
    }

    /// Elements of this rank's tensors, without the gaps between them.
    pub(crate) fn elements(&self) -> usize {
        self.plan.places.iter().map(Range::len).sum()
    }

    /// Hash of the tensors' lengths, equal on ranks that divide the elements alike.
    pub(crate) fn division(&self) -> u64 {
        // FNV-1a, over lengths instead of bytes.
        let mix = |hash: u64, place: &Range<usize>| (hash ^ place.len() as u64).wrapping_mul(0x100_0000_01b3);
        self.plan.places.iter().fold(0xcbf2_9ce4_8422_2325, mix)
    }

    /// Marks the collective as done: from here on the bucket holds results.
    pub(crate) fn set_done(&mut self) {
        self.done = true;
    }

    /// The memory, and the ranges of the results in it.
    pub(crate) fn into_results(self) -> (Option<Box<dyn Any + Send>>, Vec<Range<usize>>) {
        (self.kept, self.plan.results)
    }
}

impl DeviceMemory for Bucket {
    fn bytes(&self) -> usize {
        let places = if self.done { &self.plan.results } else { &self.plan.places };
        places.iter().map(Range::len).sum::<usize>() * self.dtype.size()
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket({} x {})", self.elements(), self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use burn_ddp::{Rank, ReduceOp};

    use super::*;

    const ALL_REDUCE: Operation = Operation::AllReduce(ReduceOp::Sum);

    #[test]
    fn one_tensor_lies_as_it_is() {
        let plan = Plan::new(ALL_REDUCE, &[5], DType::F32, 0, 3).unwrap();
        assert_eq!((plan.room, plan.count, &plan.places[..]), (5, 5, &[0..5][..]));
    }

    #[test]
    fn several_tensors_begin_at_multiples_of_512_bytes_and_the_bucket_ends_at_one() {
        for (dtype, step) in [(DType::F64, 64), (DType::F32, 128), (DType::BF16, 256), (DType::U8, 512)] {
            let plan =
                Plan::new(Operation::Broadcast(Rank(0)), &[1, 0, step, step + 1], dtype, 0, 2).unwrap();
            let expected = [0..1, step..step, step..2 * step, 2 * step..3 * step + 1];
            assert_eq!((&plan.places[..], plan.room), (&expected[..], 4 * step));
            assert_eq!((plan.results, plan.count), (plan.places, plan.room));
        }
    }

    #[test]
    fn scattered_and_gathered_in_place() {
        let scatter =
            |rank| Plan::new(Operation::ReduceScatter(ReduceOp::Sum), &[7], DType::F32, rank, 3).unwrap();
        assert_eq!([0, 1, 2].map(|rank| scatter(rank).recv), [0, 3, 5]);
        assert_eq!([0, 1, 2].map(|rank| scatter(rank).results), [[0..3], [3..5], [5..7]]);
        let gather = Plan::new(Operation::AllGather, &[4], DType::F32, 2, 3).unwrap();
        let (places, results) = (vec![8..12], vec![0..12]);
        assert_eq!(gather, Plan { room: 12, places, results, send: 8, recv: 0, count: 4 });
        let error = Plan::new(Operation::AllGather, &[4, 4], DType::F32, 0, 2).unwrap_err();
        assert_eq!(error.to_string(), "all_gather takes one tensor, got 2");
    }

    #[test]
    fn bytes_are_those_of_the_tensors_and_then_of_the_results() {
        let scatter = Plan::new(Operation::ReduceScatter(ReduceOp::Sum), &[7], DType::F32, 0, 3).unwrap();
        let mut bucket = Bucket::new(scatter, 512, Fence::new(|| Ok(())), Box::new(()), DType::F32);
        assert_eq!(bucket.bytes(), 28);
        bucket.set_done();
        assert_eq!(bucket.bytes(), 12);
        let division = |counts: &[usize]| {
            Bucket::empty(Plan::new(ALL_REDUCE, counts, DType::F32, 0, 1).unwrap()).division()
        };
        assert_ne!(division(&[8]), division(&[3, 5]));
        assert_ne!(division(&[5, 3]), division(&[3, 5]));
    }
}
