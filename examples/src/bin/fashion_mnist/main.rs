//! Burn's MNIST trainer on Fashion-MNIST: alone, or as one of several processes that act as one.
//!
//! ```text
//! cargo run --release --bin fashion_mnist                       # one process, no socket, no thread
//! cargo run --release --bin fashion_mnist -- --nproc 2          # two processes on this machine
//! burnrun --nproc-per-node 2 target/release/fashion_mnist       # the same under a launcher
//! cargo run --release --features cuda --bin fashion_mnist -- --backend cuda --nproc 2    # the same on two GPUs
//! ```
//!
//! The data are Debian's package `dataset-fashion-mnist`, or four files in the directory of `--data`. A micro-step
//! is `--batch-size` items, whatever the number of processes, and an optimizer step `--accumulate` of them; with
//! `--norm none` or `--norm sync` and `--dropout 0` all world sizes train alike but for rounding.
//!
//! On a terminal rank 0 shows Burn's own screen (`q` stops); elsewhere it prints lines.
//!
//! This file has what a user of Burn's Learner writes; `model.rs` and `data.rs` do not depend on processes, except for
//! the normalization.

mod args;
mod artifacts;
mod data;
mod idx;
mod model;

use std::io::IsTerminal;
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
use burn::train::{InferenceStep, Interrupter, Learner, LearningResult, SupervisedTraining};
use burn_ddp::data::DataLoaderBuilder;
use burn_ddp::launch;
use burn_ddp::learner::{DdpStrategy, LaunchDdp, PlainRenderer};
use burn_ddp::{Ddp, Error, ErrorKind, ProcessGroup, RankInfo, Result};
use burn_ddp_examples::{
    Program, Role, Trains, agree_on_arguments, exit_code, launcher, log_to_stderr, role, say,
};
use clap::Parser;

use args::Args;
use data::{BatchLog, ImageBatcher, Images, Item};
use model::Classifier;

/// The training run of one rank.
struct Trainer<'a> {
    args: &'a Args,
    training: Images,
    test: Images,
}

impl Program for Trainer<'_> {
    fn train<B: Trains>(self, group: &ProcessGroup<Ddp<B>>) -> Result<()> {
        train(group, self.args, self.training, self.test)
    }
}

/// Trains and tests as one rank of `group`. `Autodiff<Ddp<B>>` is the one type that a program for one device has to
/// change: it had `Autodiff<B>`.
fn train<B: Backend>(
    group: &ProcessGroup<Ddp<B>>,
    args: &Args,
    training: Images,
    test: Images,
) -> Result<()> {
    let root = group.rank().is_root();
    let artifacts = args.artifacts();
    agree_on_arguments(group, &args.of_training(), &format!("{} and {} items", training.len(), test.len()))?;
    let _lock = if root { Some(artifacts::prepare(&artifacts, args.resume.is_some())?) } else { None };
    // No rank writes into the directory before it is ready.
    group.barrier()?;

    Autodiff::<Ddp<B>>::seed(group.device(), args.seed);
    let model = Classifier::<Autodiff<Ddp<B>>>::new(args.norm, args.dropout, group, group.device())?;
    if root {
        say_setup(&model, group, args, training.len(), test.len())?;
    }
    let log = args.log_batches.as_ref().map(|_| BatchLog::default());
    let (model, interrupter) = fit(group, args, model, training, &test, log.clone())?;
    if let (Some(log), Some(file)) = (log, &args.log_batches) {
        log.write(file, group.rank().0)?;
    }
    if let Some(reason) = interrupter.get_message() {
        return stopped(&reason, root);
    }
    let Tested { right, items, loss } = evaluate(&model, &test, args.batch_size, group)?;
    if root {
        let (percent, loss) = (100.0 * right as f64 / items as f64, loss / items as f64);
        say(format_args!("test accuracy {percent:.2} % ({right} of {items}), loss {loss:.6}"))?;
    }
    Ok(())
}

/// Prints backend, model and data.
fn say_setup<B: Backend>(
    model: &Classifier<Autodiff<Ddp<B>>>,
    group: &ProcessGroup<Ddp<B>>,
    args: &Args,
    training: usize,
    test: usize,
) -> Result<()> {
    let device = group.device();
    say(format_args!(
        "{} on {device:?} | {} parameters, {training} training and {test} test items | {} items a micro-step on {} \
         process(es) x {} micro-step(s) | {}",
        B::name(device),
        model.num_params(),
        args.batch_size,
        group.world_size(),
        args.accumulate,
        args.artifacts().display()
    ))
}

/// Trains `model` by Burn's Learner; returns the trained model, and the interrupter, which has a message if the
/// training was stopped.
fn fit<B: Backend>(
    group: &ProcessGroup<Ddp<B>>,
    args: &Args,
    model: Classifier<Autodiff<Ddp<B>>>,
    training: Images,
    test: &Images,
    log: Option<BatchLog>,
) -> Result<(Classifier<Ddp<B>>, Interrupter)> {
    let train_loader = loader(group, ImageBatcher { log }, args).shuffle(args.seed).build(training)?;
    let valid_loader = loader(group, ImageBatcher::default(), args).build(test.clone())?;
    let mut training = SupervisedTraining::new(args.artifacts(), train_loader, valid_loader)
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
        .grads_accumulation(args.accumulate)
        .num_epochs(args.epochs)
        .summary();
    if let Some(epoch) = args.resume {
        training = training.checkpoint(epoch);
    }
    // On a terminal Burn shows its own screen.
    if !std::io::stdout().is_terminal() {
        training = training.renderer(PlainRenderer::new());
    }
    let ddp = DdpStrategy::new(group).with_seed(args.seed);
    let learner = Learner::new(model, AdamWConfig::new().init(), args.lr);
    let interrupter = training.interrupter();
    let LearningResult { model, renderer } = training.launch_ddp(&ddp, learner)?;
    // Restores the terminal.
    drop(renderer);
    Ok((model, interrupter))
}

