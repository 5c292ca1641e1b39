//! The table: any world size trains to the parameters of one process.

use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Distribution;
use burn::tensor::backend::Backend;
use burn::train::metric::LossMetric;
use burn::train::{Learner, SupervisedTraining, TrainStep};
use burn_ddp::learner::{DdpStrategy, LaunchDdp, PlainRenderer};
use burn_ddp::nn::SyncGroup;
use burn_ddp::{MicroStep, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch, argument};
use crate::setup::*;

pub const CASES: &[(&str, Case)] =
    &[("table", table), ("plain", plain), ("micro-batches", micro_batches), ("one", one)];

/// One cell of the table.
#[derive(Clone, Debug)]
struct Cell {
    accumulation: usize,
    items: usize,
    workers: usize,
    norm: &'static str,
}

const BATCH: usize = 5;
const EPOCHS: usize = 2;

fn cells(norms: &[&'static str]) -> Vec<Cell> {
    let mut all = Vec::new();
    for norm in norms {
        for accumulation in [1, 3] {
            for items in [11, 16, 21] {
                for workers in [0, 1, 3] {
                    all.push(Cell { accumulation, items, workers, norm });
                }
            }
        }
    }
    all
}

fn launch(group: &ProcessGroup<G>, cell: &Cell) -> Result<Vec<f64>> {
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(group, cell.items, BATCH, cell.workers)?;
    let training =
        training(artifacts.path(), train, valid).num_epochs(EPOCHS).grads_accumulation(cell.accumulation);
    let config = NetConfig::new().with_norm(cell.norm.into());
    // Some with a bucket for each parameter, so that there is something to overlap.
    let replica = match cell.workers {
        1 => ReplicaOptions::new().with_bucket_bytes(1).with_buckets_in_flight(100),
        _ => ReplicaOptions::new(),
    };
    let before = group.stats().in_backward;
    let ddp = DdpStrategy::new(group).with_replica(replica);
    let result = training.launch_ddp(&ddp, learner(group, &config)?)?;
    let overlaps = cfg!(feature = "overlap") && cell.workers == 1 && cell.norm != "sync";
    // The one window of 11 items ends with a single item, rank 0's.
    if group.rank().is_root() || cell.accumulation == 1 || cell.items > 11 {
        let left = group.stats().in_backward > before;
        let connected = group.world_size() > 1 || group.options().connect_alone;
        assert_eq!(left, overlaps && connected, "{cell:?}");
    }
    Ok(numbers(&result.model))
}

/// Trains all cells, one after the other in the same processes.
fn table() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let norms: Vec<&'static str> = match argument().as_str() {
        "batch" => vec!["batch"],
        _ => vec!["none", "sync"],
    };
    let all =
        cells(&norms).iter().map(|cell| Ok(tell(&launch(&group, cell)?))).collect::<Result<Vec<_>>>()?;
    Ok(all.join("\n"))
}

fn compare(what: &str, ranks: &[String], wanted: &str, norms: &[&'static str]) {
    for (rank, text) in ranks.iter().enumerate() {
        assert_eq!(text.lines().count(), cells(norms).len(), "{what}, rank {rank}");
        for ((cell, got), wanted) in cells(norms).iter().zip(text.lines()).zip(wanted.lines()) {
            close(&format!("{what}, rank {rank}, {cell:?}"), &read(got), &read(wanted), 1e-6);
        }
    }
}

#[test]
fn the_parameters_of_any_world_are_those_of_one_process() {
    let one = Launch::new("table", 1).succeed().remove(0);
    for world in 2..=4 {
        let ranks = Launch::new("table", world).limit(240).succeed();
        assert!(ranks.iter().all(|text| *text == ranks[0]), "world {world}: ranks differ");
        compare(&format!("world {world}"), &ranks, &one, &["none", "sync"]);
    }
}

#[test]
fn a_world_of_one_that_is_connected_has_the_parameters_of_one_that_is_not() {
    let one = Launch::new("table", 1).succeed().remove(0);
    let connected = Launch::new("table", 1).env("BURN_DDP_CONNECT_ALONE", 1).succeed();
    compare("a connected world of one", &connected, &one, &["none", "sync"]);
}

/// Trains one process on the micro-batches of `argument()` ranks: the parts of each global batch one by one, as
/// micro-steps of the same window.
fn micro_batches() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<G>::solo(&device);
    let world: usize = argument().parse().expect("a world size");
    let mut lines = Vec::new();
    for cell in cells(&["batch"]) {
        let model = NetConfig::new().with_norm("batch".into()).init::<B>(&device, &SyncGroup::new(&group))?;
        let (mut model, mut replica) = Replica::new(model, &group, ReplicaOptions::new())?;
        let mut optimizer = SgdConfig::new().init();
        let mut schedule = LinearLrSchedulerConfig::new(0.05, 0.01, 20).init().expect("a schedule");
        let (train, _) = loaders(&group, cell.items, BATCH, 0)?;
        for _ in 0..EPOCHS {
            let batches: Vec<_> = train.iter().map(|batch| batch.ids).collect();
            for window in batches.chunks(cell.accumulation) {
                let pieces: Vec<_> = window
                    .iter()
                    .flat_map(|ids| {
                        (0..world).map(move |rank| {
                            ids[burn_ddp_comm::collective::chunk(ids.len(), world, rank)].to_vec()
                        })
                    })
                    .filter(|ids| !ids.is_empty())
                    .collect();
                let lr = burn::lr_scheduler::LrScheduler::step(&mut schedule);
                for ids in pieces {
                    let weight = ids.len() as f64;
                    let batch = Batcher::<B, _, _>::batch(&Batches, ids, &device);
                    let grads: GradientsParams = model.step(batch).grads;
                    replica.no_sync(&model, MicroStep::new(grads).with_weight(weight))?;
                }
                let reduced = replica.reduce(&model, MicroStep::empty())?;
                model = optimizer.step(lr, model, reduced.grads);
            }
        }
        lines.push(tell(&trained(&model)));
    }
    Ok(lines.join("\n"))
}

