//! The gradients of a model of 30 million parameters through `Replica::reduce`: one bucket per parameter against the
//! default plan.
//!
//! The gradients hold whole numbers of a known sum; each rank compares every element of the mean before and after times are
//! taken. Meanwhile the result of a reduction is the input of the next. Ranks pass a barrier before each, and
//! the time is rank 0's.
//!
//! ```sh
//! cargo bench -p burn-ddp-benches --bench reducer -- --nproc 1,2,4
//! ```

use std::process::ExitCode;
use std::time::Instant;

use burn::backend::Autodiff;
use burn_ddp::{DType, Ddp, Error, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_ddp_benches::csv::Measurement;
use burn_ddp_benches::gradients::Parameters;
use burn_ddp_benches::model::{Shape, Transformer};
use burn_ddp_benches::ranks::{Ranks, say};
use burn_ddp_benches::times::Times;
use burn_flex::{Flex, FlexDevice};
use clap::Parser;

type B = Autodiff<Ddp<Flex>>;

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
    fn rank(&self) -> Result<()> {
        let group = ProcessGroup::from_env(&FlexDevice)?;
        group.finish(self.both(&group))
    }

    fn both(&self, group: &ProcessGroup<Ddp<Flex>>) -> Result<()> {
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

    fn measure(
        &self,
        group: &ProcessGroup<Ddp<Flex>>,
        bench: &'static str,
        plan: &str,
        options: ReplicaOptions,
    ) -> Result<()> {
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
            // A rank that found a miss does not come here, and then nobody goes on.
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
    args.ranks.run("reducer", |_| Ok(Vec::new()), || args.rank())
}
