//! Parts that users bring along: loggers, models, norms, checkpoints, ranks without items.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::record::{BinFileRecorder, FullPrecisionSettings};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{LossMetric, MetricDefinition, NumericEntry};
use burn::train::{InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
use burn_ddp::data::{self, DataLoaderBuilder};
use burn_ddp::learner::{DdpStrategy, IncompleteWindow, LaunchDdp, PlainRenderer};
use burn_ddp::{ProcessGroup, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch, argument};
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("own logger", own_logger),
    ("norms in a row", norms_in_a_row),
    ("user model", user_model),
    ("empty slice", empty_slice),
    ("resumed after a drop", resumed),
    ("another model", another_model),
    ("mixed norms", mixed_norms),
];

/// A logger that sends values elsewhere and cannot return them.
struct WriteOnly {
    panics: bool,
    definitions: Arc<AtomicUsize>,
    values: usize,
}

impl MetricLogger for WriteOnly {
    fn log(&mut self, _: MetricsUpdate, _: usize, _: &Split) {
        self.values += 1;
        assert!(!self.panics || self.values < 3, "the tracking server is full");
    }

    fn read_numeric(
        &mut self,
        _: &str,
        _: usize,
        _: &Split,
    ) -> std::result::Result<Vec<NumericEntry>, String> {
        Err("write only".into())
    }

    fn log_metric_definition(&mut self, _: MetricDefinition) {
        self.definitions.fetch_add(1, Ordering::SeqCst);
    }

    fn log_epoch_summary(&mut self, _: EpochSummary) {}
}

fn own_logger() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let definitions = Arc::<AtomicUsize>::default();
    let panics = argument() == "panics";
    let training = training(artifacts.path(), train, valid).num_epochs(2).with_metric_logger(WriteOnly {
        panics,
        definitions: definitions.clone(),
        values: 0,
    });
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(definitions.load(Ordering::SeqCst).to_string())
}

#[test]
fn a_metric_logger_that_cannot_be_read_is_not_read() {
    for world in [1, 2] {
        let definitions = Launch::new("own logger", world).succeed();
        assert_eq!(definitions[0], "2", "one for each metric");
    }
}

#[test]
fn a_metric_logger_that_panics_is_named() {
    for outcome in Launch::new("own logger", 2).argument("panics").run() {
        outcome.failed_saying(&["rank 0", "the tracking server is full"]);
    }
}

/// A model with a synchronized norm, then one without, on loaders of each rank's own that are not equally long.
fn norms_in_a_row() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let config = NetConfig::new().with_norm("sync".into());
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    training(artifacts.path(), train, valid)
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &config)?)?;
    let items = if group.rank().is_root() { 12 } else { 6 };
    let train = PlainBuilder::new(Batches).batch_size(3).build(Items(items));
    let valid = PlainBuilder::new(Batches).batch_size(3).build(Items(items));
    training(artifacts.path(), data::local(train, &group), data::local(valid, &group))
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

#[test]
fn a_model_without_synchronized_layers_is_not_taken_for_one_that_came_before() {
    Launch::new("norms in a row", 2).succeed();
}

/// A model as users write it: a frozen layer, a constant, an `optimize` of its own.
#[derive(Module, Debug)]
struct Custom<B: Backend> {
    frozen: Param<Tensor<B, 2>>,
    net: Net<B>,
    scale: Tensor<B, 1>,
}

impl<B: AutodiffBackend> TrainStep for Custom<B> {
    type Input = Batch<B>;
    type Output = burn::train::ClassificationOutput<B>;

    fn step(&self, mut batch: Batch<B>) -> TrainOutput<Self::Output> {
        batch.features = batch.features.matmul(self.frozen.val()) * self.scale.clone().unsqueeze();
        let output = self.net.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize<B1, O>(self, optim: &mut O, lr: f64, grads: GradientsParams) -> Self
    where
        B1: AutodiffBackend,
        O: Optimizer<Self, B1>,
        Self: AutodiffModule<B1>,
    {
        struct Clip;
        impl<B: AutodiffBackend> burn::module::ModuleMapper<B> for Clip {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
                let grad = param.is_require_grad();
                param.map(|tensor| Tensor::from_inner(tensor.inner().clamp(-0.4, 0.4)).set_require_grad(grad))
            }
        }
        optim.step(lr, self, grads).map(&mut Clip)
    }
}

