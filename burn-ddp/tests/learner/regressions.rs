//! One test for each bug of the learner that was found after it was built.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::record::{BinFileRecorder, FileRecorder, FullPrecisionSettings, Recorder, RecorderError};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{
    LossMetric, Metric, MetricDefinition, MetricMetadata, MetricName, NumericEntry, SerializedEntry,
};
use burn::train::{
    InferenceStep, Interrupter, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_ddp::data::{self, DataLoaderBuilder};
use burn_ddp::learner::{DdpStrategy, IncompleteWindow, LaunchDdp, PlainRenderer};
use burn_ddp::{ProcessGroup, Result};
use burn_flex::Flex;
use rustix::process::Signal;

use crate::harness::{Case, Launch, argument, mark};
use crate::metrics::Numbers;
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("own logger", own_logger),
    ("signals after", signals_after),
    ("slow batch", slow_batch),
    ("two failures", two_failures),
    ("two panics", two_panics),
    ("norms in a row", norms_in_a_row),
    ("panicking recorder", panicking_recorder),
    ("user model", user_model),
    ("burns workers", burns_workers),
    ("empty slice", empty_slice),
    ("resumed after a drop", resumed),
    ("another model", another_model),
    ("mixed norms", mixed_norms),
    ("last words", last_words),
];

/// A logger that sends values elsewhere and cannot be asked for them.
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

/// Trains, then waits for a signal.
fn signals_after() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    for _ in 0..2 {
        let (train, valid) = loaders(&group, 10, 5, 0)?;
        let training = training(artifacts.path(), train, valid);
        training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    }
    mark("trained");
    std::thread::sleep(Duration::from_secs(20));
    Ok("deaf".into())
}

#[test]
fn after_a_training_signals_do_what_they_did_before() {
    use std::os::unix::process::ExitStatusExt;
    for (signal, number) in [(Signal::TERM, 15), (Signal::INT, 2)] {
        let ranks = Launch::new("signals after", 1).start();
        ranks.wait_for_mark(0, "trained");
        ranks.signal(0, signal);
        let outcome = ranks.wait().remove(0);
        assert_eq!(outcome.status.signal(), Some(number), "{outcome:?}");
    }
}

/// Makes its third batch when a signal has come, or for a long time.
#[derive(Clone)]
struct Slow(Arc<AtomicUsize>);

impl<B: Backend> Batcher<B, usize, Batch<B>> for Slow {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        if self.0.fetch_add(1, Ordering::SeqCst) == 2 {
            mark("third");
            std::thread::sleep(Duration::from_millis(argument().parse().expect("milliseconds")));
        }
        Batches.batch(items, device)
    }
}

fn slow_batch() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (_, valid) = loaders(&group, 10, 5, 0)?;
    let train = DataLoaderBuilder::new(Slow(Arc::default()), &group).batch_size(5).build(Items(5_000_000))?;
    training(artifacts.path(), train, valid)
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok("stopped".into())
}

#[test]
fn a_signal_that_comes_twice_at_once_is_one_wish_to_stop_and_a_later_one_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    let ranks = Launch::new("slow batch", 1).argument(100).start();
    ranks.wait_for_mark(0, "third");
    for _ in 0..5 {
        ranks.signal(0, Signal::TERM);
        // One that is pending still would take the others up.
        std::thread::sleep(Duration::from_millis(5));
    }
    let outcome = ranks.wait().remove(0);
    assert!(outcome.status.success() && outcome.text == "stopped", "{outcome:?}");

    let ranks = Launch::new("slow batch", 1).argument(30_000).start();
    ranks.wait_for_mark(0, "third");
    let start = Instant::now();
    // Until it must have seen two that are apart; one that has ended takes more.
    while start.elapsed() < Duration::from_secs(1) {
        ranks.signal(0, Signal::TERM);
        std::thread::sleep(Duration::from_millis(20));
    }
    let outcome = ranks.wait().remove(0);
    assert_eq!(outcome.status.signal(), Some(15), "{outcome:?}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// Takes its time, and then panics.
#[derive(Clone)]
struct SlowlyBroken;

impl Metric for SlowlyBroken {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Slowly broken".into())
    }

    fn update(&mut self, _: &(), _: &MetricMetadata) -> SerializedEntry {
        std::thread::sleep(Duration::from_secs(1));
        panic!("the metric")
    }

    fn clear(&mut self) {}
}

