//! The buckets of one optimizer step that were sent and not handed back yet.

use std::collections::VecDeque;

use burn::tensor::TensorData;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_ddp_comm::{DType, Error, ErrorKind, ReduceOp, Result};

use super::buckets::{GradientBuckets, float_dtype};
use crate::communicator::{AnyTensor, into_data};
use crate::process_group::{BackwardLease, ProcessGroup, Work};

/// Buckets that were sent, in the plan's order, which is the order on the wire and so equal on all ranks.
pub(super) struct InFlight<B: Backend> {
    /// Maximum number of buckets that are sent and unfinished.
    limit: usize,
    /// Results of the buckets that were waited for.
    finished: Vec<Vec<AnyTensor<B>>>,
    /// The buckets sent after these.
    works: VecDeque<Work<Vec<AnyTensor<B>>>>,
}

impl<B: Backend> InFlight<B> {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, finished: Vec::new(), works: VecDeque::new() }
    }

    /// Number of buckets that were sent, which is the number of the next one.
    pub(super) fn sent(&self) -> usize {
        self.finished.len() + self.works.len()
    }

    /// True if another bucket may be sent; does not wait.
    pub(super) fn has_room(&mut self) -> bool {
        let unfinished = self.works.iter_mut().map(|work| usize::from(!work.is_finished())).sum::<usize>();
        unfinished < self.limit
    }

    /// Sends the next bucket, of `tensors`, while a backward pass runs.
    pub(super) fn send_in_backward(
        &mut self,
        group: &ProcessGroup<B>,
        tensors: Vec<AnyTensor<B>>,
        op: ReduceOp,
        lease: &BackwardLease,
    ) {
        self.works.push_back(group.reduce_gradients_in_backward(tensors, op, lease));
    }

    /// Sends the remaining buckets and waits for all. Replaces `gradients` by their reduction over all ranks, and
    /// returns that of `totals`, which travel behind the last bucket.
    pub(super) fn finish(
        mut self,
        group: &ProcessGroup<B>,
        op: ReduceOp,
        buckets: &GradientBuckets,
        gradients: &mut [Option<FloatTensor<B>>],
        totals: &[f64],
    ) -> Result<Vec<f64>> {
        let count = buckets.collectives();
        for number in self.sent()..count {
            while !self.has_room() {
                self.wait_for_oldest(buckets)?;
            }
            let mut tensors = buckets.take(number, gradients, group.device());
            if number + 1 == count {
                tensors.push(totals_tensor(totals, buckets.totals_dtype(), group.device()));
            }
            self.works.push_back(group.reduce_gradients(tensors, op));
        }
        while !self.works.is_empty() {
            self.wait_for_oldest(buckets)?;
        }
        let mut rest = Vec::new();
        for (number, sums) in self.finished.into_iter().enumerate() {
            let mut sums = sums.into_iter();
            for &index in buckets.params(number) {
                gradients[index] = sums.next().map(AnyTensor::into_float).transpose()?;
            }
            rest.extend(sums);
        }
        match rest.pop() {
            Some(totals) => Ok(into_data(totals)?.iter::<f64>().collect()),
            None => Err(Error::new(ErrorKind::Mismatch, "a reduction came back without its weights")),
        }
    }

    fn wait_for_oldest(&mut self, buckets: &GradientBuckets) -> Result<()> {
        let Some(work) = self.works.pop_front() else { return Ok(()) };
        let number = self.finished.len();
        self.finished.push(work.wait().map_err(|error| buckets.in_bucket(&error, number))?);
        Ok(())
    }
}

fn totals_tensor<B: Backend>(totals: &[f64], dtype: DType, device: &B::Device) -> AnyTensor<B> {
    let data = TensorData::new(totals.to_vec(), [totals.len()]).convert_dtype(float_dtype(dtype).into());
    AnyTensor::Float(B::float_from_data(data, device))
}
