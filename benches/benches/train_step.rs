//! A training step of a transformer of 30 million parameters on 1 to N ranks, with gradient synchronization on and off.
//!
//! Off is PyTorch's `no_sync` with an optimizer step: every rank trains alone. Steps of both kinds take turns. A step
//! lasts from the moment when all ranks are ready until all are done, on or off, so that the difference is the
//! reduction and not the wait for the slowest rank. The results are the median of each kind and of the differences
//! between neighbours. Before that, each gradient is compared with the mean of all ranks' own, and the parameters of
//! all ranks are compared by hash.
//!
//! The peak of memory (VmHWM) of all ranks is read before the verification and compared with that of a process that
//! trains alone, without ranks: the same program, shape and number of steps.
//!
//! Tensors of some MiB that are allocated in every step cause page faults, which cost more than anything else measured
//! here, and unevenly, so let the allocator keep memory:
//!
//! ```sh
//! export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
//! RAYON_NUM_THREADS=1 cargo bench -p burn-ddp-benches --bench train_step -- --nproc 1,2
//! ```

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use burn::module::{AutodiffModule, Module};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, Sgd, SgdConfig};
use burn_ddp::{DType, Ddp, Error, MicroStep, Replica, ReplicaOptions, Result};
use burn_ddp_benches::csv::Measurement;
use burn_ddp_benches::gradients::Parameters;
use burn_ddp_benches::memory;
use burn_ddp_benches::model::{Batch, Shape, Transformer};
use burn_ddp_benches::ranks::{B, Group, Ranks, exit_code, say};
use burn_ddp_benches::times::Times;
use burn_flex::{Flex, FlexDevice};
use clap::Parser;

type Model = Transformer<B>;

/// A training step on 1 to N ranks, gradient synchronization on against off
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    shape: Shape,
    /// Steps with synchronization that are timed, and as many without
    #[arg(long, default_value_t = 24)]
    steps: usize,
    /// Train alone and print the peak of memory
    #[arg(long, hide = true)]
    alone: bool,
    /// That peak in bytes
    #[arg(long, hide = true)]
    peak_alone: Option<usize>,
}

/// Default of `ReplicaOptions::bucket_bytes` for all buckets but the first.
const BUCKET_BYTES: usize = 25 << 20;

/// Steps before times are taken.
const WARM_UP: usize = 3;

struct Training {
    /// The optimizer consumes it and gives it back.
    model: Option<Model>,
    optimizer: OptimizerAdaptor<Sgd<Ddp<Flex>>, Model, B>,
    batch: Batch<B>,
}

impl Training {
    fn new(model: Model, shape: &Shape, rank: usize) -> Self {
        let batch = Batch::new(shape, rank, &FlexDevice);
        Self { model: Some(model), optimizer: SgdConfig::new().init(), batch }
    }

    fn model(&self) -> Result<&Model> {
        self.model.as_ref().ok_or_else(|| Error::config("an earlier step failed: there is no model"))
    }

    /// The gradients of this rank's batch.
    fn gradients(&self) -> Result<GradientsParams> {
        let model = self.model()?;
        Ok(GradientsParams::from_grads(model.loss(&self.batch).backward(), model))
    }

    /// One step; the gradients go through `replica`, if there is one.
    fn step(&mut self, replica: Option<&mut Replica<B>>) -> Result<()> {
        let Some(model) = self.model.take() else {
            return Err(Error::config("an earlier step failed: there is no model"));
        };
        let loss = model.loss(&self.batch);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = match replica {
            Some(replica) => replica.reduce(&model, MicroStep::new(gradients).with_loss(loss))?.grads,
            None => gradients,
        };
        self.model = Some(self.optimizer.step(1e-3, model, gradients));
        Ok(())
    }
}

impl Args {
    /// Trains without ranks and prints the peak of memory.
    fn alone(&self) -> Result<()> {
        let mut training = Training::new(Model::new(&self.shape, &FlexDevice), &self.shape, 0);
        (0..WARM_UP + self.steps).try_for_each(|_| training.step(None))?;
        say(format_args!("{}", memory::peak()?))
    }

