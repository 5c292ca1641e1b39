//! Batch normalization by the statistics of the global batch.
//!
//! Burn's `BatchNorm` normalizes by the batch it sees, which under data parallelism is a rank's share, so N
//! processes cannot train what one does. Here the statistics are those of all ranks' items together.
//!
//! # One collective, and exact
//!
//! Sums of `x` and of `x²` would be one collective as well, but their difference loses everything where the
//! mean is large against the deviation: mean 1000, deviation 1 leaves no digit of the variance in f32. Two
//! collectives, the second over squared deviations from the global mean, are exact and cost a second round trip
//! in each direction. So each rank takes its own mean `m_r` and its own sum of squared deviations `q_r`, as a
//! single process does, the ranks gather `[m_r, q_r, c_r]` (`c_r` elements a channel), and each combines them
//! by Chan's formula
//!
//! ```text
//! c = Σ c_r     mean = Σ c_r m_r / c     var = (Σ q_r + Σ c_r (m_r - mean)²) / c
//! ```
//!
//! in rank order, so that the bits are equal on all ranks. Going back, the gradient of what was gathered is
//! summed over ranks and scattered: one collective a layer in each direction. The variance is the biased one
//! (`/ c`), for the normalization and for the running variance, as in Burn. Deviations are taken from means
//! that are cut off from the graph: `Σ (x - m) = 0`, so the derivative through them is zero, and leaving it out
//! leaves out its rounding error.
//!
//! # Whose gradient
//!
//! Let rank r have `n_r` of the `N` items, `L_r` be the mean loss of its items, and `s` the gathered
//! statistics. The loss of the global batch is `L = Σ_r (n_r / N) L_r`, and parameters act on it through each
//! rank's own activations and through `s`, which rank q influences by its own part `s_q`:
//!
//! ```text
//! dL/dθ = Σ_q (n_q / N) [ ∂L_q/∂x_q · dx_q/dθ ]  +  Σ_q [ Σ_r (n_r / N) ∂L_r/∂s_q ] · ds_q/dθ
//! ```
//!
//! Rank q computes `g_q`, and the reducer makes `Σ_q n_q g_q / N` of all of them, so `g_q` must hold the second
//! term as
//!
//! ```text
//! (1 / n_q) · [ Σ_r n_r ∂L_r/∂s_q ] · ds_q/dθ
//! ```
//!
//! That is what the backward pass does: each rank multiplies the gradient of `s` by its `n_r`, the ranks sum,
//! and each divides its part by its own `n_q`. With equal shares the factors cancel and a plain sum remains;
//! with unequal ones a plain sum is wrong (it is what PyTorch does). Only ratios between the ranks of one
//! micro-step enter, so the same holds for each micro-step of an accumulation window, with or without weights.
//! A rank without items (`n_q = 0`) sends zeros and gets zeros.
//!
//! `n_r` is the first dimension of the layer's input. **This assumes that the loss is a mean over items,
//! weighed by items** ([`MicroStep::with_weight`](crate::MicroStep::with_weight), as the learner does, or equal
//! shares), and that the first dimension is in proportion to them on all ranks, as it is for `[items, channels,
//! ..]` and for `[items * steps, channels]` of one length. Where every rank's loss counts the same whatever its
//! items, build the layers with [`SyncGroup::with_equal_weights`].

use burn::config::Config;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor};

use super::SyncGroup;
use crate::error::{Error, Result};

/// Configuration of a [`SyncBatchNorm`], with the fields and defaults of Burn's `BatchNormConfig`.
#[derive(Config, Debug)]
pub struct SyncBatchNormConfig {
    /// The number of features (channels).
    pub num_features: usize,
    /// Added to the variance. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// How far running statistics move to those of a batch. Default: 0.1
    #[config(default = 0.1)]
    pub momentum: f64,
}

impl SyncBatchNormConfig {
    /// A new layer. With `None` it is Burn's `BatchNorm`, normalizing by the batch it sees, so that one model
    /// type serves for either.
    ///
    /// # Errors
    /// When tensors of `B` cannot be sent by the group, naming both backends.
    pub fn init<B: Backend>(
        &self,
        device: &B::Device,
        group: Option<&SyncGroup>,
    ) -> Result<SyncBatchNorm<B>> {
        if self.num_features == 0 {
            return Err(Error::config("SyncBatchNorm of 0 features: give the number of channels"));
        }
        if let Some(group) = group {
            group.verify::<B>("SyncBatchNorm")?;
        }
        let plain = BatchNormConfig::new(self.num_features)
            .with_epsilon(self.epsilon)
            .with_momentum(self.momentum)
            .init(device);
        Ok(SyncBatchNorm { plain, group: group.cloned() })
    }
}

