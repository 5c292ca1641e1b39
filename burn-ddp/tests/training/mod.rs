//! One small training run, generic over the backend, that writes down every number it sees.
//!
//! It touches what a decorator forwards in different ways: plain operations, operations that return a structure, int
//! and bool tensors, random numbers, modules with a backward pass of their own, and reading several tensors at once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{Conv2d, Conv2dConfig, DeformConv2d, DeformConv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    PaddingConfig2d,
};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Int, Tensor, TensorData, Transaction, activation, module};

const ITEMS: usize = 6;
const TOKENS: usize = 5;
const WIDTH: usize = 16;
const CLASSES: usize = 7;

/// What a run saw, in order: a label, and the shape, type and bytes of a tensor.
#[derive(Debug, Default, PartialEq)]
pub struct Trace(Vec<(String, String, Vec<u8>)>);

impl Trace {
    pub fn push(&mut self, label: impl Into<String>, data: &TensorData) {
        let form = format!("{:?} {:?}", data.shape, data.dtype);
        self.0.push((label.into(), form, data.bytes.to_vec()));
    }

    /// Fails with the label of the first difference, and not with a page of bytes.
    pub fn assert_equal(&self, other: &Trace) {
        for (mine, theirs) in self.0.iter().zip(&other.0) {
            assert_eq!((&mine.0, &mine.1), (&theirs.0, &theirs.1));
            assert!(mine.2 == theirs.2, "the bits of {} differ", mine.0);
        }
        assert_eq!(self.0.len(), other.0.len());
    }

    pub fn labels(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(label, ..)| label.as_str())
    }

    /// The values recorded under `label`, taken as `f32`.
    pub fn floats(&self, label: &str) -> Vec<f32> {
        let found = self.0.iter().filter(|entry| entry.0 == label);
        found
            .flat_map(|entry| entry.2.chunks_exact(4))
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }
}

/// Burn's CPU backends draw from one generator per process, so two seeded runs must not interleave.
pub fn exclusive() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A classifier of a small picture and a few tokens.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    conv: Conv2d<B>,
    offset: Conv2d<B>,
    modulation: Conv2d<B>,
    deform: DeformConv2d<B>,
    embedding: Embedding<B>,
    attention: MultiHeadAttention<B>,
    norm: LayerNorm<B>,
    dropout: Dropout,
    head: Linear<B>,
}

impl<B: Backend> Model<B> {
    pub fn new(device: &B::Device) -> Self {
        let same = || PaddingConfig2d::Explicit(1, 1, 1, 1);
        Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).with_padding(same()).init(device),
            offset: Conv2dConfig::new([4, 18], [3, 3]).with_padding(same()).init(device),
            modulation: Conv2dConfig::new([4, 9], [3, 3]).with_padding(same()).init(device),
            deform: DeformConv2dConfig::new([4, 4], [3, 3]).with_padding(same()).init(device),
            embedding: EmbeddingConfig::new(11, WIDTH).init(device),
            attention: MultiHeadAttentionConfig::new(WIDTH, 2).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            dropout: DropoutConfig::new(0.2).init(),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    fn forward(&self, pictures: Tensor<B, 4>, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let x = activation::gelu(self.conv.forward(pictures));
        let (x, _) = module::max_pool2d_with_indices(x, [2, 2], [2, 2], [0, 0], [1, 1], false);
        let offset = self.offset.forward(x.clone());
        let modulation = activation::sigmoid(self.modulation.forward(x.clone()));
        // NdArray's threads add to the gradient of this input in the order they arrive, so its bits vary by themselves.
        let x = self.deform.forward(x.detach(), offset, Some(modulation));
        let picture = x.reshape([ITEMS, 4, WIDTH]);

        let x = Tensor::cat(vec![self.embedding.forward(tokens), picture], 1);
        let mask = generate_autoregressive_mask(ITEMS, TOKENS + 4, &x.device());
        let attended = self.attention.forward(MhaInput::self_attn(x.clone()).mask_attn(mask)).context;
        let x = self.dropout.forward(self.norm.forward(x + attended));
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

/// Trains for `steps` steps from `seed` and returns all losses, gradients, predictions and parameters.
///
/// `before_step` may replace the model ahead of each forward pass.
pub fn train<B: AutodiffBackend>(
    seed: u64,
    steps: usize,
    before_step: impl Fn(Model<B>) -> Model<B>,
) -> Trace {
    let device = B::Device::default();
    B::seed(&device, seed);
    let mut trace = Trace::default();
    let mut model = Model::<B>::new(&device);
    // A parameter draws its first value when first looked at: in this order, whatever `before_step` looks at first.
    model.visit(&mut Recorder { trace: &mut trace, gradients: None });
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.01).init();
    let loss_function = CrossEntropyLossConfig::new().init(&device);

    for step in 0..steps {
        model = before_step(model);
        let pictures = pictures::<B>(step, &device);
        let tokens = integers::<B>(step, 11, ITEMS * TOKENS, &device).reshape([ITEMS, TOKENS]);
        let targets = integers::<B>(step / 2, CLASSES, ITEMS, &device);

        let logits = model.forward(pictures, tokens);
        let loss = loss_function.forward(logits.clone(), targets.clone());
        let predicted = logits.clone().argmax(1).squeeze_dim::<1>(1);
        let correct: Tensor<B, 1, Bool> = predicted.clone().equal(targets);
        let kept = logits.detach().mask_fill(correct.clone().unsqueeze_dim::<2>(1), -1.0);

        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let read = Transaction::default()
            .register(predicted)
            .register(loss)
            .register(correct)
            .register(kept)
            .execute();
        for (label, data) in ["predicted", "loss", "correct", "kept"].into_iter().zip(&read) {
            trace.push(label, data);
        }
        model.visit(&mut Recorder { trace: &mut trace, gradients: Some(&gradients) });
        model = optimizer.step(0.01, model, gradients);
    }
    model.visit(&mut Recorder { trace: &mut trace, gradients: None });
    let valid = model.valid();
    let logits = valid.forward(
        pictures::<B::InnerBackend>(steps, &device),
        integers::<B::InnerBackend>(steps, 11, ITEMS * TOKENS, &device).reshape([ITEMS, TOKENS]),
    );
    trace.push("valid", &logits.into_data());
    trace
}

fn pictures<B: Backend>(step: usize, device: &B::Device) -> Tensor<B, 4> {
    let values: Vec<f32> =
        (0..ITEMS * 64).map(|i| ((i * 37 + step * 101) % 113) as f32 / 113.0 - 0.5).collect();
    Tensor::from_data(TensorData::new(values, [ITEMS, 1, 8, 8]), device)
}

fn integers<B: Backend>(step: usize, below: usize, count: usize, device: &B::Device) -> Tensor<B, 1, Int> {
    let values: Vec<i64> = (0..count).map(|i| ((i * 5 + step * 3) % below) as i64).collect();
    Tensor::from_data(TensorData::new(values, [count]), device)
}

/// Writes down gradients where there are any to look up, parameters otherwise.
struct Recorder<'a> {
    trace: &'a mut Trace,
    gradients: Option<&'a GradientsParams>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Recorder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        match self.gradients {
            Some(gradients) => {
                let gradient =
                    gradients.get::<B::InnerBackend, D>(param.id).expect("every parameter is used");
                self.trace.push("gradient", &gradient.into_data());
            }
            None => self.trace.push("parameter", &param.val().into_data()),
        }
    }
}
