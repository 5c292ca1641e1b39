//! The buckets of an optimizer step on their way over all ranks.

use std::collections::VecDeque;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, TensorData};

use super::{Reducer, float_dtype};
use crate::bucket::ParamSpec;
use crate::communicator::{AnyTensor, into_data};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::{ProcessGroup, Work};

/// Buckets that were sent, in the plan's order: the order on the wire, and so equal on all ranks.
pub(super) struct Flight<B: Backend> {
    /// Most buckets that are sent and unfinished.
    limit: usize,
    /// The last of those that were sent; the others have landed.
    works: VecDeque<Work<Vec<AnyTensor<B>>>>,
    landed: Vec<Vec<AnyTensor<B>>>,
}

impl<B: Backend> Flight<B> {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, works: VecDeque::new(), landed: Vec::new() }
    }

    /// This one, and in its place another of none.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.limit);
        std::mem::replace(self, empty)
    }

    /// Allows `times` as many buckets, for those that are so much smaller.
    #[cfg(feature = "overlap")]
    pub(super) fn multiply(&mut self, times: usize) {
        self.limit = self.limit.saturating_mul(times.max(1));
    }

    /// How many buckets were sent.
    pub(super) fn sent(&self) -> usize {
        self.landed.len() + self.works.len()
    }

    /// Whether another bucket may be sent; asks, and does not wait.
    pub(super) fn has_room(&mut self) -> bool {
        let unfinished = self.works.iter_mut().map(|work| usize::from(!work.is_finished())).sum::<usize>();
        unfinished < self.limit
    }

    /// The next bucket was sent.
    pub(super) fn push(&mut self, work: Work<Vec<AnyTensor<B>>>) {
        self.works.push_back(work);
    }
}

impl<B: Backend> Reducer<B> {
    /// Replaces `gradients` by what [`op`](Self::op) makes of all ranks', one collective a bucket, and returns that of
    /// the tails.
    /// Sends what `flight` has not sent yet.
    pub(super) fn all_reduce(
        &mut self,
        mut flight: Flight<B>,
        group: &ProcessGroup<B>,
        gradients: &mut [Option<FloatTensor<B>>],
        tail: &[f64],
    ) -> Result<Vec<f64>> {
        let op = self.op(group);
        let count = self.plan.buckets.len().max(1);
        self.stats.after_backward += (count - flight.sent()) as u64;
        for number in flight.sent()..count {
            while !flight.has_room() {
                self.land(&mut flight)?;
            }
            let mut list = self.list(number, gradients, group);
            if number + 1 == count {
                list.push(AnyTensor::Float(tail_tensor::<B>(tail, self.tail_dtype(), group.device())));
            }
            flight.push(group.reduce_gradients(list, op));
        }
        while !flight.works.is_empty() {
            self.land(&mut flight)?;
        }
        let mut rest = Vec::new();
        for (number, sums) in flight.landed.into_iter().enumerate() {
            let mut sums = sums.into_iter();
            for &index in self.plan.buckets.get(number).map_or(&[][..], |bucket| &bucket.params) {
                gradients[index] = sums.next().map(AnyTensor::into_float).transpose()?;
            }
            rest.extend(sums);
        }
        match rest.pop() {
            Some(tail) => Ok(into_data(tail)?.iter::<f64>().collect()),
            None => Err(Error::new(ErrorKind::Mismatch, "a reduction came back without its weights")),
        }
    }

    /// Waits for the oldest bucket that has not landed.
    fn land(&self, flight: &mut Flight<B>) -> Result<()> {
        let Some(work) = flight.works.pop_front() else { return Ok(()) };
        let number = flight.landed.len();
        flight.landed.push(work.wait().map_err(|error| self.in_bucket(&error, number))?);
        Ok(())
    }

    /// The gradients of bucket `number`, taken out of `gradients`, zeros for those that are missing.
    pub(super) fn list(
        &self,
        number: usize,
        gradients: &mut [Option<FloatTensor<B>>],
        group: &ProcessGroup<B>,
    ) -> Vec<AnyTensor<B>> {
        let Some(bucket) = self.plan.buckets.get(number) else { return Vec::new() };
        let gradient = |&index: &usize| {
            let own = gradients[index].take();
            own.unwrap_or_else(|| zeros::<B>(&self.specs[index], bucket.dtype, group.device()))
        };
        bucket.params.iter().map(gradient).map(AnyTensor::Float).collect()
    }

    fn in_bucket(&self, error: &Error, number: usize) -> Error {
        let paths = self.plan.buckets.get(number).map(|bucket| &bucket.params);
        let name = |index: Option<&usize>| index.map_or("", |index| self.specs[*index].path.as_str());
        match paths {
            None => error.context("in the reduction of the loss"),
            Some(params) => error.context(format!(
                "in the reduction of gradient bucket {number} (`{}` to `{}`)",
                name(params.first()),
                name(params.last())
            )),
        }
    }
}

fn zeros<B: Backend>(spec: &ParamSpec, dtype: DType, device: &B::Device) -> FloatTensor<B> {
    B::float_zeros(Shape::from(spec.shape.clone()), device, float_dtype(dtype))
}

fn tail_tensor<B: Backend>(tail: &[f64], dtype: DType, device: &B::Device) -> FloatTensor<B> {
    let data = TensorData::new(tail.to_vec(), [tail.len()]).convert_dtype(float_dtype(dtype).into());
    B::float_from_data(data, device)
}
