//! Panics in a user's data sets, batchers, steps and metrics end all ranks, and every error names the first cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::record::{FileRecorder, FullPrecisionSettings, Recorder, RecorderError};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::metric::{Metric, MetricDefinition, MetricMetadata, MetricName, SerializedEntry};
use burn::train::{
    InferenceStep, Interrupter, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_ddp::data::{self, DataLoaderBuilder};
use burn_ddp::learner::{DdpStrategy, LaunchDdp, PlainRenderer};
use burn_ddp::{ProcessGroup, Result};

use crate::harness::{Case, Launch, argument};
use crate::metrics::Numbers;
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("two failures", two_failures),
    ("two panics", two_panics),
    ("panicking recorder", panicking_recorder),
    ("burns workers", burns_workers),
    ("last words", last_words),
];

/// A metric that panics after a delay.
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

/// A data set with fewer items than its length.
struct Short(usize);

impl Dataset<usize> for Short {
    fn get(&self, index: usize) -> Option<usize> {
        (index < self.0).then_some(index)
    }

    fn len(&self) -> usize {
        40
    }
}

/// Trains; before rank 0's metric panics, rank 1 fails or stops the training.
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

/// A batcher that panics at item 14.
#[derive(Clone)]
struct No14;

impl<B: Backend> Batcher<B, usize, Batch<B>> for No14 {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        assert!(!items.contains(&14), "bad row 14");
        Batches.batch(items, device)
    }
}

/// Trains with Burn's own loaders, whose threads do not pass on the cause of a panic.
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

/// A renderer that panics at the end of a training, as Burn's does with a summary into a closed pipe.
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
