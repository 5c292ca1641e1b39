//! Cost of `Ddp<B>` without a process group: a training step on `Ddp<Flex>` against the same step on `Flex`.
//!
//! The two are equal in every bit, which is checked before times are taken. They are measured in turns within one run,
//! each first in every other pair, because their difference is smaller than a machine's drift between two benchmarks.
//! The last line is the result: the median over all pairs of steps.
//!
//! `cargo bench -p burn-ddp-benches --bench decorator`

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_ddp::Ddp;
use burn_flex::Flex;
use criterion::{Criterion, criterion_group, criterion_main};

type Plain = Autodiff<Flex>;
type Decorated = Autodiff<Ddp<Flex>>;

const BATCH: usize = 4;
const TOKENS: usize = 64;
const VOCABULARY: usize = 128;
const WIDTH: usize = 64;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: Embedding<B>,
    encoder: TransformerEncoder<B>,
    head: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            encoder: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 2)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let mask = generate_autoregressive_mask(BATCH, TOKENS, &tokens.device());
        let x = self.embedding.forward(tokens);
        let x = self.encoder.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        self.head.forward(x).reshape([BATCH * TOKENS, VOCABULARY])
    }
}

/// A model in training. The step consumes the model, hence the `Option`.
struct Training<B: AutodiffBackend> {
    model: Option<Model<B>>,
    optimizer: OptimizerAdaptor<AdamW, Model<B>, B>,
    inputs: Tensor<B, 2, Int>,
    targets: Tensor<B, 1, Int>,
}

impl<B: AutodiffBackend> Training<B> {
    fn new() -> Self {
        let device = B::Device::default();
        B::seed(&device, 1);
        let model = Model::new(&device);
        // Parameters draw their first values when first looked at, and both models must draw from the same seed.
        model.visit(&mut Bits::default());
        let text: Vec<i64> = (0..BATCH * TOKENS + 1).map(|i| (i * i % VOCABULARY) as i64).collect();
        let inputs = TensorData::new(text[..BATCH * TOKENS].to_vec(), [BATCH, TOKENS]);
        let targets = TensorData::new(text[1..].to_vec(), [BATCH * TOKENS]);
        Self {
            model: Some(model),
            optimizer: AdamWConfig::new().with_weight_decay(0.1).init(),
            inputs: Tensor::from_data(inputs, &device),
            targets: Tensor::from_data(targets, &device),
        }
    }

    fn step(&mut self) {
        let model = self.model.take().expect("each step puts the model back");
        let logits = model.forward(self.inputs.clone());
        let loss = CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, self.targets.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        black_box(loss.into_data());
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
    }

    fn timed_step(&mut self) -> Duration {
        let start = Instant::now();
        self.step();
        start.elapsed()
    }

    fn bits(&self) -> Vec<u8> {
        let mut bits = Bits::default();
        self.model.as_ref().expect("each step puts the model back").visit(&mut bits);
        bits.0
    }
}

/// Collects the bytes of every parameter.
#[derive(Default)]
struct Bits(Vec<u8>);

impl<B: Backend> ModuleVisitor<B> for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.extend_from_slice(&param.val().into_data().bytes);
    }
}

/// Both trainings, and the times of every pair of steps so far.
struct Pairs {
    plain: Training<Plain>,
    decorated: Training<Decorated>,
    times: Vec<(Duration, Duration)>,
}

impl Pairs {
    fn new() -> Self {
        let mut plain = Training::new();
        let mut decorated = Training::new();
        for step in 0..4 {
            assert!(plain.bits() == decorated.bits(), "the parameters differ after {step} steps");
            plain.step();
            decorated.step();
        }
        Self { plain, decorated, times: Vec::new() }
    }

    fn measure(&mut self) -> (Duration, Duration) {
        let pair = if self.times.len().is_multiple_of(2) {
            let plain = self.plain.timed_step();
            (plain, self.decorated.timed_step())
        } else {
            let decorated = self.decorated.timed_step();
            (self.plain.timed_step(), decorated)
        };
        self.times.push(pair);
        pair
    }

    fn report(&self) {
        let mut ratios: Vec<f64> = self
            .times
            .iter()
            .map(|(plain, decorated)| decorated.as_secs_f64() / plain.as_secs_f64())
            .collect();
        ratios.sort_by(f64::total_cmp);
        let at = |share: f64| ratios[((ratios.len() - 1) as f64 * share) as usize];
        let fastest =
            |times: &mut dyn Iterator<Item = Duration>| times.min().unwrap_or_default().as_secs_f64();
        println!(
            "ddp<flex> / flex over {} pairs: median {:.4} (quartiles {:.4} to {:.4}), fastest step against fastest \
             {:.4}",
            ratios.len(),
            at(0.5),
            at(0.25),
            at(0.75),
            fastest(&mut self.times.iter().map(|pair| pair.1))
                / fastest(&mut self.times.iter().map(|pair| pair.0)),
        );
    }
}

fn decorator(criterion: &mut Criterion) {
    let mut pairs = Pairs::new();
    let mut group = criterion.benchmark_group("training step");
    group.measurement_time(Duration::from_secs(15));
    group.bench_function("flex", |bencher| {
        bencher.iter_custom(|steps| (0..steps).map(|_| pairs.measure().0).sum());
    });
    group.bench_function("ddp<flex>", |bencher| {
        bencher.iter_custom(|steps| (0..steps).map(|_| pairs.measure().1).sum());
    });
    group.finish();
    assert!(pairs.plain.bits() == pairs.decorated.bits(), "the parameters differ at the end");
    pairs.report();
}

criterion_group!(benches, decorator);
criterion_main!(benches);