    /// The peak of a process that trains alone with as many threads as one of `nproc` ranks has.
    fn peak_alone(&self, nproc: usize) -> Result<Vec<String>> {
        let failed = |error| Error::io("cannot run this program again to train alone", error);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = std::env::var("RAYON_NUM_THREADS").unwrap_or((cores / nproc.max(1)).max(1).to_string());
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(std::env::args().skip(1)).arg("--alone").env("RAYON_NUM_THREADS", threads);
        let output = command.output().map_err(failed)?;
        match String::from_utf8_lossy(&output.stdout).trim().parse::<usize>() {
            Ok(peak) => Ok(vec![format!("--peak-alone={peak}")]),
            Err(_) => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(Error::config(format!("training alone ended with {}: {said}", output.status)))
            }
        }
    }

    fn train(&self, group: &Group) -> Result<()> {
        let rank = group.rank();
        let (model, mut replica) =
            Replica::<B>::new(Model::new(&self.shape, &FlexDevice), group, ReplicaOptions::new())?;
        let mut training = Training::new(model, &self.shape, rank.0);
        (0..WARM_UP + self.steps).try_for_each(|_| training.step(Some(&mut replica)))?;
        let peaks = group.all_gather_bytes(memory::peak()?.to_le_bytes().to_vec())?;
        let mut alone = Training::new(copy(training.model()?), &self.shape, rank.0);
        let bytes = verify(&training, &alone, &mut replica)?;

        let (mut off, mut on) = (Vec::new(), Vec::new());
        for iteration in 0..WARM_UP + self.steps.max(1) {
            let without = timed(group, || alone.step(None))?;
            let with = timed(group, || training.step(Some(&mut replica)))?;
            if iteration >= WARM_UP {
                off.push(without);
                on.push(with);
            }
        }
        if !rank.is_root() {
            return Ok(());
        }
        self.report(group.world_size(), bytes, &off, &on)?;
        let peaks = peaks.into_iter().filter_map(|peak| Some(usize::from_le_bytes(peak.try_into().ok()?)));
        self.report_memory(bytes, peaks.max())
    }

    fn report(&self, world: usize, bytes: usize, off: &[Duration], on: &[Duration]) -> Result<()> {
        let shape = &self.shape;
        say(format_args!(
            "train_step, {world} process(es), {:.1} M parameters, {} x {} tokens on each, verified",
            bytes as f64 / 4e6,
            shape.batch,
            shape.tokens
        ))?;
        // Drift of the machine is in both steps of a pair.
        let added = Times::of_differences(on, off);
        let (off, on) = (Times::new(off.iter().copied()), Times::new(on.iter().copied()));
        let [a, b, c, d] = ["off ms", "on ms", "added ms", "on / off"];
        say(format_args!("{a:>10} {b:>10} {c:>10} {d:>10}"))?;
        say(format_args!(
            "{:>10.2} {:>10.2} {:>10.2} {:>10.3}",
            off.median() / 1e3,
            on.median() / 1e3,
            added.median() / 1e3,
            on.median() / off.median()
        ))?;
        for (bench, times) in [("step_off", off), ("step_on", on), ("step_added", added)] {
            Measurement { bench, dtype: DType::F32, bytes, world }
                .append(self.ranks.csv.as_deref(), &times)?;
        }
        Ok(())
    }

    fn report_memory(&self, bytes: usize, peak: Option<usize>) -> Result<()> {
        let (Some(alone), Some(peak)) = (self.peak_alone, peak) else { return Ok(()) };
        let limit = 2.0 * BUCKET_BYTES as f64 + 0.05 * bytes as f64;
        let [alone, peak, limit] = [alone as f64, peak as f64, limit].map(|bytes| bytes / 1e6);
        say(format_args!(
            "peak of memory {peak:.1} MB, alone {alone:.1} MB, rise {:.1} MB; two buckets and 5 % of the parameters \
             are {limit:.1} MB",
            peak - alone
        ))
    }
}

/// The time of `step` on all ranks.
fn timed(group: &Group, step: impl FnOnce() -> Result<()>) -> Result<Duration> {
    group.barrier()?;
    let start = Instant::now();
    step()?;
    group.barrier()?;
    Ok(start.elapsed())
}

/// A copy of `model`, ids included, without a replica: nothing takes its gradients in a backward pass.
fn copy(model: &Model) -> Model {
    model.valid().train::<B>()
}

/// Compares all parameters and one reduction between the ranks, and returns the bytes of the parameters. `alone` has
/// the same model and batch as `training`.
fn verify(training: &Training, alone: &Training, replica: &mut Replica<B>) -> Result<usize> {
    let group = replica.group().clone();
    replica.verify(training.model()?)?;
    let reduced = replica.reduce(training.model()?, training.gradients()?)?.grads;
    let parameters = Parameters::of(training.model()?);
    parameters.check_mean::<B>(&group, &alone.gradients()?, &reduced)?;
    // A rank with a wrong element does not reach this call, and then no rank continues.
    group.barrier()?;
    Ok(parameters.bytes())
}

fn main() -> ExitCode {
    let args = Args::parse();
    if !args.alone {
        return args.ranks.run_group("train_step", |nproc| args.peak_alone(nproc), |group| args.train(group));
    }
    exit_code("train_step", args.alone())
}
