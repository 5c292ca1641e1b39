//! Communication during the backward pass: the time from the start of `backward()` to reduced gradients, with overlap
//! and without, and the times of the backward pass alone and of the communication alone.
//!
//! Overlap gains most if communication takes as long as the backward pass: `--balance` chooses the batch so. The four
//! alternate, and ranks pass a barrier before each. The backward pass alone ends with a barrier too, since
//! communication can overlap with the backward pass of the slowest rank. First the reduced gradients, with and without
//! overlap, are compared with the mean of all ranks' own.
//!
//! ```sh
//! cargo bench -p burn-ddp-benches --features overlap --bench overlap
//! sudo benches/netns.sh                  # over a link of 1 Gbit/s
//! ```

use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::module::{AutodiffModule, Module};
use burn::optim::GradientsParams;
use burn_ddp::{DType, Error, MicroStep, Rank, Replica, ReplicaOptions, Result};
use burn_ddp_benches::csv::Measurement;
use burn_ddp_benches::gradients::Parameters;
use burn_ddp_benches::model::{Batch, Shape, Transformer};
use burn_ddp_benches::ranks::{B, Group, Ranks, say};
use burn_ddp_benches::times::Times;
use burn_flex::FlexDevice;
use clap::Parser;

/// From the start of the backward pass to reduced gradients, with overlap and without
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    shape: Shape,
    /// Choose the batch such that the backward pass takes as long as the communication
    #[arg(long)]
    balance: bool,
    /// Largest bucket in bytes [default: the library's]
    #[arg(long)]
    bucket_bytes: Option<usize>,
    /// Times that each is measured
    #[arg(long, default_value_t = 10)]
    iterations: usize,
}

/// A model and its replica, with overlap or without.
struct Training {
    model: Transformer<B>,
    replica: Replica<B>,
}

impl Training {
    fn new(shape: &Shape, group: &Group, bucket: Option<usize>, overlap: bool) -> Result<Self> {
        let options = ReplicaOptions::new().with_overlap(overlap);
        let options = bucket.map_or(options.clone(), |bytes| options.with_bucket_bytes(bytes));
        let (model, replica) = Replica::new(Transformer::new(shape, &FlexDevice), group, options)?;
        Ok(Self { model, replica })
    }

    /// From the start of the backward pass to the end of the reduction.
    fn run(&mut self, group: &Group, batch: &Batch<B>) -> Result<Duration> {
        Ok(self.run_and(group, batch, || Ok(()))?.0)
    }

    /// The same without overlap, and the backward pass of the slowest rank.
    fn run_apart(&mut self, group: &Group, batch: &Batch<B>) -> Result<(Duration, Duration)> {
        self.run_and(group, batch, || group.barrier())
    }

    /// From the start of the backward pass to the end of the reduction, and to that of `between`.
    fn run_and(
        &mut self,
        group: &Group,
        batch: &Batch<B>,
        between: impl FnOnce() -> Result<()>,
    ) -> Result<(Duration, Duration)> {
        let loss = self.model.loss(batch);
        group.barrier()?;
        let start = Instant::now();
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        between()?;
        let backward = start.elapsed();
        self.replica.reduce(&self.model, MicroStep::new(gradients).with_loss(loss))?;
        Ok((start.elapsed(), backward))
    }

    /// The reduction by itself, of gradients that all ranks have.
    fn communicate(&mut self, group: &Group, batch: &Batch<B>) -> Result<Duration> {
        let gradients = GradientsParams::from_grads(self.model.loss(batch).backward(), &self.model);
        group.barrier()?;
        let start = Instant::now();
        self.replica.reduce(&self.model, gradients)?;
        Ok(start.elapsed())
    }

