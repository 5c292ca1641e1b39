//! A small convolutional classifier, and its steps for Burn's `SupervisedTraining`.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use burn_ddp::nn::{SyncBatchNorm, SyncBatchNormConfig, SyncGroup};
use burn_ddp::{ProcessGroup, Result};
use clap::ValueEnum;

use crate::data::{Batch, CLASSES, SIDE};

/// The normalization between a convolution and its activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Norm {
    /// Nothing
    None,
    /// Batch normalization by the rank's share of a micro-batch
    Batch,
    /// Batch normalization by the whole micro-batch
    Sync,
}

const CHANNELS: [usize; 2] = [8, 16];
const HIDDEN: usize = 128;

/// Two convolutions and two linear layers, all of them smooth: at the kink of a maximum or ReLU a rounding error
/// becomes a different gradient, and runs that differ in rounding alone drift apart.
#[derive(Module, Debug)]
pub(crate) struct Classifier<B: Backend> {
    blocks: Vec<Block<B>>,
    dropout: Dropout,
    hidden: Linear<B>,
    output: Linear<B>,
}

/// A convolution, its normalization if any, and half the size.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    conv: Conv2d<B>,
    norm: Option<SyncBatchNorm<B>>,
    pool: AvgPool2d,
}

impl<B: Backend> Classifier<B> {
    /// A model whose normalization, if it is synchronized, uses the statistics of all ranks of the group. The other
    /// weights do not depend on the norm.
    pub(crate) fn new<G: Backend>(
        norm: Norm,
        dropout: f64,
        group: &ProcessGroup<G>,
        device: &B::Device,
    ) -> Result<Self> {
        // Only if it is needed: with it, ranks without items run a forward pass along with the others.
        let sync = (norm == Norm::Sync).then(|| SyncGroup::new(group));
        let block = |input: usize, output: usize| -> Result<Block<B>> {
            let batch_norm = SyncBatchNormConfig::new(output);
            Ok(Block {
                // In front of a norm a bias has no effect, and its gradient of rounding errors makes AdamW step.
                conv: Conv2dConfig::new([input, output], [3, 3]).with_bias(false).init(device),
                norm: match norm {
                    Norm::None => None,
                    Norm::Batch | Norm::Sync => Some(batch_norm.init(device, sync.as_ref())?),
                },
                pool: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            })
        };
        let side = ((SIDE - 2) / 2 - 2) / 2;
        Ok(Self {
            blocks: vec![block(1, CHANNELS[0])?, block(CHANNELS[0], CHANNELS[1])?],
            dropout: DropoutConfig::new(dropout).init(),
            hidden: LinearConfig::new(CHANNELS[1] * side * side, HIDDEN).init(device),
            output: LinearConfig::new(HIDDEN, CLASSES).init(device),
        })
    }

    /// True if this step runs only for the other ranks' normalization.
    fn is_absent(&self) -> bool {
        let mut groups = self.blocks.iter().filter_map(|block| block.norm.as_ref()?.group());
        groups.any(SyncGroup::is_absent)
    }

    fn logits(&self, images: Tensor<B, 3>) -> Tensor<B, 2> {
        let mut x = images.unsqueeze_dim::<4>(1);
        for block in &self.blocks {
            x = block.forward(x);
        }
        let x = gelu(self.hidden.forward(x.flatten(1, 3)));
        self.output.forward(self.dropout.forward(x))
    }

    fn classify(&self, images: Tensor<B, 3>, labels: Tensor<B, 1, Int>) -> ClassificationOutput<B> {
        let logits = self.logits(images);
        let loss =
            CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.clone(), labels.clone());
        ClassificationOutput::new(loss, logits, labels)
    }
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        // Behind the pool the norm has a quarter of the values; before it, it would take half of the time.
        let x = self.pool.forward(self.conv.forward(x));
        gelu(match &self.norm {
            Some(norm) => norm.forward(x),
            None => x,
        })
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        if !self.is_absent() {
            batch.log();
        }
        let output = self.classify(batch.images, batch.labels);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.classify(batch.images, batch.labels)
    }
}
