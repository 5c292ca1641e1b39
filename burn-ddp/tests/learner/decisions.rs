//! Decisions during a training, which take effect on all ranks at the same step.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::record::{BinFileRecorder, FullPrecisionSettings};
use burn::tensor::backend::Backend;
use burn::train::checkpoint::MetricCheckpointingStrategy;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{
    LearningRateMetric, Metric, MetricMetadata, MetricName, Numeric, NumericEntry, SerializedEntry,
};
use burn::train::{EarlyStoppingStrategy, Interrupter, MetricEarlyStoppingStrategy, StoppingCondition};
use burn_ddp::data::DataLoaderBuilder;
use burn_ddp::learner::{DdpStrategy, IncompleteWindow, LaunchDdp};
use burn_ddp::{ProcessGroup, Result};
use rustix::process::Signal;

use crate::harness::{Case, Launch, argument, mark};
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("fifty", fifty),
    ("one-sided", one_sided),
    ("stopped", stopped),
    ("windows", windows),
    ("toy", toy),
    ("schedule", schedule),
    ("resumed", resumed),
];

/// A metric with a value for each epoch, slow to compute.
#[derive(Clone)]
struct Scripted(f64);

const SCRIPT: [f64; 5] = [3.0, 1.0, 2.0, 0.5, 0.25];

impl Metric for Scripted {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Scripted".into())
    }

    fn update(&mut self, _: &(), metadata: &MetricMetadata) -> SerializedEntry {
        std::thread::sleep(Duration::from_millis(3));
        self.0 = SCRIPT[metadata.global_progress.items_processed - 1];
        SerializedEntry::new(self.0.to_string(), self.0.to_string())
    }

    fn clear(&mut self) {}
}

impl Numeric for Scripted {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.0)
    }

    fn running_value(&self) -> NumericEntry {
        self.value()
    }
}

/// Optimizer steps so far: one bucket, so one reduction each.
fn steps(group: &ProcessGroup<G>) -> u64 {
    group.stats().calls("all_reduce")
}

/// Runs fifty trainings, each of which must stop after epoch 3 with the checkpoint of epoch 2.
fn fifty() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let mut lines = Vec::new();
    for _ in 0..50 {
        let artifacts = tempfile::tempdir().expect("a folder");
        let (train, valid) = loaders(&group, 10, 5, 0)?;
        let before = steps(&group);
        let training = training(artifacts.path(), train, valid)
            .metric_valid_numeric(Scripted(0.0))
            .num_epochs(SCRIPT.len())
            .with_file_checkpointer(BinFileRecorder::<FullPrecisionSettings>::new())
            .with_checkpointing_strategy(MetricCheckpointingStrategy::new(
                &Scripted(0.0),
                Aggregate::Mean,
                Direction::Lowest,
                Split::Valid,
            ))
            .early_stopping(MetricEarlyStoppingStrategy::new(
                &Scripted(0.0),
                Aggregate::Mean,
                Direction::Lowest,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs: 1 },
            ));
        training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
        lines.push(format!("{} {}", steps(&group) - before, kept(artifacts.path())));
    }
    Ok(lines.join("\n"))
}

/// Names of the checkpoint files.
fn kept(artifacts: &Path) -> String {
    let mut names: Vec<_> = files(&artifacts.join("checkpoint"))
        .iter()
        .map(|path| Path::new(path).file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    names.sort();
    names.join(",")
}

#[test]
fn the_best_checkpoint_is_kept_and_the_stop_comes_in_time_with_a_slow_metric() {
    for (rank, text) in Launch::new("fifty", 2).limit(120).succeed().iter().enumerate() {
        assert_eq!(text.lines().count(), 50);
        // Three epochs of two steps.
        let wanted = if rank == 0 { "6 model-2,optim-2,scheduler-2" } else { "6 " };
        for (run, line) in text.lines().enumerate() {
            assert_eq!(line, wanted, "rank {rank}, run {run}");
        }
    }
}

/// Stops after an epoch on one rank only.
#[derive(Clone)]
struct OnRank(usize, usize);

impl EarlyStoppingStrategy for OnRank {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        self.0 == self.1 && epoch == 2
    }
}

/// Trains with a strategy that stops on the rank of the argument only.
fn one_sided() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let rank = argument().parse().expect("a rank");
    let training =
        training(artifacts.path(), train, valid).num_epochs(4).early_stopping(OnRank(rank, group.rank().0));
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(steps(&group).to_string())
}

#[test]
fn early_stopping_is_rank_0s_decision() {
    assert_eq!(Launch::new("one-sided", 2).argument(0).succeed(), ["4", "4"]);
    assert_eq!(Launch::new("one-sided", 2).argument(1).succeed(), ["8", "8"]);
}

