//! The gradients of a model of 30 million parameters through `Replica::reduce`: one bucket per parameter against the
//! default plan.
//!
//! The gradients are whole numbers of a known sum; each rank compares every element of the mean before and after times
//! are taken. In between the result of a reduction is the input of the next. Ranks pass a barrier before each, and the
//! time is rank 0's.
//!
//! ```sh
//! cargo bench -p burn-ddp-benches --bench reducer -- --nproc 1,2,4
//! ```

use std::process::ExitCode;
use std::time::Instant;

use burn_ddp::{DType, Error, Replica, ReplicaOptions, Result};
use burn_ddp_benches::csv::Measurement;
use burn_ddp_benches::gradients::Parameters;
use burn_ddp_benches::model::{Shape, Transformer};
use burn_ddp_benches::ranks::{B, Group, Ranks, say};
use burn_ddp_benches::times::Times;
use burn_flex::FlexDevice;
use clap::Parser;

/// A model's gradients through the reducer: one bucket per parameter against the default plan
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    shape: Shape,
    /// Reductions that are timed
    #[arg(long, default_value_t = 20)]
    iterations: usize,
}

/// Element of a gradient on rank 0; rank `r` has `r + 1` times as much, so the mean is `(N + 1) / 2` times as much.
fn value(parameter: usize, element: usize) -> f32 {
    ((parameter * 7 + element * 13) % 61 + 1) as f32
}

impl Args {
    fn both(&self, group: &Group) -> Result<()> {
        let plans = [
            ("reduce_each", "one per parameter", ReplicaOptions::new().with_bucket_bytes(1)),
            ("reduce", "default", ReplicaOptions::new()),
        ];
        if group.rank().is_root() {
            let columns = ["buckets", "number", "MB", "median ms", "minimum ms", "bus GB/s"];
            let [plan, number, megabytes, median, minimum, bus] = columns;
            say(format_args!("reducer, {} process(es), verified", group.world_size()))?;
            say(format_args!("{plan:>18} {number:>7} {megabytes:>8} {median:>11} {minimum:>11} {bus:>9}"))?;
        }
        plans.into_iter().try_for_each(|(bench, plan, options)| self.measure(group, bench, plan, options))
    }

    fn measure(&self, group: &Group, bench: &'static str, plan: &str, options: ReplicaOptions) -> Result<()> {
        let (rank, world) = (group.rank(), group.world_size());
        let (model, mut replica) =
            Replica::<B>::new(Transformer::new(&self.shape, &FlexDevice), group, options)?;
        let parameters = Parameters::of(&model);
        let own = || parameters.gradients::<B>(&FlexDevice, |p, e| value(p, e) * (rank.0 + 1) as f32);
        let verify = |replica: &mut Replica<B>| {
            let reduced = replica.reduce(&model, own())?.grads;
            let checked = parameters.check::<B>(&reduced, |p, e| value(p, e) * (world + 1) as f32 / 2.0);
            checked
                .map_err(|error| Error::new(error.kind(), format!("reduced wrongly on {rank}: {error}")))?;
            // A rank with a wrong element does not reach this call, and then no rank continues.
            group.barrier()?;
            Ok::<_, Error>(reduced)
        };
        let mut gradients = verify(&mut replica)?;
        let mut times = Vec::with_capacity(self.iterations);
        for iteration in 0..self.iterations.max(1) + 2 {
            group.barrier()?;
            let start = Instant::now();
            gradients = replica.reduce(&model, gradients)?.grads;
            // The first two warm up.
            times.extend((iteration >= 2).then(|| start.elapsed()));
        }
        verify(&mut replica)?;
        if !rank.is_root() {
            return Ok(());
        }
        let times = Times::new(times);
        let bytes = parameters.bytes();
        let bus = bytes as f64 / times.median() / 1e3 * 2.0 * (world - 1) as f64 / world as f64;
        say(format_args!(
            "{plan:>18} {:>7} {:>8.1} {:>11.3} {:>11.3} {bus:>9.3}",
            replica.plan().buckets.len(),
            bytes as f64 / 1e6,
            times.median() / 1e3,
            times.minimum() / 1e3,
        ))?;
        Measurement { bench, dtype: DType::F32, bytes, world }.append(self.ranks.csv.as_deref(), &times)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.ranks.run_group("reducer", |_| Ok(Vec::new()), |group| args.both(group))
}
