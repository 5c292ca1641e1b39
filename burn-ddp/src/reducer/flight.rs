//! The buckets of an optimizer step on their way over all ranks.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, TensorData};

use super::{Reducer, float_dtype};
use crate::bucket::ParamSpec;
use crate::communicator::{AnyTensor, into_data};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::ProcessGroup;

impl<B: Backend> Reducer<B> {
    /// Replaces `gradients` by their sums over all ranks, one collective a bucket, and returns the sum of tails.
    pub(super) fn all_reduce(
        &self,
        group: &ProcessGroup<B>,
        gradients: &mut [Option<FloatTensor<B>>],
        tail: &[f64],
    ) -> Result<Vec<f64>> {
        let buckets = &self.plan.buckets;
        let mut lists: Vec<Vec<AnyTensor<B>>> = buckets
            .iter()
            .map(|bucket| {
                let gradient = |&index: &usize| {
                    let own = gradients[index].take();
                    own.unwrap_or_else(|| zeros::<B>(&self.specs[index], bucket.dtype, group.device()))
                };
                bucket.params.iter().map(gradient).map(AnyTensor::Float).collect()
            })
            .collect();
        if lists.is_empty() {
            lists.push(Vec::new());
        }
        let dtype = self.tail_dtype();
        if let Some(last) = lists.last_mut() {
            last.push(AnyTensor::Float(tail_tensor::<B>(tail, dtype, group.device())));
        }
        let works: Vec<_> =
            lists.into_iter().map(|list| group.all_reduce_list(list, ReduceOp::Sum)).collect();
        let mut rest = Vec::new();
        for (number, work) in works.into_iter().enumerate() {
            let mut sums = work.wait().map_err(|error| self.in_bucket(&error, number))?.into_iter();
            for &index in buckets.get(number).map_or(&[][..], |bucket| &bucket.params) {
                gradients[index] = sums.next().map(AnyTensor::into_float).transpose()?;
            }
            rest.extend(sums);
        }
        match rest.pop() {
            Some(tail) => Ok(into_data(tail)?.iter::<f64>().collect()),
            None => Err(Error::new(ErrorKind::Mismatch, "a reduction came back without its weights")),
        }
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
