//! The parameters of a model and the buckets in which their gradients travel: the one owner of both lists.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{FloatDType, Shape};
use burn_ddp_comm::{DType, Error};

use crate::bucket::{BUCKET_BYTES, BucketPlan, FIRST_BUCKET_BYTES, ParamRole, ParamSpec, overlapped_cap};
use crate::communicator::AnyTensor;

pub(super) struct GradientBuckets {
    specs: Vec<ParamSpec>,
    plan: BucketPlan,
    /// By parameter index, whether its bucket may be sent during the backward pass: the last one waits for the losses.
    early: Vec<bool>,
}

impl GradientBuckets {
    /// Buckets of at most `cap` bytes, in reverse visit order.
    pub(super) fn new(specs: Vec<ParamSpec>, cap: Option<usize>) -> Self {
        let plan = BucketPlan::for_gradients(&on_wire(&specs), cap);
        Self::with_plan(specs, plan)
    }

    fn with_plan(specs: Vec<ParamSpec>, plan: BucketPlan) -> Self {
        let mut early = vec![false; specs.len()];
        if let Some((_, buckets)) = plan.buckets.split_last() {
            buckets.iter().flat_map(|bucket| &bucket.params).for_each(|index| early[*index] = true);
        }
        Self { specs, plan, early }
    }

    /// Plans the buckets anew, of at most `cap` bytes or of a size that suits the model, in the order `arrivals`, and
    /// behind it, in reverse visit order, the parameters that are missing there. Returns how many of the new buckets
    /// have the bytes of one of the default size.
    pub(super) fn reorder(&mut self, arrivals: &[usize], cap: Option<usize>) -> usize {
        let trained =
            |index: &usize| self.specs.get(*index).is_some_and(|spec| spec.role == ParamRole::Trained);
        let mut order = Vec::new();
        for index in arrivals.iter().copied().chain((0..self.specs.len()).rev()).filter(trained) {
            if !order.contains(&index) {
                order.push(index);
            }
        }
        let specs = on_wire(&self.specs);
        let chosen = overlapped_cap(order.iter().map(|index| specs[*index].bytes()).sum());
        let (first, others) = (cap.unwrap_or(FIRST_BUCKET_BYTES), cap.unwrap_or(chosen));
        let plan = BucketPlan::new(&specs, order, first, others);
        *self = Self::with_plan(std::mem::take(&mut self.specs), plan);
        if cap.is_none() { BUCKET_BYTES / chosen } else { 1 }
    }

    pub(super) fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    pub(super) fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// Parameters of bucket `number`, in the order on the wire.
    pub(super) fn params(&self, number: usize) -> &[usize] {
        self.plan.buckets.get(number).map_or(&[], |bucket| &bucket.params)
    }

    /// Collectives of an optimizer step: one for the losses even if there is no gradient.
    pub(super) fn collectives(&self) -> usize {
        self.plan.buckets.len().max(1)
    }

    /// Element type of the numbers that travel behind the last bucket.
    pub(super) fn totals_dtype(&self) -> DType {
        self.plan.buckets.last().map_or(DType::F32, |bucket| bucket.dtype)
    }

    /// True if a gradient of `shape` for parameter `index` may be sent during the backward pass.
    pub(super) fn may_leave_early(&self, index: usize, shape: &Shape) -> bool {
        self.early[index] && shape.num_elements() > 0 && shape.to_vec() == self.specs[index].shape
    }

    /// The gradients of bucket `number`, taken out of `gradients`, with zeros for those that are missing.
    pub(super) fn take<B: Backend>(
        &self,
        number: usize,
        gradients: &mut [Option<FloatTensor<B>>],
        device: &B::Device,
    ) -> Vec<AnyTensor<B>> {
        let Some(bucket) = self.plan.buckets.get(number) else { return Vec::new() };
        let gradient = |&index: &usize| {
            let shape = || Shape::from(self.specs[index].shape.clone());
            let zeros = || B::float_zeros(shape(), device, float_dtype(bucket.dtype));
            AnyTensor::Float(gradients[index].take().unwrap_or_else(zeros))
        };
        bucket.params.iter().map(gradient).collect()
    }

    /// `error` with the number and the parameters of the bucket in whose reduction it occurred.
    pub(super) fn in_bucket(&self, error: &Error, number: usize) -> Error {
        let path = |index: &usize| self.specs[*index].path.as_str();
        let params = self.params(number);
        match (params.first().map(path), params.last().map(path)) {
            (Some(first), Some(last)) => {
                error.context(format!("in the reduction of gradient bucket {number} (`{first}` to `{last}`)"))
            }
            _ => error.context("in the reduction of the loss"),
        }
    }
}

/// Specifications as they travel: half precision as f32, because sums of weighted halves would overflow or vanish.
fn on_wire(specs: &[ParamSpec]) -> Vec<ParamSpec> {
    let wire = |spec: &ParamSpec| match spec.dtype {
        DType::F16 | DType::BF16 => ParamSpec { dtype: DType::F32, ..spec.clone() },
        _ => spec.clone(),
    };
    specs.iter().map(wire).collect()
}

/// Burn's name of the type in which gradients of `dtype` travel.
pub(super) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}
