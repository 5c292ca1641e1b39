//! A small trainer as a Burn user has it: data set, batcher, model, metrics.

use std::path::Path;
use std::sync::Arc;

use burn::config::Config;
use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Sgd, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, LearningComponentsMarker, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_autodiff::Autodiff;
use burn_ddp::data::DataLoaderBuilder;
use burn_ddp::learner::PlainRenderer;
use burn_ddp::nn::{SyncBatchNorm, SyncBatchNormConfig, SyncGroup};
use burn_ddp::{Ddp, ProcessGroup, Result};
use burn_flex::Flex;

pub type G = Ddp<Flex>;
pub type B = Autodiff<G>;

pub const FEATURES: usize = 4;
pub const CLASSES: usize = 3;

/// Numbered items.
#[derive(Clone)]
pub struct Items(pub usize);

impl Dataset<usize> for Items {
    fn get(&self, index: usize) -> Option<usize> {
        (index < self.0).then_some(index)
    }

    fn len(&self) -> usize {
        self.0
    }
}

#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    pub features: Tensor<B, 2>,
    pub targets: Tensor<B, 1, Int>,
    pub ids: Vec<usize>,
}

/// Features that are not separable but learnable, from the item's number alone.
pub fn features(item: usize) -> [f32; FEATURES] {
    let x = item as f32;
    [(x * 0.7).sin(), (x * 1.3).cos(), (x * 0.1).sin() * 2.0, (item % 5) as f32 - 2.0]
}

#[derive(Clone, Default)]
pub struct Batches;

impl<B: Backend> Batcher<B, usize, Batch<B>> for Batches {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        let values: Vec<f32> = items.iter().flat_map(|item| features(*item)).collect();
        let targets: Vec<i32> = items.iter().map(|item| (item % CLASSES) as i32).collect();
        let count = items.len();
        Batch {
            features: Tensor::from_data(TensorData::new(values, [count, FEATURES]), device),
            targets: Tensor::from_data(TensorData::new(targets, [count]), device),
            ids: items,
        }
    }
}

#[derive(Config, Debug)]
pub struct NetConfig {
    #[config(default = 0.0)]
    pub dropout: f64,
    #[config(default = "String::from(\"none\")")]
    pub norm: String,
}

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    first: Linear<B>,
    norm: Option<SyncBatchNorm<B>>,
    dropout: Dropout,
    last: Linear<B>,
}

impl NetConfig {
    /// Creates the model with the same initial weights in every process.
    pub fn init<B: Backend>(&self, device: &B::Device, sync: &SyncGroup) -> Result<Net<B>> {
        let norm = match self.norm.as_str() {
            "none" => None,
            "batch" => Some(SyncBatchNormConfig::new(8).init(device, None)?),
            "sync" => Some(SyncBatchNormConfig::new(8).init(device, Some(sync))?),
            other => panic!("no norm {other}"),
        };
        B::seed(device, 17);
        Ok(Net {
            first: LinearConfig::new(FEATURES, 8).init(device),
            norm,
            dropout: DropoutConfig::new(self.dropout).init(),
            last: LinearConfig::new(8, CLASSES).init(device),
        })
    }
}

impl<B: Backend> Net<B> {
    pub fn forward(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let hidden = self.first.forward(batch.features);
        let hidden = match &self.norm {
            Some(norm) => norm.forward(hidden),
            None => hidden,
        };
        let output = self.last.forward(self.dropout.forward(hidden.tanh()));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.forward(batch)
    }
}

pub type Trainer =
    LearningComponentsMarker<B, LinearLrScheduler, Net<B>, OptimizerAdaptor<Sgd<G>, Net<B>, B>>;

/// A training of the small model with loss and accuracy, without a log file.
pub fn training(artifacts: &Path, train: Loader<B>, valid: Loader<G>) -> SupervisedTraining<Trainer> {
    SupervisedTraining::new(artifacts, train, valid)
        .metrics((LossMetric::<Flex>::new(), AccuracyMetric::<Flex>::new()))
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None)
}

/// The small model with SGD and a falling learning rate.
pub fn learner(group: &ProcessGroup<G>, config: &NetConfig) -> Result<Learner<Trainer>> {
    let schedule = LinearLrSchedulerConfig::new(0.05, 0.01, 20).init().expect("a schedule");
    let model = config.init::<B>(group.device(), &SyncGroup::new(group))?;
    Ok(Learner::new(model, SgdConfig::new().init(), schedule))
}

pub type Loader<B> = Arc<dyn DataLoader<B, Batch<B>>>;

/// Sharded loaders for training (shuffled) and validation.
pub fn loaders(
    group: &ProcessGroup<G>,
    items: usize,
    batch: usize,
    workers: usize,
) -> Result<(Loader<B>, Loader<G>)> {
    let train = DataLoaderBuilder::new(Batches, group)
        .batch_size(batch)
        .shuffle(3)
        .num_workers(workers)
        .build(Items(items))?;
    let valid = DataLoaderBuilder::new(Batches, group).batch_size(batch).build(Items(items))?;
    Ok((train, valid))
}

/// All parameters of the model, running states too, as numbers.
pub fn numbers<B: Backend>(model: &impl Module<B>) -> Vec<f64> {
    struct Values(Vec<f64>);
    impl<B: Backend> burn::module::ModuleVisitor<B> for Values {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f64>());
        }
    }
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    values.0
}

/// Lines of a metric file.
pub fn lines(artifacts: &Path, split: &str, epoch: usize, metric: &str) -> Vec<String> {
    let path = artifacts.join(split).join(format!("epoch-{epoch}")).join(format!("{metric}.log"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(str::to_owned).collect()
}

/// All files below `folder`, for "only rank 0 leaves files".
pub fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path.display().to_string());
        }
    }
    found
}

/// Formats numbers as text without loss.
pub fn tell(numbers: &[f64]) -> String {
    numbers.iter().map(|number| format!("{number:e}")).collect::<Vec<_>>().join(" ")
}

/// Parses the text of [`tell`].
pub fn read(text: &str) -> Vec<f64> {
    text.split_whitespace().map(|word| word.parse().unwrap_or_else(|_| panic!("a number: {word}"))).collect()
}

/// Fails the test unless `got` equals `wanted` within `tolerance * max(1, |wanted|)`.
pub fn close(what: &str, got: &[f64], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}: {} numbers, not {}", got.len(), wanted.len());
    assert!(!wanted.is_empty(), "{what}: nothing to compare");
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let difference = (got - wanted).abs();
        assert!(
            difference <= tolerance * wanted.abs().max(1.0),
            "{what}: number {index} is {got}, not {wanted} (difference {difference:e})"
        );
    }
}