impl<B: Backend> InferenceStep for Custom<B> {
    type Input = Batch<B>;
    type Output = burn::train::ClassificationOutput<B>;

    fn step(&self, mut batch: Batch<B>) -> Self::Output {
        batch.features = batch.features.matmul(self.frozen.val()) * self.scale.clone().unsqueeze();
        self.net.forward(batch)
    }
}

fn user_model() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let device = group.device();
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 16, 5, 1)?;
    let net = NetConfig::new().init::<B>(device, &burn_ddp::nn::SyncGroup::new(&group))?;
    let frozen = Tensor::<B, 2>::eye(FEATURES, device) * 0.3;
    let model = Custom::<B> {
        frozen: Param::from_tensor(frozen).set_require_grad(false),
        net,
        scale: Tensor::ones([1], device) * 1.5,
    };
    let mut optimizer = AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.05))).init();
    // An optimizer that has a state already.
    let (warm, mut model) = (loaders(&ProcessGroup::<G>::solo(device), 16, 5, 0)?.0, model);
    for batch in warm.iter() {
        let output = TrainStep::step(&model, batch);
        model = optimizer.step(0.01, model, output.grads);
    }
    let training = SupervisedTraining::new(artifacts.path(), train, valid)
        .metrics((LossMetric::<Flex>::new(),))
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None)
        .num_epochs(2)
        .grads_accumulation(2);
    let result = training
        .launch_ddp(&DdpStrategy::new(&group), Learner::new(model, optimizer, ConstantLr::new(0.01)))?;
    Ok(tell(&numbers(&result.model)))
}

#[test]
fn a_model_of_a_users_own_trains_as_on_one_process() {
    let one = Launch::new("user model", 1).succeed().remove(0);
    for world in [2, 3] {
        for text in Launch::new("user model", world).succeed() {
            close(&format!("world {world}"), &read(&text), &read(&one), 2e-5);
        }
    }
}

/// Trains with more ranks than items.
fn empty_slice() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let workers = argument().parse().expect("workers");
    let (train, _) = loaders(&group, 10, 5, 0)?;
    let valid = PlainBuilder::new(Batches).batch_size(3).num_workers(workers).build(Items(2));
    training(artifacts.path(), train, data::slice(valid, &group))
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    if !group.rank().is_root() {
        return Ok(String::new());
    }
    Ok(lines(artifacts.path(), "valid", 1, "Accuracy").join(" "))
}

#[test]
fn a_slice_without_items_is_an_end_and_no_error() {
    for workers in [0, 1, 2, 3] {
        let text = Launch::new("empty slice", 3).argument(workers).succeed().remove(0);
        assert_eq!(text, "50,2", "{workers} workers");
    }
}

/// Two epochs of two and a half windows, of which the half is dropped, in one training or in two.
fn resumed() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let ends = if argument() == "parts" { vec![1, 2] } else { vec![2] };
    let mut last = Vec::new();
    for (index, end) in ends.into_iter().enumerate() {
        let (train, valid) = loaders(&group, 20, 4, 0)?;
        let mut training = training(artifacts.path(), train, valid)
            .num_epochs(end)
            .grads_accumulation(2)
            .with_file_checkpointer(BinFileRecorder::<FullPrecisionSettings>::new())
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(9));
        if index > 0 {
            training = training.checkpoint(index);
        }
        let ddp = DdpStrategy::new(&group).with_incomplete_window(IncompleteWindow::Drop);
        let result = training.launch_ddp(&ddp, learner(&group, &NetConfig::new())?)?;
        last = numbers(&result.model);
    }
    Ok(tell(&last))
}

