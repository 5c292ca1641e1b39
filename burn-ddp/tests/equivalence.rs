//! The backbone: N processes train what one process trains on the same global batches.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig, SimpleOptimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_ddp::{Ddp, Error, ErrorKind, MicroStep, ProcessGroup, Rank, Replica, ReplicaOptions, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;

use crate::harness::{Case, Launch, ROADS};

pub const CASES: &[(&str, Case)] = &[("equivalence", equivalence)];

const STEPS: usize = 12;
const FEATURES: usize = 4;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    hidden: Linear<B>,
    /// Used for the items of rank 1 alone, in the cases that say so.
    extra: Param<Tensor<B, 1>>,
    out: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        let filled = |shape: &[usize], seed: usize| {
            let count = shape.iter().product();
            TensorData::new((0..count).map(|i| noise(seed * 1000 + i)).collect(), shape.to_vec())
        };
        let linear = |inputs: usize, outputs: usize, seed: usize| {
            let mut linear = LinearConfig::new(inputs, outputs).init::<B>(device);
            linear.weight =
                Param::from_data(filled(&[inputs, outputs], seed).convert::<B::FloatElem>(), device);
            linear.bias =
                Some(Param::from_data(filled(&[outputs], seed + 1).convert::<B::FloatElem>(), device));
            linear
        };
        let extra = Param::from_data(filled(&[1], 5).convert::<B::FloatElem>(), device);
        Self { hidden: linear(FEATURES, 8, 1), extra, out: linear(8, 1, 3) }
    }

    /// Mean squared error over the items; `extra[i]` says whether item i uses the extra parameter.
    fn loss(&self, items: &[Item], device: &B::Device) -> Tensor<B, 1> {
        let inputs = items.iter().flat_map(|item| item.x).collect::<Vec<_>>();
        let data = TensorData::new(inputs, [items.len(), FEATURES]).convert::<B::FloatElem>();
        let hidden = self.hidden.forward(Tensor::<B, 2>::from_data(data, device)).tanh();
        let mut predicted = self.out.forward(hidden);
        if items.iter().any(|item| item.extra) {
            let mask = items.iter().map(|item| f64::from(u8::from(item.extra))).collect::<Vec<_>>();
            let mask = TensorData::new(mask, [items.len(), 1]).convert::<B::FloatElem>();
            let mask = Tensor::<B, 2>::from_data(mask, device);
            predicted = predicted + mask * self.extra.val().reshape([1, 1]);
        }
        let wanted = items.iter().map(|item| item.y).collect::<Vec<_>>();
        let wanted = TensorData::new(wanted, [items.len(), 1]).convert::<B::FloatElem>();
        (predicted - Tensor::from_data(wanted, device)).powi_scalar(2).mean()
    }

    fn values(&self) -> Vec<f64> {
        let mut all = Vec::new();
        for linear in [&self.hidden, &self.out] {
            all.extend(linear.weight.val().into_data().iter::<f64>());
            all.extend(linear.bias.as_ref().expect("made with one").val().into_data().iter::<f64>());
        }
        all.extend(self.extra.val().into_data().iter::<f64>());
        all
    }
}

#[derive(Clone, Copy)]
struct Item {
    x: [f64; FEATURES],
    y: f64,
    extra: bool,
}

/// Fixed numbers in -1..1 without any order.
fn noise(index: usize) -> f64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed >> 11) as f64 / (1u64 << 53) as f64) * 2.0 - 1.0
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    adam: bool,
    accumulation: usize,
    /// Ranks and micro-steps have different numbers of items, one of them none.
    unequal: bool,
    /// Rank 1 alone uses the extra parameter.
    partial: bool,
    /// The replica is told all that it can be told before a backward pass, and has a bucket for each parameter: with
    /// the feature `overlap` as much as possible leaves early.
    told: bool,
}

impl Setting {
    fn all() -> Vec<Self> {
        let flags = [false, true];
        let mut all = Vec::new();
        for adam in flags {
            for accumulation in [1, 3, 4] {
                for unequal in flags {
                    for partial in flags {
                        for told in flags {
                            all.push(Self { adam, accumulation, unequal, partial, told });
                        }
                    }
                }
            }
        }
        all
    }

    fn items(&self, step: usize, rank: usize, micro: usize) -> Vec<Item> {
        let count = match self.unequal {
            // Never zero for all ranks at once, but zero for some.
            true => (rank + 2 * micro + step) % 4 + usize::from(rank == 0 && micro == 0),
            false => 3,
        };
        let item = |index: usize| {
            let seed = ((step * 16 + rank) * 16 + micro) * 16 + index;
            let x: [f64; FEATURES] = std::array::from_fn(|feature| noise(seed * 8 + feature + 77));
            Item { x, y: x[0] * x[1] + 0.5 * x[2], extra: self.partial && rank == 1 }
        };
        (0..count).map(item).collect()
    }

    fn options(&self) -> ReplicaOptions {
        match self.told {
            true => ReplicaOptions::new()
                .with_accumulation(self.accumulation)
                .with_bucket_bytes(1)
                .with_buckets_in_flight(100),
            false => ReplicaOptions::new(),
        }
    }