/// A batcher that calls a function at its n-th batch.
#[derive(Clone)]
struct Watched {
    made: Arc<AtomicUsize>,
    at: usize,
    then: Arc<dyn Fn() + Send + Sync>,
}

impl<B: Backend> Batcher<B, usize, Batch<B>> for Watched {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        if self.made.fetch_add(1, Ordering::SeqCst) + 1 == self.at {
            (self.then)();
        }
        Batches.batch(items, device)
    }
}

/// Trains; rank 1 interrupts at its third batch, or all ranks wait there for a signal.
fn stopped() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (_, valid) = loaders(&group, 10, 5, 0)?;
    let interrupter = Interrupter::new();
    let (is_one, handle) = (group.rank().0 == 1, interrupter.clone());
    let then: Arc<dyn Fn() + Send + Sync> = match argument().as_str() {
        "interrupter" => Arc::new(move || {
            if is_one {
                handle.stop(Some("rank 1 has had enough"));
            }
        }),
        _ => Arc::new(|| mark("third")),
    };
    let batcher = Watched { made: Arc::default(), at: 3, then };
    // Long enough that only a stop ends it.
    let train = DataLoaderBuilder::new(batcher, &group).batch_size(5).build(Items(5_000_000))?;
    let training =
        training(artifacts.path(), train, valid).num_epochs(2).with_interrupter(interrupter.clone());
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(format!("{} {}", steps(&group), interrupter.should_stop()))
}

#[test]
fn an_interrupter_on_one_rank_stops_all_at_the_same_step() {
    for text in Launch::new("stopped", 3).argument("interrupter").succeed() {
        assert_eq!(text, "3 true");
    }
}

#[test]
fn a_signal_to_one_rank_stops_all_at_the_same_step() {
    for (signal, rank) in [(Signal::TERM, 0), (Signal::INT, 1)] {
        let mut ranks = Launch::new("stopped", 2).argument("signal").start();
        ranks.wait_for_mark(rank, "third");
        ranks.signal(rank, signal);
        assert!(ranks.time_until_end_of(0) < Duration::from_secs(10));
        let outcomes = ranks.wait();
        let texts: Vec<_> = outcomes.iter().map(|outcome| outcome.text.as_str()).collect();
        assert!(outcomes.iter().all(|outcome| outcome.status.success()), "{outcomes:?}");
        assert!(texts[0].ends_with(" true") && texts[0] == texts[1], "{texts:?}");
        assert!(texts[0] != "1000000 true", "it ended by itself");
    }
}

/// Steps with incomplete windows in each of three epochs, and the learning rates of the epochs' last micro-steps.
fn windows() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let window = if argument() == "drop" { IncompleteWindow::Drop } else { IncompleteWindow::Flush };
    let artifacts = tempfile::tempdir().expect("a folder");
    let mut counts = Vec::new();
    for epochs in 1..=3 {
        let before = steps(&group);
        let (train, valid) = loaders(&group, 20, 4, 0)?;
        let training = training(artifacts.path(), train, valid).num_epochs(epochs).grads_accumulation(2);
        let ddp = DdpStrategy::new(&group).with_incomplete_window(window);
        training.launch_ddp(&ddp, learner(&group, &NetConfig::new())?)?;
        counts.push(steps(&group) - before);
    }
    Ok(format!("{counts:?}"))
}

#[test]
fn an_incomplete_window_is_flushed_or_dropped_and_never_carried_over() {
    for text in Launch::new("windows", 2).succeed() {
        assert_eq!(text, "[3, 6, 9]");
    }
    for text in Launch::new("windows", 2).argument("drop").succeed() {
        assert_eq!(text, "[2, 4, 6]");
    }
}

/// `loss = mean(w * x)` from 0 with SGD and rate 0.1, x being 1 to 5 on every rank, one a micro-step, two a window; `w`
/// at the end. The loaders are each rank's own.
fn toy() -> Result<String> {
    use crate::metrics::{Numbers, Scale};
    use burn::module::Param;
    use burn::tensor::Tensor;
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let window = if argument() == "drop" { IncompleteWindow::Drop } else { IncompleteWindow::Flush };
    let artifacts = tempfile::tempdir().expect("a folder");
    let items = Numbers(vec![1.0, 2.0, 3.0, 4.0, 5.0]);
    let train = burn::data::dataloader::DataLoaderBuilder::<B, _, _>::new(items.clone()).build(Items(5));
    let valid = burn::data::dataloader::DataLoaderBuilder::<G, _, _>::new(items).build(Items(5));
    let local = burn_ddp::data::local::<B, _, _>;
    let training = burn::train::SupervisedTraining::new(
        artifacts.path(),
        local(train, &group),
        burn_ddp::data::local(valid, &group),
    )
    .renderer(burn_ddp::learner::PlainRenderer::to(std::io::sink()))
    .with_application_logger(None)
    .grads_accumulation(2);
    let model = Scale::<B> { w: Param::from_tensor(Tensor::zeros([1], group.device())) };
    let constant = burn::lr_scheduler::constant::ConstantLr::new(0.1);
    let learner = burn::train::Learner::new(model, burn::optim::SgdConfig::new().init(), constant);
    let result = training.launch_ddp(&DdpStrategy::new(&group).with_incomplete_window(window), learner)?;
    Ok(result.model.w.val().into_scalar().to_string())
}

