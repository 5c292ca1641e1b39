//! The transformer that is trained here and in the peers' `ddp_step.py`: the same shapes, no dropout, no mask.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

/// Sizes of a model and of its micro-batches. The defaults have 30.3 million parameters.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Shape {
    /// Width of the residual stream
    #[arg(long, default_value_t = 512)]
    pub width: usize,
    /// Blocks
    #[arg(long, default_value_t = 8)]
    pub layers: usize,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 64)]
    pub tokens: usize,
    /// Sequences of a micro-batch on one rank
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
    /// Different tokens
    #[arg(long, default_value_t = 5000)]
    pub vocabulary: usize,
}

const HEADS: usize = 4;

/// Embedding, pre-norm blocks, and a head without bias.
#[derive(Module, Debug)]
pub struct Transformer<B: Backend> {
    embedding: Embedding<B>,
    blocks: Vec<Block<B>>,
    head: Linear<B>,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm_attention: LayerNorm<B>,
    query_key_value: Linear<B>,
    attended: Linear<B>,
    norm_mlp: LayerNorm<B>,
    expand: Linear<B>,
    contract: Linear<B>,
}

impl<B: Backend> Transformer<B> {
    /// A model with random values; Burn draws them when they are first read.
    pub fn new(shape: &Shape, device: &B::Device) -> Self {
        let width = shape.width;
        let norm = || LayerNormConfig::new(width).init(device);
        let linear = |input, output| LinearConfig::new(input, output).init(device);
        let block = |_| Block {
            norm_attention: norm(),
            query_key_value: linear(width, 3 * width),
            attended: linear(width, width),
            norm_mlp: norm(),
            expand: linear(width, 4 * width),
            contract: linear(4 * width, width),
        };
        Self {
            embedding: EmbeddingConfig::new(shape.vocabulary, width).init(device),
            blocks: (0..shape.layers).map(block).collect(),
            head: LinearConfig::new(width, shape.vocabulary).with_bias(false).init(device),
        }
    }

    /// Mean cross-entropy of `batch`.
    pub fn loss(&self, batch: &Batch<B>) -> Tensor<B, 1> {
        let mut x = self.embedding.forward(batch.inputs.clone());
        for block in &self.blocks {
            x = block.forward(x);
        }
        let logits: Tensor<B, 2> = self.head.forward(x).flatten(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, batch.targets.clone())
    }
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let x = x.clone() + self.attention(self.norm_attention.forward(x));
        let hidden = gelu(self.expand.forward(self.norm_mlp.forward(x.clone())));
        x + self.contract.forward(hidden)
    }

    fn attention(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, tokens, width] = x.dims();
        let projected = self.query_key_value.forward(x);
        let heads = |part: usize| {
            let part = projected.clone().narrow(2, part * width, width);
            part.reshape([batch, tokens, HEADS, width / HEADS]).swap_dims(1, 2)
        };
        let scores = heads(0).matmul(heads(1).transpose()) / ((width / HEADS) as f64).sqrt();
        let mixed = softmax(scores, 3).matmul(heads(2));
        self.attended.forward(mixed.swap_dims(1, 2).reshape([batch, tokens, width]))
    }
}

/// One micro-batch.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    inputs: Tensor<B, 2, Int>,
    targets: Tensor<B, 1, Int>,
}

impl<B: Backend> Batch<B> {
    /// A micro-batch of tokens that depend on `seed`.
    pub fn new(shape: &Shape, seed: usize, device: &B::Device) -> Self {
        let count = shape.batch * shape.tokens;
        let token = |index: usize| (((index + seed * count) * 2654435761) >> 7) % shape.vocabulary;
        let text: Vec<i64> = (0..=count).map(|index| token(index) as i64).collect();
        let inputs = TensorData::new(text[..count].to_vec(), [shape.batch, shape.tokens]);
        let targets = TensorData::new(text[1..].to_vec(), [count]);
        Self { inputs: Tensor::from_data(inputs, device), targets: Tensor::from_data(targets, device) }
    }
}