    /// How many of the five buckets of this optimizer step leave in the last backward pass of `rank`: all but the last,
    /// but none behind a parameter that is not used.
    #[cfg(feature = "overlap")]
    fn early(&self, step: usize, rank: usize, world_size: usize) -> u64 {
        let runs = !self.items(step, rank, self.accumulation - 1).is_empty();
        // Without weights nothing is known of them before the first micro-step.
        let known = self.unequal || self.accumulation > 1 || step > 0;
        let uses_extra = self.partial && rank == 1;
        match self.told && world_size > 1 && runs && known {
            // After the first step buckets follow the order in which rank 0's gradients came, and it has none of this.
            true if uses_extra || step > 0 => 4,
            true => 2,
            false => 0,
        }
    }

    fn learning_rate(&self) -> f64 {
        if self.adam { 0.01 } else { 0.05 }
    }
}

/// Trains on this rank's share of each global batch.
fn distributed<B: AutodiffBackend, O: SimpleOptimizer<B::InnerBackend>>(
    setting: Setting,
    mut optimizer: OptimizerAdaptor<O, Model<B>, B>,
    group: &ProcessGroup<B::InnerBackend>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let device = Default::default();
    let rank = group.rank().0;
    let (mut model, mut replica) = Replica::new(Model::<B>::new(&device), group, setting.options())?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        #[cfg(feature = "overlap")]
        let before = replica.overlap().in_backward;
        for micro in 0..setting.accumulation {
            let items = setting.items(step, rank, micro);
            if setting.told && setting.unequal {
                replica.expect_weight(items.len() as f64)?;
            }
            let micro_step = if items.is_empty() {
                MicroStep::empty()
            } else {
                let loss = model.loss(&items, &device);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let micro_step = MicroStep::new(grads).with_loss(loss);
                if setting.unequal { micro_step.with_weight(items.len() as f64) } else { micro_step }
            };
            if micro + 1 < setting.accumulation {
                replica.no_sync(&model, micro_step)?;
            } else {
                let reduced = replica.reduce(&model, micro_step)?;
                losses.extend(reduced.loss);
                model = optimizer.step(setting.learning_rate(), model, reduced.grads);
            }
        }
        #[cfg(feature = "overlap")]
        assert_eq!(
            replica.overlap().in_backward - before,
            setting.early(step, rank, group.world_size()),
            "{setting:?}, step {step}"
        );
    }
    replica.verify(&model)?;
    Ok((model.values(), losses))
}

/// Trains on whole global batches, with Burn alone.
fn single<B: AutodiffBackend, O: SimpleOptimizer<B::InnerBackend>>(
    setting: Setting,
    mut optimizer: OptimizerAdaptor<O, Model<B>, B>,
    world_size: usize,
) -> (Vec<f64>, Vec<f64>) {
    let device = Default::default();
    let mut model = Model::<B>::new(&device);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut items = Vec::new();
        for rank in 0..world_size {
            (0..setting.accumulation).for_each(|micro| items.extend(setting.items(step, rank, micro)));
        }
        let loss = model.loss(&items, &device);
        losses.extend(loss.clone().into_data().iter::<f64>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(setting.learning_rate(), model, grads);
    }
    (model.values(), losses)
}

fn compare<I: Backend>(name: &str, tolerance: f64) -> Result<()> {
    let device = Default::default();
    let world = ProcessGroup::<Ddp<I>>::from_env(&device)?;
    for setting in Setting::all() {
        let size = world.world_size();
        let (got, expected) = if setting.adam {
            let got = distributed::<Autodiff<Ddp<I>>, _>(setting, AdamConfig::new().init(), &world)?;
            (got, single::<Autodiff<Ddp<I>>, _>(setting, AdamConfig::new().init(), size))
        } else {
            let got = distributed::<Autodiff<Ddp<I>>, _>(setting, SgdConfig::new().init(), &world)?;
            (got, single::<Autodiff<Ddp<I>>, _>(setting, SgdConfig::new().init(), size))
        };
        assert_eq!(got.1.len(), STEPS);
        let values = got.0.iter().chain(&got.1).zip(expected.0.iter().chain(&expected.1));
        for (index, (got, expected)) in values.enumerate() {
            if (got - expected).abs() > tolerance * expected.abs().max(1.0) {
                let text = format!("{name} {setting:?}: value {index} is {got}, one process has {expected}");
                return Err(Error::new(ErrorKind::Diverged, text));
            }
        }
    }
    Ok(())
}

fn equivalence() -> Result<String> {
    match crate::harness::argument().as_str() {
        "flex" => compare::<Flex>("flex", 1e-6)?,
        "f32" => compare::<NdArray<f32>>("f32", 1e-6)?,
        _ => compare::<NdArray<f64>>("f64", 1e-12)?,
    }
    Ok(Rank(0).to_string())
}

fn on(world_size: usize) {
    for road in ROADS {
        // What the backend computes with does not depend on the road; one of them is enough for the others.
        let backends: &[&str] = if road == "shm" { &["flex", "f32", "f64"] } else { &["f64"] };
        for backend in backends {
            let done = Launch::new("equivalence", world_size).over(road).argument(backend).succeed();
            assert_eq!(done.len(), world_size);
        }
    }
}

#[test]
fn one_rank_trains_what_one_process_trains() {
    on(1);
}

#[test]
fn two_ranks_train_what_one_process_trains() {
    on(2);
}

#[test]
fn three_ranks_train_what_one_process_trains() {
    on(3);
}

#[test]
fn four_ranks_train_what_one_process_trains() {
    on(4);
}
