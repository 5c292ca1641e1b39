//! A failure of one rank's own code stops all ranks, and every error names the cause and the rank.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::record::{BinFileRecorder, FullPrecisionSettings};
use burn::tensor::backend::Backend;
use burn::train::metric::{Metric, MetricMetadata, MetricName, SerializedEntry};
use burn_ddp::data::{self, DataLoaderBuilder};
use burn_ddp::learner::{DdpStrategy, LaunchDdp};
use burn_ddp::{ProcessGroup, ReplicaOptions, Reproducibility, Result};

use crate::harness::{Case, Launch, Outcome, argument};
use crate::setup::*;

pub const CASES: &[(&str, Case)] =
    &[("broken", broken), ("foreign", foreign), ("unlike", unlike), ("no checkpoint", no_checkpoint)];

/// Panics at the place that the argument names.
#[derive(Clone)]
struct Broken {
    what: String,
    is_one: bool,
}

impl<B: Backend> Batcher<B, usize, Batch<B>> for Broken {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        assert!(!(self.what == "batcher" && self.is_one && items.contains(&14)), "bad row 14");
        let mut batch: Batch<B> = Batches.batch(items, device);
        if self.what == "step" && self.is_one && batch.ids.contains(&14) {
            // The forward pass cannot take it.
            let count = batch.ids.len();
            batch.features = batch.features.slice([0..count, 0..2]);
        }
        batch
    }
}

struct Short(String, bool);

impl Dataset<usize> for Short {
    fn get(&self, index: usize) -> Option<usize> {
        (index < 40 && !(self.0 == "data" && self.1 && index == 14)).then_some(index)
    }

    fn len(&self) -> usize {
        40
    }
}

#[derive(Clone)]
struct BrokenMetric;

impl Metric for BrokenMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Broken".into())
    }

    fn update(&mut self, _: &(), metadata: &MetricMetadata) -> SerializedEntry {
        assert!(metadata.iteration < Some(3), "metric has seen enough");
        SerializedEntry::new(String::new(), String::new())
    }

    fn clear(&mut self) {}
}

fn broken() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let argument = argument();
    let (what, workers) = argument.split_once(' ').expect("what and workers");
    let is_one = group.rank().0 == 1;
    let (_, valid) = loaders(&group, 10, 5, 0)?;
    let train = DataLoaderBuilder::new(Broken { what: what.into(), is_one }, &group)
        .batch_size(4)
        .num_workers(workers.parse().expect("a number"))
        .build(Short(what.into(), is_one))?;
    let mut training = training(artifacts.path(), train, valid).num_epochs(2);
    if what == "metric" {
        training = training.metric_train(BrokenMetric);
    }
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

/// Checks that every rank failed soon, that `rank`'s error contains `words`, and that the others' contain them and its
/// name.
fn all_failed(start: Instant, outcomes: &[Outcome], rank: usize, words: &[&str]) {
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let name = format!("rank {rank}");
    for outcome in outcomes {
        let last = outcome.stderr.lines().last().unwrap_or_default();
        for word in words.iter().chain([&name.as_str()]) {
            assert!(last.contains(word), "`{word}` is not in the last line of: {}", outcome.stderr);
        }
        assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
    }
}

#[test]
fn a_panic_of_the_users_code_stops_all_ranks_with_its_text() {
    for (what, rank, words) in [
        ("batcher", 1, &["bad row 14", "panicked"][..]),
        ("data", 1, &["14", "None"]),
        ("step", 1, &["training step", "panicked"]),
        ("metric", 0, &["metric has seen enough", "failures.rs"]),
    ] {
        for workers in [0, 2] {
            let start = Instant::now();
            let outcomes = Launch::new("broken", 3).argument(format!("{what} {workers}")).run();
            all_failed(start, &outcomes, rank, words);
        }
    }
}

#[cfg(feature = "launcher")]
#[test]
fn the_launchers_last_lines_hold_the_cause_and_the_rank() {
    for (what, rank, words) in
        [("step", 1, "training step"), ("batcher", 1, "bad row 14"), ("metric", 0, "metric has seen enough")]
    {
        let start = Instant::now();
        let (code, text) = Launch::new("broken", 2).argument(format!("{what} 0")).under_burnrun();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(code, Some(1), "{text}");
        let lines: Vec<_> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(12)..].join("\n");
        assert!(last.contains(words) && last.contains(&format!("rank {rank}")), "{text}");
    }
}

