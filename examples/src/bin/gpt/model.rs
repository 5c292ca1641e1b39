//! The model: GPT-2 of any size.

use burn::module::{Initializer, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

/// The size of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GptConfig {
    pub(crate) vocab: usize,
    pub(crate) seq_len: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) embd: usize,
    /// Share of embeddings, attention weights and outputs of both branches of a block that is dropped.
    pub(crate) dropout: f64,
}

/// GPT-2: token and position embeddings, pre-norm blocks, a final norm, and a head tied to the token embedding.
#[derive(Module, Debug)]
pub(crate) struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: Vec<Block<B>>,
    norm: LayerNorm<B>,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm_attention: LayerNorm<B>,
    query_key_value: Linear<B>,
    attended: Linear<B>,
    norm_mlp: LayerNorm<B>,
    expand: Linear<B>,
    contract: Linear<B>,
    dropout: Dropout,
    heads: usize,
}

/// Weights from a normal distribution of deviation `std`, biases zero.
fn linear<B: Backend>(input: usize, output: usize, std: f64, device: &B::Device) -> Linear<B> {
    let weights = Initializer::Normal { mean: 0.0, std };
    let mut linear = LinearConfig::new(input, output).with_bias(false).with_initializer(weights).init(device);
    linear.bias = Some(Initializer::Zeros.init([output], device));
    linear
}

impl<B: Backend> Gpt<B> {
    pub(crate) fn new(config: &GptConfig, device: &B::Device) -> Self {
        let &GptConfig { vocab, seq_len, layers, heads, embd, dropout } = config;
        let dropout = DropoutConfig::new(dropout).init();
        let std = 0.02;
        // Every block adds two branches to the residual stream: this keeps its variance independent of depth.
        let branch_std = std / ((2 * layers) as f64).sqrt();
        let embedding = |n| {
            EmbeddingConfig::new(n, embd)
                .with_initializer(Initializer::Normal { mean: 0.0, std })
                .init(device)
        };
        let norm = || LayerNormConfig::new(embd).init(device);
        let block = |_| Block {
            norm_attention: norm(),
            query_key_value: linear(embd, 3 * embd, std, device),
            attended: linear(embd, embd, branch_std, device),
            norm_mlp: norm(),
            expand: linear(embd, 4 * embd, std, device),
            contract: linear(4 * embd, embd, branch_std, device),
            dropout: dropout.clone(),
            heads,
        };
        Self {
            tokens: embedding(vocab),
            positions: embedding(seq_len),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
            dropout: dropout.clone(),
        }
    }

    /// Logits of the token after each token, [batch * seq, vocab].
    pub(crate) fn logits(&self, inputs: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [batch, seq] = inputs.dims();
        let device = inputs.device();
        let positions = Tensor::arange(0..seq as i64, &device).unsqueeze();
        let mut x = self.dropout.forward(self.tokens.forward(inputs) + self.positions.forward(positions));
        let future = Tensor::<B, 2, Bool>::tril_mask([seq, seq], 0, &device).unsqueeze();
        for block in &self.blocks {
            x = block.forward(x, future.clone());
        }
        let [_, _, embd] = x.dims();
        let x = self.norm.forward(x).reshape([batch * seq, embd]);
        x.matmul(self.tokens.weight.val().transpose())
    }

    /// Mean cross-entropy over all tokens.
    pub(crate) fn loss(&self, inputs: Tensor<B, 2, Int>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let logits = self.logits(inputs);
        let [tokens, _] = logits.dims();
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets.reshape([tokens]))
    }
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 3>, future: Tensor<B, 4, Bool>) -> Tensor<B, 3> {
        let x = x.clone() + self.attention(self.norm_attention.forward(x), future);
        let hidden = gelu(self.expand.forward(self.norm_mlp.forward(x.clone())));
        x + self.dropout.forward(self.contract.forward(hidden))
    }

    fn attention(&self, x: Tensor<B, 3>, future: Tensor<B, 4, Bool>) -> Tensor<B, 3> {
        let [batch, seq, embd] = x.dims();
        let width = embd / self.heads;
        let projected = self.query_key_value.forward(x);
        let heads = |part: usize| {
            let part = projected.clone().narrow(2, part * embd, embd);
            part.reshape([batch, seq, self.heads, width]).swap_dims(1, 2)
        };
        let scores = heads(0).matmul(heads(1).transpose()) / (width as f64).sqrt();
        let weights = softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
        let mixed =
            self.dropout.forward(weights).matmul(heads(2)).swap_dims(1, 2).reshape([batch, seq, embd]);
        self.dropout.forward(self.attended.forward(mixed))
    }
}
