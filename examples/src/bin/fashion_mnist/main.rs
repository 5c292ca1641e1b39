//! Burn's MNIST trainer on Fashion-MNIST: alone, or as one of several processes that act as one.
//!
//! ```text
//! cargo run --release --bin fashion_mnist                       # one process, no socket, no thread
//! cargo run --release --bin fashion_mnist -- --nproc 2          # two processes on this machine
//! burnrun --nproc-per-node 2 target/release/fashion_mnist       # the same under a launcher
//! ```
//!
//! The data are Debian's package `dataset-fashion-mnist`, or four files in the directory of `--data`. A micro-step
//! is `--batch-size` items, whatever the number of processes, and an optimizer step `--accumulate` of them; with
//! `--norm none` or `--norm sync` and `--dropout 0` all world sizes train alike but for rounding.
//!
//! On a terminal rank 0 shows Burn's own screen (`q` stops); elsewhere it prints lines.
//!
//! This file has what a user of Burn's Learner writes; `model.rs` and `data.rs` know nothing of processes, but for
//! the normalization.

mod args;
mod artifacts;
mod data;
mod idx;
mod model;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{InferenceStep, Learner, LearningResult, SupervisedTraining};
use burn_ddp::data::DataLoaderBuilder;
use burn_ddp::launch::{self, Launcher};
use burn_ddp::learner::{DdpStrategy, LaunchDdp, PlainRenderer};
use burn_ddp::{Ddp, Error, ErrorKind, ProcessGroup, RankInfo, Result};
use burn_flex::Flex;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::Args;
use data::{BatchLog, ImageBatcher, Images};
use model::Classifier;

/// The one word that a program for one device has to change: it had `Flex` here.
type Inner = Ddp<Flex>;
type Training = Autodiff<Inner>;

/// The whole training run of one rank. Peers are told why if it fails.
fn train(args: &Args, train: Images, test: Images) -> Result<()> {
    let group = ProcessGroup::<Inner>::from_env(&Default::default())?;
    group.finish(train_in(&group, args, train, test))
}

fn train_in(group: &ProcessGroup<Inner>, args: &Args, train: Images, test: Images) -> Result<()> {
    let root = group.rank().is_root();
    let artifacts = args.artifacts();
    agree(args, &train, &test, group)?;
    let _lock = if root { Some(artifacts::prepare(&artifacts, args.resume.is_some())?) } else { None };
    // Nobody makes anything in the directory before it is ready.
    group.barrier()?;

    let device = Default::default();
    Training::seed(&device, args.seed);
    let model = Classifier::<Training>::new(args.norm, args.dropout, group, &device)?;
    if root {
        say(format_args!(
            "{} parameters, {} training and {} test items | {} items a micro-step on {} process(es) x {} micro-step(s) | {}",
            model.num_params(),
            train.len(),
            test.len(),
            args.batch_size,
            group.world_size(),
            args.accumulate,
            artifacts.display()
        ))?;
    }

    let log = args.log_batches.as_ref().map(|_| BatchLog::default());
    let train_loader = DataLoaderBuilder::new(ImageBatcher { log: log.clone() }, group)
        .batch_size(args.batch_size)
        .shuffle(args.seed)
        .num_workers(args.workers)
        .build(train)?;
    let valid_loader = DataLoaderBuilder::new(ImageBatcher::default(), group)
        .batch_size(args.batch_size)
        .num_workers(args.workers)
        .build(test.clone())?;

    let mut training = SupervisedTraining::new(&artifacts, train_loader, valid_loader)
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .grads_accumulation(args.accumulate)
        .num_epochs(args.epochs)
        .summary();
    if let Some(epoch) = args.resume {
        training = training.checkpoint(epoch);
    }
    // On a terminal Burn draws by itself.
    if !std::io::stdout().is_terminal() {
        training = training.renderer(PlainRenderer::new());
    }
    let ddp = DdpStrategy::new(group).with_seed(args.seed);
    let learner = Learner::new(model, AdamWConfig::new().init(), args.lr);
    let interrupter = training.interrupter();
    let LearningResult { model, renderer } = training.launch_ddp(&ddp, learner)?;
    // Gives the terminal back.
    drop(renderer);

    if let (Some(log), Some(file)) = (log, &args.log_batches) {
        log.write(file, group.rank().0)?;
    }
    if let Some(reason) = interrupter.get_message() {
        return stopped(&reason, root);
    }
    let tested = evaluate(&model, &test, args.batch_size, group)?;
    if root {
        let Tested { right, items, loss } = tested;
        let (percent, loss) = (100.0 * right as f64 / items as f64, loss / items as f64);
        say(format_args!("test accuracy {percent:.2} % ({right} of {items}), loss {loss:.6}"))?;
    }
    Ok(())
}

