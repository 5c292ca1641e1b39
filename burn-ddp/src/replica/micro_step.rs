//! Input and output of a reduction: micro-steps, and the gradient of the global batch.

use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

/// The outcome of one micro-step (one forward and backward pass) on one rank.
pub struct MicroStep<B: AutodiffBackend> {
    pub(super) gradients: GradientsParams,
    pub(super) loss: Option<Tensor<B::InnerBackend, 1>>,
    pub(super) weight: Option<f64>,
}

impl<B: AutodiffBackend> MicroStep<B> {
    /// The gradients of the mean loss over the micro-step's items.
    pub fn new(gradients: GradientsParams) -> Self {
        Self { gradients, loss: None, weight: None }
    }

    /// A micro-step without items. It takes part in the reduction, so that no rank waits, and contributes nothing.
    pub fn empty() -> Self {
        Self { gradients: GradientsParams::new(), loss: None, weight: Some(0.0) }
    }

    /// Adds the mean loss over the micro-step's items, one element, to be averaged over the global batch.
    pub fn with_loss(self, loss: Tensor<B, 1>) -> Self {
        Self { loss: Some(loss.inner()), ..self }
    }

    /// Weights the micro-step by its number of items (or tokens), for micro-steps of different size:
    /// `with_weight(items as f64)`. Either all micro-steps of an optimizer step have a weight, on all ranks, or none.
    pub fn with_weight(self, items: impl Into<f64>) -> Self {
        Self { weight: Some(items.into()), ..self }
    }
}

impl<B: AutodiffBackend> From<GradientsParams> for MicroStep<B> {
    fn from(gradients: GradientsParams) -> Self {
        Self::new(gradients)
    }
}

/// Input of an optimizer step, equal on all ranks.
#[derive(Debug)]
pub struct Reduced {
    /// Gradients of the global batch, for the optimizer. A parameter that no rank used has none.
    pub grads: GradientsParams,
    /// Mean loss of the global batch; `None` if no micro-step had a loss.
    pub loss: Option<f64>,
    /// Norm of the whole gradient before clipping; `None` unless
    /// [`clip_norm`](crate::ReplicaOptions::clip_norm) or
    /// [`report_norm`](crate::ReplicaOptions::report_norm) asks for it.
    pub norm: Option<f64>,
}