/// Batch normalization by the statistics of the global batch, over inputs `[items, channels, ..]`.
///
/// It stands on Burn's `BatchNorm`, whose fields (`gamma`, `beta`, `running_mean`, `running_var`, `momentum`,
/// `epsilon`) are reached through it and whose record it has: what was saved from one loads into the other. In
/// training its statistics are those of all ranks' inputs, one collective forward and one backward, and all
/// ranks have to call it alike. In evaluation (`valid()`), in a world of one and without a group it is Burn's
/// layer, bit for bit, and does not communicate. Running statistics are equal on all ranks by themselves.
///
/// Gradients are those of one process on the global batch, with unequal shares too, provided that the loss is
/// what this layer takes it to be: a mean over each rank's items, weighed by their number, which is the first
/// dimension of the input. That is so for micro-steps with the weight of their items
/// ([`MicroStep::with_weight`]) and for equal shares; for losses that count the same whatever the share there
/// is [`SyncGroup::with_equal_weights`]. A rank without items: [`SyncGroup::set_absent`].
///
/// A half-precision input is normalized in f32, and the output is half again.
///
/// [`MicroStep::with_weight`]: crate::MicroStep::with_weight
///
/// A collective that fails ends the group: the layer goes on with this rank's statistics, leaves its running
/// ones alone, and the next `Replica::reduce` returns the first cause.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm<B: Backend> {
    pub(super) plain: BatchNorm<B>,
    pub(super) group: Option<SyncGroup>,
}

impl<B: Backend> SyncBatchNorm<B> {
    /// Normalizes `input` of shape `[items, channels, ..]`.
    ///
    /// # Panics
    /// Like Burn's layer, for fewer than two dimensions.
    pub fn forward<const D: usize>(&self, input: Tensor<B, D>) -> Tensor<B, D> {
        match &self.group {
            Some(group) if D > 1 && group.world_size() > 1 && B::ad_enabled(&input.device()) => {
                self.forward_global(input, group)
            }
            _ => self.plain.forward(input),
        }
    }

    /// The group whose statistics it takes in training; `None` normalizes by the batch that it sees.
    pub fn group(&self) -> Option<&SyncGroup> {
        self.group.as_ref()
    }

    fn forward_global<const D: usize>(&self, input: Tensor<B, D>, group: &SyncGroup) -> Tensor<B, D> {
        let (device, dtype) = (input.device(), input.dtype());
        // Halves hold neither counts above 2048 nor a sum of squares.
        let input = match dtype {
            DType::F16 | DType::BF16 => input.cast(FloatDType::F32),
            _ => input,
        };
        let (mean, var, complete) = statistics(input.clone(), group);
        if complete {
            let BatchNorm { running_mean, running_var, momentum, .. } = &self.plain;
            for (state, new) in [(running_mean, &mean), (running_var, &var)] {
                let old = state.value_sync().to_device(&device);
                let new = cast(new.clone().detach(), old.dtype());
                let new = old.mul_scalar(1.0 - momentum).add(new.mul_scalar(*momentum));
                state.update(new.detach());
                group.moved(state);
            }
        }
        let mut shape = [1; D];
        shape[1] = input.dims()[1];
        let std = var.reshape(shape).add_scalar(self.plain.epsilon).sqrt();
        let output = cast(input.sub(mean.reshape(shape)).div(std), dtype);
        output.mul(self.plain.gamma.val().reshape(shape)).add(self.plain.beta.val().reshape(shape))
    }
}

/// Mean and biased variance of each channel over all ranks' inputs, and whether they are that.
fn statistics<B: Backend, const D: usize>(
    input: Tensor<B, D>,
    group: &SyncGroup,
) -> (Tensor<B, 1>, Tensor<B, 1>, bool) {
    let dims = input.dims();
    let (items, channels) = (dims[0], dims[1]);
    let count = items * dims[2..].iter().product::<usize>();
    let count_of_mine = Tensor::<B, 1>::full([1], count as f64, (&input.device(), input.dtype()));

    let input = input.swap_dims(0, 1).reshape([channels, count]);
    let mean = input.clone().mean_dim(1);
    let squares = input.sub(mean.clone().detach()).square().sum_dim(1);
    let mine = Tensor::cat(vec![mean.reshape([channels]), squares.reshape([channels]), count_of_mine], 0);

    let (all, complete) = group.gather(mine, items);
    let all = all.reshape([group.world_size(), 2 * channels + 1]);
    let counts = all.clone().slice_dim(1, 2 * channels..).detach();
    let squares = all.clone().slice_dim(1, channels..2 * channels);
    let means = all.slice_dim(1, 0..channels);
    let count = counts.clone().sum_dim(0);

    let mean = (means.clone() * counts.clone()).sum_dim(0) / count.clone();
    let between = (means - mean.clone().detach()).square() * counts;
    let var = (squares.sum_dim(0) + between.sum_dim(0)) / count;
    (mean.reshape([channels]), var.reshape([channels]), complete)
}

fn cast<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(FloatDType::from(dtype)) }
}