    /// Compares one reduction with the mean of all ranks' own gradients.
    fn verify(&mut self, group: &Group, batch: &Batch<B>) -> Result<Parameters> {
        // A model without a replica: nothing takes its gradients in the backward pass.
        let copy = self.model.valid().train::<B>();
        let mine = GradientsParams::from_grads(copy.loss(batch).backward(), &copy);
        let gradients = GradientsParams::from_grads(self.model.loss(batch).backward(), &self.model);
        let reduced = self.replica.reduce(&self.model, gradients)?.grads;
        let parameters = Parameters::of(&self.model);
        parameters.check_mean::<B>(group, &mine, &reduced)?;
        group.barrier()?;
        Ok(parameters)
    }
}

impl Args {
    fn compare(&self, group: &Group) -> Result<()> {
        let (rank, world) = (group.rank(), group.world_size());
        let mut shape = self.shape;
        let mut without = Training::new(&shape, group, self.bucket_bytes, false)?;
        if self.balance {
            shape.batch = balanced_batch(&shape, group, &mut without)?;
        }
        let batch = Batch::new(&shape, rank.0, &FlexDevice);
        let mut with = Training::new(&shape, group, self.bucket_bytes, true)?;
        let parameters = without.verify(group, &batch)?;
        with.verify(group, &batch)?;

        let [mut backward, mut communication, mut off, mut on] = [const { Vec::new() }; 4];
        for _ in 0..self.iterations.max(1) {
            communication.push(without.communicate(group, &batch)?);
            let (whole, alone) = without.run_apart(group, &batch)?;
            backward.push(alone);
            off.push(whole);
            on.push(with.run(group, &batch)?);
        }
        if !rank.is_root() {
            return Ok(());
        }
        let bytes = parameters.bytes();
        say(format_args!(
            "overlap, {world} processes, {:.1} M parameters, {} x {} tokens on each, verified",
            bytes as f64 / 4e6,
            shape.batch,
            shape.tokens
        ))?;
        let all = [
            ("overlap_backward", "backward alone", backward),
            ("overlap_communication", "communication alone", communication),
            ("overlap_off", "both, overlap off", off),
            ("overlap_on", "both, overlap on", on),
        ]
        .map(|(bench, name, times)| (bench, name, Times::new(times)));
        let larger = all[0].2.median().max(all[1].2.median());
        say(format_args!("{:>20} {:>12} {:>12} {:>12}", "", "median ms", "minimum ms", "of larger"))?;
        for (bench, name, times) in all {
            let (median, minimum) = (times.median() / 1e3, times.minimum() / 1e3);
            say(format_args!("{name:>20} {median:>12.1} {minimum:>12.1} {:>12.3}", times.median() / larger))?;
            let measurement = Measurement { bench, dtype: DType::F32, bytes, world };
            measurement.append(self.ranks.csv.as_deref(), &times)?;
        }
        let sent = with.replica.overlap();
        say(format_args!("buckets of the way with overlap: {sent:?}"))
    }
}

/// The batch whose backward pass takes as long as the communication, the same on all ranks.
fn balanced_batch(shape: &Shape, group: &Group, training: &mut Training) -> Result<usize> {
    let batch = Batch::new(shape, group.rank().0, &FlexDevice);
    let [mut communication, mut backward] = [const { Vec::new() }; 2];
    for iteration in 0..6 {
        let pair = (training.communicate(group, &batch)?, training.run_apart(group, &batch)?.1);
        // The first ones warm up.
        if iteration > 0 {
            communication.push(pair.0);
            backward.push(pair.1);
        }
    }
    let ratio = Times::new(communication).median() / Times::new(backward).median();
    let best = ((shape.batch as f64 * ratio).round() as usize).clamp(1, 64);
    let rank_0 = group.broadcast_bytes(&best.to_le_bytes(), Rank(0))?;
    let batch = rank_0.try_into().map(usize::from_le_bytes);
    batch.map_err(|bytes| Error::config(format!("rank 0 sent no batch size but {bytes:?}")))
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.ranks.run_group("overlap", |_| Ok(Vec::new()), |group| args.compare(group))
}
