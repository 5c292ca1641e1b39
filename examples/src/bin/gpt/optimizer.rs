//! The optimizer and the learning rate.

use burn::optim::{AdamW, AdamWConfig, AdamWState, LearningRate, SimpleOptimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Device, Tensor};

/// AdamW that decays matrices (embeddings included) and leaves vectors (biases, norms) alone.
#[derive(Clone)]
pub(crate) struct DecayMatrices {
    matrices: AdamW,
    vectors: AdamW,
}

impl DecayMatrices {
    pub(crate) fn new(weight_decay: f32) -> Self {
        let adamw = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        Self {
            matrices: adamw.clone().with_weight_decay(weight_decay).build(),
            vectors: adamw.with_weight_decay(0.0).build(),
        }
    }
}

impl<B: Backend> SimpleOptimizer<B> for DecayMatrices {
    type State<const D: usize> = AdamWState<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<B, D>, Option<Self::State<D>>) {
        let adamw = if D >= 2 { &self.matrices } else { &self.vectors };
        adamw.step(lr, parameter, grad, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device<B>) -> Self::State<D> {
        <AdamW as SimpleOptimizer<B>>::to_device(state, device)
    }
}

/// Linear warm-up to `peak`, then half a cosine down to a tenth of it.
pub(crate) fn learning_rate(peak: f64, warmup: usize, steps: usize, step: usize) -> f64 {
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let progress = (step - warmup) as f64 / (steps - warmup) as f64;
    let floor = 0.1 * peak;
    floor + 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()) * (peak - floor)
}