#[test]
fn an_error_of_the_training_thread_is_one_line() {
    let outcomes = Launch::new("broken", 2).argument("step 0").run();
    let lines: Vec<_> = outcomes[1].stderr.lines().filter(|line| !line.is_empty()).collect();
    assert!(lines.len() == 1 && lines[0].starts_with("error: the training step of rank 1"), "{lines:?}");
}

/// Trains with loaders that are not sharded, wrapped or not.
fn foreign() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let train: Loader<B> = PlainBuilder::new(Batches).batch_size(2).shuffle(3).build(Items(11));
    let valid: Loader<G> = PlainBuilder::new(Batches).batch_size(2).build(Items(11));
    let (train, valid) = match argument().as_str() {
        "wrapped" => (data::stride(train, &group), data::slice(valid, &group)),
        "half" => (data::stride(train, &group), valid),
        _ => (train, valid),
    };
    training(artifacts.path(), train, valid)
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    if !group.rank().is_root() {
        return Ok(String::new());
    }
    let counts = lines(artifacts.path(), "valid", 1, "Accuracy");
    Ok(counts.iter().map(|line| line.split(',').nth(1).unwrap_or_default()).collect::<Vec<_>>().join(" "))
}

#[test]
fn a_loader_that_is_not_sharded_is_refused_and_a_wrapped_one_is_not() {
    for (argument, what) in [("", "training"), ("half", "validation")] {
        for outcome in Launch::new("foreign", 2).argument(argument).run() {
            outcome.failed_saying(&[what, "slice", "stride", "local", "DataLoaderBuilder"]);
            assert_eq!(outcome.status.code(), Some(2));
        }
    }
    let counts = Launch::new("foreign", 2).argument("wrapped").succeed().remove(0);
    assert_eq!(read(&counts).iter().sum::<f64>(), 11.0, "{counts}");
    Launch::new("foreign", 1).succeed();
}

/// Trains with options that differ between ranks.
fn unlike() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let rank = group.rank().0;
    let (items, epochs, seed) = match argument().as_str() {
        "items" => (10 + rank, 1, 0),
        "epochs" => (10, 1 + rank, 0),
        "seed" => (10, 1, rank as u64),
        _ => (10, 1, 0),
    };
    let (train, valid) = loaders(&group, items, 5, 0)?;
    let mut replica = ReplicaOptions::new();
    if argument() == "bits" {
        replica = replica.with_reproducibility(Reproducibility::AnyWorldSize { seed: 0 });
    }
    training(artifacts.path(), train, valid).num_epochs(epochs).launch_ddp(
        &DdpStrategy::new(&group).with_seed(seed).with_replica(replica),
        learner(&group, &NetConfig::new())?,
    )?;
    Ok(String::new())
}

#[test]
fn ranks_that_train_differently_are_told_how() {
    for (argument, words) in [
        ("items", ["10", "11", "rank 1"]),
        ("epochs", ["1 epochs", "2 epochs", "rank 1"]),
        ("seed", ["seed: 0", "seed: 1", "rank 1"]),
    ] {
        for outcome in Launch::new("unlike", 2).argument(argument).run() {
            outcome.failed_saying(&words);
        }
    }
}

#[test]
fn bits_that_do_not_depend_on_the_world_size_are_not_promised() {
    for world_size in [1, 2] {
        for outcome in Launch::new("unlike", world_size).argument("bits").run() {
            outcome.failed_saying(&["AnyWorldSize with a Learner", "a loop of your own"]);
            assert_eq!(outcome.status.code(), Some(2));
        }
    }
}

/// Resumes from a checkpoint that is not there, or saves where nothing can be written.
fn no_checkpoint() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = PathBuf::from(argument());
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let mut training = training(&artifacts, train, valid)
        .num_epochs(4)
        .with_file_checkpointer(BinFileRecorder::<FullPrecisionSettings>::new());
    if artifacts.ends_with("missing") {
        training = training.checkpoint(3);
    } else {
        // A file where the folder of checkpoints was.
        let folder = artifacts.join("checkpoint");
        if group.rank().is_root() {
            std::fs::remove_dir(&folder).and_then(|()| std::fs::write(&folder, "")).expect("a file");
        }
    }
    training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok(String::new())
}

#[test]
fn checkpoints_that_cannot_be_read_or_written_are_errors_on_all_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, words) in [
        ("missing", ["loading checkpoint 3", "No such file"]),
        ("unwritable", ["a checkpoint could not be saved", "Not a directory"]),
    ] {
        let start = Instant::now();
        // Each rank has a folder of its own, so that no other rank creates it again.
        let path = folder.path().join("{rank}").join(name);
        let outcomes = Launch::new("no checkpoint", 2).argument(path.display()).run();
        all_failed(start, &outcomes, 0, &words);
    }
}