/// A training that was broken off is not tested, and one that a signal ended does not look like a success.
fn stopped(reason: &str, root: bool) -> Result<()> {
    if root {
        say(format_args!("stopped before the end: {reason}"))?;
    }
    match reason.split(' ').next() {
        Some("SIGINT") => Err(Error::new(ErrorKind::Exit(130), "stopped by SIGINT")),
        Some("SIGTERM") => Err(Error::new(ErrorKind::Exit(143), "stopped by SIGTERM")),
        _ => Ok(()),
    }
}

/// Ranks that were started by hand may have been given different arguments: they would train, but not as one.
fn agree(args: &Args, train: &Images, test: &Images, group: &ProcessGroup<Inner>) -> Result<()> {
    let mine = format!("{} on {} and {} items", args.essence(), train.len(), test.len());
    let all = group.all_gather_bytes(mine.into_bytes())?;
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]);
    match (1..all.len()).find(|rank| all[*rank] != all[0]) {
        None => Ok(()),
        Some(rank) => {
            Err(Error::config(format!("rank 0 was given {}, but rank {rank} {}", text(0), text(rank))))
        }
    }
}

/// What a model makes of the test items.
#[derive(Default)]
struct Tested {
    right: u64,
    items: u64,
    /// Sum over the items.
    loss: f64,
}

/// Tests on all items, each rank on its stretch of them: a count that does not come out of the metrics.
fn evaluate(
    model: &Classifier<Inner>,
    test: &Images,
    batch_size: usize,
    group: &ProcessGroup<Inner>,
) -> Result<Tested> {
    let (rank, world_size) = (group.rank().0, group.world_size());
    let own: Vec<usize> = (rank * test.len() / world_size..(rank + 1) * test.len() / world_size).collect();
    let mut mine = Tested::default();
    for ids in own.chunks(batch_size) {
        let items = ids.iter().filter_map(|id| test.get(*id)).collect();
        let output = model.step(ImageBatcher::default().batch(items, &Default::default()));
        let classes = output.output.argmax(1).squeeze_dim::<1>(1);
        let right: Tensor<Inner, 1, _> = classes.equal(output.targets).int().sum();
        mine.right += right.into_scalar().elem::<u64>();
        mine.items += ids.len() as u64;
        mine.loss += output.loss.into_scalar().elem::<f64>() * ids.len() as f64;
    }
    let words = [mine.right.to_le_bytes(), mine.items.to_le_bytes(), mine.loss.to_le_bytes()];
    let mut total = Tested::default();
    for bytes in group.all_gather_bytes(words.concat())? {
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().unwrap_or_default());
        let mut next = || words.next().unwrap_or_default();
        total.right += u64::from_le_bytes(next());
        total.items += u64::from_le_bytes(next());
        total.loss += f64::from_le_bytes(next());
    }
    Ok(total)
}

/// Prints a line; a reader that has gone is an error like any other.
fn say(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| Error::io("cannot write to standard output", error))
}

fn run(args: &Args) -> Result<()> {
    let rank = RankInfo::from_env()?;
    let launched = rank.master.is_some();
    args.check()?;
    if rank.rank.is_root() {
        args.check_artifacts()?;
    }
    match args.nproc {
        Some(nproc) if !launched => {
            // What is wrong with the data is said once, before anything is started.
            data::read(&args.data, args.limit)?;
            // All ranks stop at the same step, which may be long, and then say what they have.
            let grace = Duration::from_secs(30);
            Launcher::new(nproc).args(std::env::args_os().skip(1)).signal_grace(grace).run()
        }
        Some(nproc) if nproc != rank.world_size => Err(Error::config(format!(
            "--nproc {nproc} under a launcher of {} processes: leave --nproc out",
            rank.world_size
        ))),
        _ => {
            let (training, test) = data::read(&args.data, args.limit)?;
            train(args, training, test)
        }
    }
}

/// Rank 0's log goes to experiment.log, which Burn installs; the others have standard error.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

fn main() -> ExitCode {
    let args = Args::parse();
    let root = RankInfo::from_env().is_ok_and(|info| info.rank.is_root());
    let launcher = args.nproc.is_some() && !launch::is_child();
    if launcher || !root {
        log_to_stderr();
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without standard error there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "fashion_mnist: {error}");
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
        }
    }
}
