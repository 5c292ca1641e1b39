//! What one rank has added up since the last reduction.

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::{Scalar, TensorMetadata};

use super::GradientReduction;

/// Sums over the micro-steps since the last reduction.
pub(super) struct Window<B: Backend> {
    pub(super) gradients: Vec<Option<FloatTensor<B>>>,
    /// The types in which gradients came and have to go.
    pub(super) dtypes: Vec<Option<burn::tensor::DType>>,
    pub(super) losses: Vec<(FloatTensor<B>, f64)>,
    pub(super) weight: f64,
    pub(super) micro_steps: usize,
    /// Micro-steps that were given a weight.
    pub(super) weighted: usize,
}

impl<B: Backend> Window<B> {
    pub(super) fn new(params: usize) -> Self {
        Self {
            gradients: (0..params).map(|_| None).collect(),
            dtypes: vec![None; params],
            losses: Vec::new(),
            weight: 0.0,
            micro_steps: 0,
            weighted: 0,
        }
    }

    /// Adds a micro-step of positive weight.
    pub(super) fn add(
        &mut self,
        gradients: Vec<(usize, FloatTensor<B>)>,
        loss: Option<FloatTensor<B>>,
        weight: Option<f64>,
        reduction: GradientReduction,
    ) {
        let factor = weight.unwrap_or(1.0);
        self.micro_steps += 1;
        self.weighted += usize::from(weight.is_some());
        self.weight += factor;
        self.losses.extend(loss.map(|loss| (loss, factor)));
        for (index, gradient) in gradients {
            self.close(index, gradient, weight, reduction);
        }
    }

    /// Adds the gradient of parameter `index` in the micro-step under way, of positive weight, to those of the
    /// micro-steps before.
    pub(super) fn close(
        &mut self,
        index: usize,
        gradient: FloatTensor<B>,
        weight: Option<f64>,
        reduction: GradientReduction,
    ) {
        self.dtypes[index].get_or_insert(gradient.dtype());
        let gradient = match gradient.dtype() {
            burn::tensor::DType::F16 | burn::tensor::DType::BF16 => B::float_cast(gradient, FloatDType::F32),
            _ => gradient,
        };
        let gradient = match (weight, reduction) {
            (Some(weight), GradientReduction::Mean) if weight != 1.0 => {
                B::float_mul_scalar(gradient, Scalar::from(weight))
            }
            _ => gradient,
        };
        let sum = &mut self.gradients[index];
        *sum = Some(match sum.take() {
            Some(sum) => B::float_add(sum, gradient),
            None => gradient,
        });
    }
}
