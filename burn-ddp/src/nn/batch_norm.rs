//! Batch normalization by the statistics of the global batch.
//!
//! Burn's `BatchNorm` normalizes by the batch it sees, which is a rank's share of the global batch, so N processes
//! cannot train what one does. [`SyncBatchNorm`] takes the statistics over all ranks' items.
//!
//! # One collective, and exact
//!
//! Each rank computes the mean `m_r` and the sum of squared deviations `q_r` of each channel over its `c_r` elements.
//! The ranks gather `[m_r, q_r, c_r]`, of length `2C + 1` for `C` channels, and each combines them by Chan's formula in
//! rank order, so that the bits are equal on all ranks:
//!
//! ```text
//! c = Σ c_r     mean = Σ c_r m_r / c     var = (Σ q_r + Σ c_r (m_r - mean)²) / c
//! ```
//!
//! In the backward pass the gradient of the gathered values is summed over ranks and scattered. The variance is the
//! biased one (`/ c`), for the normalization and for the running variance, as in Burn. Deviations are taken from means
//! that are detached from the graph: the derivative through them is zero, because `Σ (x - m) = 0`, and detaching leaves
//! out its rounding error.
//!
//! # Gradient with unequal shares
//!
//! Let rank r have `n_r` of the `N` items, `L_r` be the mean loss of its items, and `s` the gathered statistics. The
//! loss of the global batch is `L = Σ_r (n_r / N) L_r`. Parameters act on it through each rank's own activations and
//! through `s`, which rank q influences by its own statistics `s_q`:
//!
//! ```text
//! dL/dθ = Σ_q (n_q / N) [ ∂L_q/∂x_q · dx_q/dθ ]  +  Σ_q [ Σ_r (n_r / N) ∂L_r/∂s_q ] · ds_q/dθ
//! ```
//!
//! Rank q computes `g_q`, and the reducer makes `Σ_q n_q g_q / N` of them, so `g_q` must contain the second term as
//!
//! ```text
//! (1 / n_q) · [ Σ_r n_r ∂L_r/∂s_q ] · ds_q/dθ
//! ```
//!
//! The backward pass does this: each rank multiplies the gradient of `s` by its `n_r`, the ranks sum, and each divides
//! the gradient of its `s_q` by its own `n_q`. With equal shares the factors cancel and a plain sum remains; with
//! unequal shares a plain sum, which PyTorch takes, is wrong. Only ratios between the ranks of one micro-step enter, so
//! the same holds for each micro-step of an accumulation window, with or without weights. A rank without items
//! (`n_q = 0`) sends and gets zeros.
//!
//! `n_r` is the first dimension of the layer's input. **This assumes that the loss is a mean over items, weighed by
//! items** ([`MicroStep::with_weight`](crate::MicroStep::with_weight), as the learner does, or equal shares), and that
//! the first dimension is in proportion to them on all ranks, as in `[items, channels, ..]` and in `[items * steps,
//! channels]` of one length. If every rank's loss counts equally, build the layers with
//! [`SyncGroup::with_equal_weights`].

use burn::config::Config;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_ddp_comm::{Error, Result};

use super::group::SyncGroup;

/// Configuration of a [`SyncBatchNorm`], with the fields and defaults of Burn's `BatchNormConfig`. [`SyncGroup`] has an
/// example.
#[derive(Config, Debug)]
pub struct SyncBatchNormConfig {
    /// Number of channels.
    pub num_features: usize,
    /// Number that is added to the variance. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Share of a batch's statistics in the new running statistics. Default: 0.1
    #[config(default = 0.1)]
    pub momentum: f64,
}

impl SyncBatchNormConfig {
    /// Creates a layer. With `None` it normalizes by the batch it sees, as Burn's `BatchNorm`, so that one model type
    /// serves for both.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) for 0 channels, and if the group cannot send tensors of `B`; the
    /// error names both backends.
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

/// Batch normalization by the statistics of the global batch, over inputs of shape `[items, channels, ..]`.
///
/// The layer contains Burn's `BatchNorm` and dereferences to it (`gamma`, `beta`, `running_mean`, `running_var`,
/// `momentum`, `epsilon`); a record of either loads into the other. In training it takes the statistics of all ranks'
/// inputs by one collective in the forward and one in the backward pass, and all ranks must call it equally often. In
/// evaluation (`valid()`), in a world of one and without a group it is Burn's layer, bit for bit, and does not
/// communicate. Running statistics are equal on all ranks.
///
/// Gradients are those of one process on the global batch, also for unequal shares, if the loss is a mean over each
/// rank's items and weighed by their number, the first dimension of the input. Micro-steps with the weight of their
/// items ([`MicroStep::with_weight`](crate::MicroStep::with_weight)) and equal shares satisfy this. If every rank's
/// loss counts equally, use [`SyncGroup::with_equal_weights`]; for a rank without items, [`SyncGroup::set_absent`].
///
/// Half-precision inputs are normalized in f32, and the output has the dtype of the input.
///
/// A collective that fails ends the group: the layer normalizes by this rank's statistics, does not move its running
/// statistics, and the next `Replica::reduce` returns the first cause.
///
/// [`SyncGroup`] has an example.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm<B: Backend> {
    pub(super) plain: BatchNorm<B>,
    pub(super) group: Option<SyncGroup>,
}

impl<B: Backend> SyncBatchNorm<B> {
    /// Normalizes `input` of shape `[items, channels, ..]`; the output has the same shape.
    ///
    /// # Panics
    /// For fewer than two dimensions, as Burn's layer does.
    pub fn forward<const D: usize>(&self, input: Tensor<B, D>) -> Tensor<B, D> {
        match &self.group {
            Some(group) if D > 1 && group.world_size() > 1 && B::ad_enabled(&input.device()) => {
                self.forward_global(input, group)
            }
            _ => self.plain.forward(input),
        }
    }

    /// The group over which statistics are taken in training; `None` if the layer normalizes by the batch it sees.
    pub fn group(&self) -> Option<&SyncGroup> {
        self.group.as_ref()
    }

    fn forward_global<const D: usize>(&self, input: Tensor<B, D>, group: &SyncGroup) -> Tensor<B, D> {
        let (device, dtype) = (input.device(), input.dtype());
        // Half precision holds neither counts above 2048 nor sums of squares.
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
                group.record_moved(state);
            }
        }
        let mut shape = [1; D];
        shape[1] = input.dims()[1];
        let std = var.reshape(shape).add_scalar(self.plain.epsilon).sqrt();
        let output = cast(input.sub(mean.reshape(shape)).div(std), dtype);
        output.mul(self.plain.gamma.val().reshape(shape)).add(self.plain.beta.val().reshape(shape))
    }
}

/// Returns mean and biased variance `[channels]` over all ranks' inputs, and true; after an error those of this rank,
/// and false.
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