/// A loader of this rank's share of every micro-step. Its batches are made on the device of the group, which the
/// builder hands to the batcher.
fn loader<B: Backend, G: Backend<Device = B::Device>, O: Send + 'static>(
    group: &ProcessGroup<G>,
    batcher: impl Batcher<B, Item, O> + 'static,
    args: &Args,
) -> DataLoaderBuilder<B, Item, O> {
    DataLoaderBuilder::new(batcher, group).batch_size(args.batch_size).num_workers(args.workers)
}

/// Reports a training that was stopped: it is not tested, and after a signal it is an error.
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

/// The result of a test.
#[derive(Default)]
struct Tested {
    right: u64,
    items: u64,
    /// Sum over the items.
    loss: f64,
}

/// Tests on all items, each rank on its share of them, independently of the metrics.
fn evaluate<B: Backend>(
    model: &Classifier<B>,
    test: &Images,
    batch_size: usize,
    group: &ProcessGroup<B>,
) -> Result<Tested> {
    let (rank, world_size) = (group.rank().0, group.world_size());
    let own: Vec<usize> = (rank * test.len() / world_size..(rank + 1) * test.len() / world_size).collect();
    let mut mine = Tested::default();
    for ids in own.chunks(batch_size) {
        let items = ids.iter().filter_map(|id| test.get(*id)).collect();
        let output = model.step(ImageBatcher::default().batch(items, group.device()));
        let classes = output.output.argmax(1).squeeze_dim::<1>(1);
        let right: Tensor<B, 1, _> = classes.equal(output.targets).int().sum();
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

fn run(args: &Args) -> Result<()> {
    let role = role(args.processes.nproc)?;
    args.check()?;
    if !matches!(&role, Role::Rank(info) if !info.rank.is_root()) {
        args.check_artifacts()?;
    }
    let read = || data::read(&args.data, args.limit);
    match role {
        Role::Launcher(nproc) => {
            // Errors in the data are reported once, before a process is started.
            read()?;
            // All ranks stop after the same step, which may be long, and then report.
            launcher(nproc).signal_grace(Duration::from_secs(30)).run()
        }
        Role::Rank(_) => {
            let (training, test) = read()?;
            args.processes.backend.run(Trainer { args, training, test })
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let root = RankInfo::from_env().is_ok_and(|info| info.rank.is_root());
    let starts_others = args.processes.nproc.is_some() && !launch::is_child();
    // Burn sends rank 0's log to experiment.log; the others write to standard error.
    if starts_others || !root {
        log_to_stderr();
    }
    exit_code("fashion_mnist", run(&args))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use burn::data::dataloader::DataLoader;
    use burn_dispatch::{Dispatch, DispatchDevice};

    use super::*;

    type Inner = Ddp<Dispatch>;

    /// Not the default, which is Flex; a tensor of one cannot be combined with one of the other.
    fn other_device() -> DispatchDevice {
        let device = DispatchDevice::NdArray(Default::default());
        assert_ne!(device, DispatchDevice::default());
        device
    }

    fn args(more: &str) -> Args {
        Args::parse_from(format!("fashion_mnist --limit 96 --batch-size 32 {more}").split(' '))
    }

    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<DispatchDevice>>>);

    impl<B: Backend<Device = DispatchDevice>> Batcher<B, Item, ()> for Recorder {
        fn batch(&self, _: Vec<Item>, device: &DispatchDevice) {
            self.0.lock().unwrap().push(device.clone());
        }
    }

    #[test]
    fn batches_are_made_on_the_device_of_the_rank() {
        let group = ProcessGroup::<Inner>::solo(&other_device());
        for workers in [0, 2] {
            let (args, recorder) = (args(&format!("--workers {workers}")), Recorder::default());
            let training: Arc<dyn DataLoader<Autodiff<Inner>, ()>> =
                loader(&group, recorder.clone(), &args).build(Images::plain(96)).unwrap();
            let validation: Arc<dyn DataLoader<Inner, ()>> =
                loader(&group, recorder.clone(), &args).build(Images::plain(16)).unwrap();
            assert_eq!((training.iter().count(), validation.iter().count()), (3, 1));
            assert_eq!(*recorder.0.lock().unwrap(), vec![other_device(); 4]);
        }
    }

    #[test]
    fn everything_is_on_the_device_of_the_rank() {
        let folder = tempfile::tempdir().unwrap();
        let group = ProcessGroup::<Inner>::solo(&other_device());
        let args = args(&format!("--epochs 1 --artifacts {}", folder.path().display()));
        train(&group, &args, Images::plain(96), Images::plain(16)).unwrap();
    }
}