/// Has fewer items than it says.
struct Short(usize);

impl Dataset<usize> for Short {
    fn get(&self, index: usize) -> Option<usize> {
        (index < self.0).then_some(index)
    }

    fn len(&self) -> usize {
        40
    }
}

/// While rank 0's metric is on its way to a panic, rank 1 fails, or stops the training.
fn two_failures() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (_, valid) = loaders(&group, 10, 5, 0)?;
    let (is_root, stops) = (group.rank().is_root(), argument() == "stop");
    let items = if is_root || stops { 40 } else { 8 };
    let train = data::local(PlainBuilder::new(Batches).batch_size(4).build(Short(items)), &group);
    let interrupter = Interrupter::new();
    if stops && !is_root {
        interrupter.stop(None);
    }
    training(artifacts.path(), train, valid)
        .metric_train(SlowlyBroken)
        .with_interrupter(interrupter)
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

#[test]
fn a_failure_while_a_metric_is_about_to_panic_ends_all_ranks() {
    for outcome in Launch::new("two failures", 2).limit(20).run() {
        outcome.failed_saying(&["rank 1", "8 of 40"]);
    }
}

#[test]
fn a_metric_that_panics_after_a_stop_is_an_error() {
    for outcome in Launch::new("two failures", 2).argument("stop").limit(20).run() {
        outcome.failed_saying(&["rank 0", "the metric"]);
    }
}

/// A step that survives one panic and does not survive the next.
#[derive(Module, Debug)]
struct Rough<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the second, in a destructor");
    }
}

static STEPS: AtomicUsize = AtomicUsize::new(0);

impl<B: AutodiffBackend> TrainStep for Rough<B> {
    type Input = Tensor<B, 1>;
    type Output = RegressionOutput<B>;

    fn step(&self, numbers: Tensor<B, 1>) -> TrainOutput<RegressionOutput<B>> {
        match STEPS.fetch_add(1, Ordering::SeqCst) {
            0 if argument() == "drop" => {
                let _bomb = Bomb;
                panic!("the first, which is the cause");
            }
            0 => {
                let _ = std::panic::catch_unwind(|| panic!("harmless and caught"));
            }
            _ => panic!("the real one"),
        }
        let column = (self.w.val() * numbers).unsqueeze_dim::<2>(1);
        let loss = column.clone().mean();
        TrainOutput::new(self, loss.backward(), RegressionOutput::new(loss, column.clone(), column))
    }
}

impl<B: Backend> InferenceStep for Rough<B> {
    type Input = Tensor<B, 1>;
    type Output = RegressionOutput<B>;

    fn step(&self, numbers: Tensor<B, 1>) -> RegressionOutput<B> {
        let column = (self.w.val() * numbers).unsqueeze_dim::<2>(1);
        RegressionOutput::new(column.clone().mean(), column.clone(), column)
    }
}

fn two_panics() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let numbers = Numbers(vec![1.0; 12]);
    let train = DataLoaderBuilder::new(numbers.clone(), &group).batch_size(4).build(Items(12))?;
    let valid = DataLoaderBuilder::new(numbers, &group).batch_size(4).build(Items(12))?;
    let training = SupervisedTraining::new(artifacts.path(), train, valid)
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None);
    let model = Rough::<B> { w: Param::from_tensor(Tensor::ones([1], group.device())) };
    let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.01));
    training.launch_ddp(&DdpStrategy::new(&group), learner)?;
    Ok(String::new())
}

#[test]
fn the_panic_that_is_reported_is_the_one_that_ended_the_training() {
    for outcome in Launch::new("two panics", 2).run() {
        outcome.failed_saying(&["the real one"]);
    }
}