/// Numbers without the running states, which are each rank's own until they are averaged.
fn trained(model: &Net<B>) -> Vec<f64> {
    let all = numbers(&model.valid());
    without_states(&all)
}

/// first.weight, first.bias, gamma, beta, mean, variance, last.weight, last.bias.
fn without_states(all: &[f64]) -> Vec<f64> {
    let states = FEATURES * 8 + 8 + 16;
    all.iter().enumerate().filter(|(i, _)| !(states..states + 16).contains(i)).map(|(_, x)| *x).collect()
}

#[test]
fn plain_batch_norm_equals_one_process_that_sees_the_same_micro_batches() {
    for world in 1..=3 {
        let wanted = Launch::new("micro-batches", 1).argument(world).succeed().remove(0);
        for text in Launch::new("table", world).argument("batch").limit(240).succeed() {
            for ((cell, got), wanted) in cells(&["batch"]).iter().zip(text.lines()).zip(wanted.lines()) {
                let got = without_states(&read(got));
                close(&format!("world {world}, {cell:?}"), &got, &read(wanted), 1e-6);
            }
        }
    }
}

const ONE: Cell = Cell { accumulation: 1, items: 16, workers: 0, norm: "batch" };

/// Draws from the stream that dropout draws from.
#[derive(Clone)]
struct Noisy;

impl<B: Backend> Batcher<B, usize, Batch<B>> for Noisy {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        let batch: Batch<B> = Batches.batch(items, device);
        let noise = batch.features.random_like(Distribution::Normal(0.0, 0.1));
        Batch { features: batch.features + noise, ..batch }
    }
}

/// Burn's own `launch`, with Burn's own loaders.
fn plain() -> Result<String> {
    train_plainly(false)
}

/// Our launch in a world of one, with Burn's own loaders.
fn one() -> Result<String> {
    train_plainly(true)
}

fn train_plainly(ours: bool) -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<G>::from_env(&device)?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let train = PlainBuilder::new(Noisy).batch_size(BATCH).shuffle(3).build(Items(ONE.items));
    let valid = PlainBuilder::new(Batches).batch_size(BATCH).build(Items(ONE.items));
    let config = NetConfig::new().with_norm("batch".into()).with_dropout(0.3);
    let model = config.init::<B>(&device, &SyncGroup::new(&group))?;
    B::seed(&device, 5);
    let training = SupervisedTraining::new(artifacts.path(), train, valid)
        .metrics((LossMetric::<Flex>::new(),))
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None)
        .num_epochs(3);
    let schedule = LinearLrSchedulerConfig::new(0.05, 0.01, 20).init().expect("a schedule");
    let learner = Learner::new(model, burn::optim::AdamConfig::new().init(), schedule);
    let result = if ours {
        training.launch_ddp(&DdpStrategy::new(&group), learner)?
    } else {
        training.launch(learner)
    };
    let mut bits: Vec<u64> = numbers(&result.model).into_iter().map(f64::to_bits).collect();
    bits.push(artifacts.path().join("train").exists().into());
    Ok(format!("{bits:?}"))
}

#[test]
fn a_world_of_one_has_the_bits_of_burns_own_launch() {
    let plain = Launch::new("plain", 1).succeed();
    assert_eq!(Launch::new("one", 1).succeed(), plain);
    // Without the variables of a launcher too.
    let bare = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let launch = bare.into_iter().fold(Launch::new("one", 1), Launch::without);
    assert_eq!(launch.succeed(), plain);
}