#[test]
fn a_resumed_training_goes_on_with_the_rate_of_the_window_that_was_dropped() {
    for world in [1, 2] {
        let whole = Launch::new("resumed after a drop", world).succeed().remove(0);
        let parts = Launch::new("resumed after a drop", world).argument("parts").succeed().remove(0);
        close(&format!("world {world}"), &read(&parts), &read(&whole), 1e-9);
    }
}

/// Resumes from the checkpoint of a model without a norm, with one that has a norm.
fn another_model() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let train = |config: NetConfig, epochs: usize, from: Option<usize>| {
        let (train, valid) = loaders(&group, 10, 5, 0)?;
        let mut training = training(artifacts.path(), train, valid)
            .num_epochs(epochs)
            .with_file_checkpointer(BinFileRecorder::<FullPrecisionSettings>::new());
        if let Some(epoch) = from {
            training = training.checkpoint(epoch);
        }
        training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &config)?)
    };
    train(NetConfig::new(), 1, None)?;
    train(NetConfig::new().with_norm("batch".into()), 2, Some(1))?;
    Ok(String::new())
}

#[test]
fn a_checkpoint_of_another_model_is_refused_by_the_first_difference() {
    for world in [1, 2] {
        let outcomes = Launch::new("another model", world).run();
        outcomes[0].failed_saying(&["checkpoint 1 is of another model", "norm.gamma"]);
        for outcome in &outcomes[1..] {
            outcome.failed_saying(&["rank 0 failed", "checkpoint 1 is of another model"]);
        }
    }
}

/// A plain and a synchronized normalization of the same features.
#[derive(Module, Debug)]
struct Mixed<B: Backend> {
    plain: BatchNorm<B>,
    sync: burn_ddp::nn::SyncBatchNorm<B>,
}

impl<B: Backend> Mixed<B> {
    fn forward(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let output = self.sync.forward(self.plain.forward(batch.features.clone())).tanh();
        let loss = (output.clone() - batch.features.clone()).square().mean();
        RegressionOutput::new(loss, output, batch.features)
    }
}

impl<B: AutodiffBackend> TrainStep for Mixed<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Mixed<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> RegressionOutput<B> {
        self.forward(batch)
    }
}

/// Six items in batches of five: in the second one rank 1 has none. The running means of both normalizations.
fn mixed_norms() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let (device, artifacts) = (group.device(), tempfile::tempdir().expect("a folder"));
    let sync = burn_ddp::nn::SyncGroup::new(&group);
    let loader = || DataLoaderBuilder::<B, _, _>::new(Batches, &group).batch_size(5).build(Items(6));
    let valid = DataLoaderBuilder::<G, _, _>::new(Batches, &group).batch_size(5).build(Items(6))?;
    let training = SupervisedTraining::new(artifacts.path(), loader()?, valid)
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None);
    let model = Mixed::<B> {
        plain: BatchNormConfig::new(FEATURES).init(device),
        sync: burn_ddp::nn::SyncBatchNormConfig::new(FEATURES).init(device, Some(&sync))?,
    };
    let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(1e-9));
    let never = burn_ddp::learner::BufferPolicy::Never;
    let ddp = DdpStrategy::new(&group).with_buffers(never, burn_ddp::BufferSync::Average);
    let model = training.launch_ddp(&ddp, learner)?.model;
    let mean =
        |norm: &BatchNorm<G>| norm.running_mean.value_sync().into_data().iter::<f64>().collect::<Vec<_>>();
    Ok(tell(&[mean(&model.plain), mean(&model.sync)].concat()))
}

#[test]
fn a_placeholder_moves_no_running_state_of_a_plain_layer() {
    let texts = Launch::new("mixed norms", 2).succeed();
    // Rank 1 had items 3 and 4, once.
    let own: Vec<f64> = (0..FEATURES)
        .map(|feature| 0.1 * f64::from(features(3)[feature] + features(4)[feature]) / 2.0)
        .collect();
    close("plain", &read(&texts[1])[..FEATURES], &own, 1e-6);
    // The synchronized one has moved twice, and alike.
    assert_eq!(read(&texts[0])[FEATURES..], read(&texts[1])[FEATURES..]);
}