#[test]
fn a_panic_in_a_destructor_does_not_hide_the_first() {
    for outcome in Launch::new("two panics", 1).argument("drop").run() {
        outcome.failed_saying(&["the first, which is the cause"]);
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

#[derive(Clone, Debug, Default)]
struct Panicking;

impl<B: Backend> Recorder<B> for Panicking {
    type Settings = FullPrecisionSettings;
    type RecordArgs = std::path::PathBuf;
    type RecordOutput = ();
    type LoadArgs = std::path::PathBuf;

    fn save_item<I: serde::Serialize>(
        &self,
        _: I,
        _: std::path::PathBuf,
    ) -> std::result::Result<(), RecorderError> {
        panic!("no room for records")
    }

    fn load_item<I: serde::de::DeserializeOwned>(
        &self,
        _: &mut std::path::PathBuf,
    ) -> std::result::Result<I, RecorderError> {
        panic!("no records")
    }
}

impl<B: Backend> FileRecorder<B> for Panicking {
    fn file_extension() -> &'static str {
        "none"
    }
}

fn panicking_recorder() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let epochs: usize = argument().parse().expect("epochs");
    let mut training =
        training(artifacts.path(), train, valid).num_epochs(epochs.max(1)).with_file_checkpointer(Panicking);
    if epochs == 0 {
        training = training.checkpoint(1);
    }
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

#[test]
fn a_recorder_that_panics_is_an_error_and_no_abort() {
    for epochs in [0, 2] {
        for outcome in Launch::new("panicking recorder", 2).argument(epochs).run() {
            outcome
                .failed_saying(&["rank 0", if epochs == 0 { "no records" } else { "no room for records" }]);
            assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
        }
    }
}

/// What users do with a model: a frozen layer, a constant, an `optimize` of its own.
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

/// Cannot take item 14.
#[derive(Clone)]
struct No14;

impl<B: Backend> Batcher<B, usize, Batch<B>> for No14 {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        assert!(!items.contains(&14), "bad row 14");
        Batches.batch(items, device)
    }
}

/// Loaders of Burn's own with threads, which keep the cause to themselves.
fn burns_workers() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (_, valid) = loaders(&group, 10, 5, 0)?;
    let items = if group.rank().is_root() { 12 } else { 24 };
    let train = PlainBuilder::new(No14).batch_size(4).num_workers(2).build(Items(items));
    training(artifacts.path(), data::local(train, &group), valid)
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

#[test]
fn a_panic_in_a_thread_of_burns_loader_reaches_all_ranks_with_its_cause() {
    for outcome in Launch::new("burns workers", 2).run() {
        let last = outcome.stderr.lines().last().unwrap_or_default();
        assert!(last.contains("rank 1") && last.contains("bad row 14"), "{}", outcome.stderr);
    }
}

/// More ranks than items.
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

/// Goes on from the checkpoint of a model without a norm, with one that has a norm.
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

/// A renderer that the end of a training is too much for, as a summary into a closed pipe is for Burn's.
struct Mute;

impl burn::train::renderer::MetricsRendererTraining for Mute {
    fn update_train(&mut self, _: burn::train::renderer::MetricState) {}
    fn update_valid(&mut self, _: burn::train::renderer::MetricState) {}
    fn render_train(
        &mut self,
        _: burn::train::renderer::TrainingProgress,
        _: Vec<burn::train::renderer::ProgressType>,
    ) {
    }
    fn render_valid(
        &mut self,
        _: burn::train::renderer::TrainingProgress,
        _: Vec<burn::train::renderer::ProgressType>,
    ) {
    }
    fn on_train_end(
        &mut self,
        _: Option<burn::train::LearnerSummary>,
    ) -> std::result::Result<(), Box<dyn std::error::Error>> {
        panic!("nobody reads this")
    }
}

impl burn::train::renderer::MetricsRendererEvaluation for Mute {
    fn update_test(
        &mut self,
        _: burn::train::renderer::EvaluationName,
        _: burn::train::renderer::MetricState,
    ) {
    }
    fn render_test(
        &mut self,
        _: burn::train::renderer::EvaluationProgress,
        _: Vec<burn::train::renderer::ProgressType>,
    ) {
    }
}

impl burn::train::renderer::MetricsRenderer for Mute {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

fn last_words() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let training = training(artifacts.path(), train, valid).renderer(Mute);
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

#[test]
fn a_renderer_that_panics_at_the_end_is_an_error_and_no_hang() {
    for world in [1, 2] {
        let start = Instant::now();
        let outcomes = Launch::new("last words", world).run();
        assert!(start.elapsed() < Duration::from_secs(10));
        outcomes[0].failed_saying(&["rank 0", "panicked", "nobody reads this"]);
        // The others were done.
        assert!(outcomes[1..].iter().all(|outcome| outcome.status.success()), "{outcomes:?}");
    }
}