#[test]
fn the_divisor_of_an_incomplete_window_is_its_real_number_of_micro_steps() {
    for (window, w) in [("flush", -1.0), ("drop", -0.5)] {
        for text in Launch::new("toy", 2).argument(window).succeed() {
            close(window, &read(&text), &[w], 1e-6);
        }
    }
}

/// The learning rate of every micro-step: 1 to 0 over four steps, two micro-steps each.
fn schedule() -> Result<String> {
    use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 8 * 4, 4, 0)?;
    let training = training(artifacts.path(), train, valid)
        .metric_train_numeric(LearningRateMetric::new())
        .grads_accumulation(2);
    let falling = LinearLrSchedulerConfig::new(1.0, 0.0, 4).init().expect("a schedule");
    let model = NetConfig::new().init::<B>(group.device(), &burn_ddp::nn::SyncGroup::new(&group))?;
    let learner = burn::train::Learner::new(model, burn::optim::SgdConfig::new().init(), falling);
    training.launch_ddp(&DdpStrategy::new(&group), learner)?;
    if !group.rank().is_root() {
        return Ok(String::new());
    }
    let lines = lines(artifacts.path(), "train", 1, "Learning_Rate");
    let rates: Vec<_> = lines.iter().map(|line| line.split(',').next().unwrap_or_default()).collect();
    Ok(rates.join(" "))
}

#[test]
fn the_schedule_follows_optimizer_steps_whatever_the_world_size() {
    for world in [1, 2, 4] {
        let text = Launch::new("schedule", world).succeed().remove(0);
        let rates = read(&text);
        close(&format!("world {world}"), &rates, &[1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25], 1e-9);
    }
}

/// Trains to `until`, from a checkpoint if there is one, in a folder of this rank alone.
fn resumed() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let argument = argument();
    let (until, folder) = argument.split_once(' ').expect("epochs and a folder");
    let (from, until) = until.split_once('-').expect("first and last epoch");
    let (from, until): (usize, usize) = (from.parse().expect("a number"), until.parse().expect("a number"));
    let artifacts = PathBuf::from(folder);
    let (train, valid) = loaders(&group, 16, 5, 0)?;
    let mut training = burn::train::SupervisedTraining::new(&artifacts, train, valid)
        .metrics((burn::train::metric::LossMetric::<burn_flex::Flex>::new(),))
        .renderer(burn_ddp::learner::PlainRenderer::to(std::io::sink()))
        .num_epochs(until)
        .with_file_checkpointer(BinFileRecorder::<FullPrecisionSettings>::new())
        .with_checkpointing_strategy(burn::train::checkpoint::KeepLastNCheckpoints::new(9));
    if from > 1 {
        training = training.checkpoint(from - 1);
    }
    let device = group.device();
    let model = NetConfig::new().with_norm("batch".into());
    let model = model.init::<B>(device, &burn_ddp::nn::SyncGroup::new(&group))?;
    let schedule =
        burn::lr_scheduler::linear::LinearLrSchedulerConfig::new(0.05, 0.01, 20).init().expect("one");
    let learner = burn::train::Learner::new(model, burn::optim::AdamConfig::new().init(), schedule);
    let result = training.launch_ddp(&DdpStrategy::new(&group), learner)?;
    Ok(tell(&numbers(&result.model)))
}

#[test]
fn a_resumed_training_equals_an_uninterrupted_one_though_only_rank_0_has_the_files() {
    let folders = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folders.path().join(format!("{name}-{{rank}}")).display().to_string();
    let whole = Launch::new("resumed", 2).argument(format!("1-3 {}", path("whole"))).succeed();
    Launch::new("resumed", 2).argument(format!("1-2 {}", path("parts"))).succeed();
    let rest = Launch::new("resumed", 2).argument(format!("3-3 {}", path("parts"))).succeed();
    assert_eq!(whole[0], whole[1]);
    for text in &rest {
        close("resumed", &read(text), &read(&whole[0]), 1e-9);
    }
    assert!(files(&folders.path().join("parts-1")).is_empty(), "rank 1 leaves files");
    let parts = folders.path().join("parts-0");
    for epoch in 1..=3 {
        let of = |folder: &Path| lines(folder, "train", epoch, "Loss");
        assert_eq!(of(&parts), of(&folders.path().join("whole-0")), "epoch {epoch}");
    }
}
