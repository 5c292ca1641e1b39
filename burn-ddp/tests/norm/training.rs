//! N processes with synchronized normalization train what one process trains, for any distribution of the items.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_ddp::nn::{SyncBatchNorm, SyncBatchNormConfig, SyncGroup};
use burn_ddp::{Ddp, Error, ErrorKind, MicroStep, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;

use super::floats;
use crate::harness::{Launch, argument};

const STEPS: usize = 8;
const FEATURES: usize = 4;
const WIDTH: usize = 6;

/// A model with four normalizations in sequence and in parallel, one of them over two values a channel.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    first: Linear<B>,
    norm: SyncBatchNorm<B>,
    left: Linear<B>,
    left_norm: SyncBatchNorm<B>,
    right: Linear<B>,
    right_norm: SyncBatchNorm<B>,
    pairs: SyncBatchNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device, sync: Option<&SyncGroup>) -> Result<Self> {
        let filled = |shape: &[usize], seed: usize| {
            let count = shape.iter().product();
            let values: Vec<f64> = (0..count).map(|i| noise(seed * 1000 + i)).collect();
            TensorData::new(values, shape.to_vec()).convert::<B::FloatElem>()
        };
        let linear = |inputs: usize, outputs: usize, seed: usize| {
            let mut linear = LinearConfig::new(inputs, outputs).init::<B>(device);
            linear.weight = Param::from_data(filled(&[inputs, outputs], seed), device);
            linear.bias = Some(Param::from_data(filled(&[outputs], seed + 1), device));
            linear
        };
        let norm = |features: usize| SyncBatchNormConfig::new(features).init(device, sync);
        Ok(Self {
            first: linear(FEATURES, WIDTH, 1),
            norm: norm(WIDTH)?,
            left: linear(WIDTH, WIDTH, 3),
            left_norm: norm(WIDTH)?,
            right: linear(WIDTH, WIDTH, 5),
            right_norm: norm(WIDTH)?,
            pairs: norm(WIDTH / 2)?,
            last: linear(WIDTH, 1, 7),
        })
    }

    /// The error of each item, times its factor, summed.
    fn loss(&self, items: &[Item], factors: Vec<f64>, device: &B::Device) -> Tensor<B, 1> {
        let count = items.len();
        let tensor = |values: Vec<f64>, width: usize| {
            let data = TensorData::new(values, [count, width]).convert::<B::FloatElem>();
            Tensor::<B, 2>::from_data(data, device)
        };
        let x = tensor(items.iter().flat_map(|item| item.x).collect(), FEATURES);
        let x = self.norm.forward(self.first.forward(x)).tanh();
        let left = self.left_norm.forward(self.left.forward(x.clone()));
        let right = self.right_norm.forward(self.right.forward(x.clone()));
        let pairs = self.pairs.forward(x.reshape([count, WIDTH / 2, 2])).reshape([count, WIDTH]);
        let predicted = self.last.forward((left + right * 0.5 + pairs).tanh());
        let error = (predicted - tensor(items.iter().map(|item| item.y).collect(), 1)).square();
        (error * tensor(factors, 1)).sum()
    }

    fn values(&self) -> Values {
        let mut values = Values::default();
        for linear in [&self.first, &self.left, &self.right, &self.last] {
            values.parameters.extend(floats(linear.weight.val()));
            values.parameters.extend(floats(linear.bias.as_ref().expect("made with one").val()));
        }
        for norm in [&self.norm, &self.left_norm, &self.right_norm, &self.pairs] {
            values.parameters.extend(floats(norm.gamma.val()));
            values.parameters.extend(floats(norm.beta.val()));
            values.states.extend(floats(norm.running_mean.value_sync()));
            values.states.extend(floats(norm.running_var.value_sync()));
        }
        values
    }
}

#[derive(Debug, Default)]
struct Values {
    parameters: Vec<f64>,
    states: Vec<f64>,
    losses: Vec<f64>,
}

#[derive(Clone, Copy)]
struct Item {
    x: [f64; FEATURES],
    y: f64,
}

/// Pseudorandom numbers in -1..1, the same in every run.
fn noise(index: usize) -> f64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed >> 11) as f64 / (1u64 << 53) as f64) * 2.0 - 1.0
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Spread {
    /// Three items a rank and micro-step, without weights.
    Equal,
    /// None to five, weighed by items.
    Unequal,
    /// None to five, each rank's loss counting the same.
    Unweighted,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    spread: Spread,
    accumulation: usize,
    synchronized: bool,
}

impl Setting {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for spread in [Spread::Equal, Spread::Unequal, Spread::Unweighted] {
            for accumulation in [1, 3] {
                for synchronized in [true, false] {
                    all.push(Self { spread, accumulation, synchronized });
                }
            }
        }
        all
    }

    fn items(&self, step: usize, rank: usize, micro: usize) -> Vec<Item> {
        let count = match self.spread {
            Spread::Equal => 3,
            _ => [0, 3, 2, 5][(rank + 2 * micro + step) % 4],
        };
        (0..count).map(|index| item(((step * 16 + rank) * 16 + micro) * 16 + index)).collect()
    }

    /// Weight of the loss of a micro-step of `items` items on one rank.
    fn weight(&self, items: usize) -> f64 {
        if self.spread == Spread::Unequal { items as f64 } else { 1.0 }
    }
}

fn item(seed: usize) -> Item {
    let x: [f64; FEATURES] = std::array::from_fn(|feature| noise(seed * 8 + feature + 77));
    Item { x, y: x[0] * x[1] + 0.5 * x[2] }
}

/// The micro-step of this rank, empty if it has no items.
fn micro_step<B: AutodiffBackend>(
    setting: Setting,
    model: &Model<B>,
    items: &[Item],
    sync: &SyncGroup,
) -> MicroStep<B> {
    let device = Default::default();
    if items.is_empty() {
        if setting.synchronized && sync.world_size() > 1 {
            sync.set_absent(true);
            // The placeholder may be any batch, even one of NaN.
            let placeholder = [Item { x: [f64::NAN; FEATURES], y: 0.0 }; 2];
            let _ = model.loss(&placeholder, vec![1.0; 2], &device).backward();
            sync.set_absent(false);
        }
        return MicroStep::empty();
    }
    let loss = model.loss(items, vec![1.0 / items.len() as f64; items.len()], &device);
    let grads = GradientsParams::from_grads(loss.backward(), model);
    let micro_step = MicroStep::new(grads).with_loss(loss);
    if setting.spread == Spread::Unequal { micro_step.with_weight(items.len() as f64) } else { micro_step }
}

/// Trains on this rank's share of each global micro-batch.
fn distributed<B: AutodiffBackend>(
    setting: Setting,
    group: &ProcessGroup<B::InnerBackend>,
) -> Result<Values> {
    let device = Default::default();
    let mut sync = SyncGroup::new(group);
    if setting.spread == Spread::Unweighted {
        sync = sync.with_equal_weights();
    }
    let model = Model::<B>::new(&device, setting.synchronized.then_some(&sync))?;
    let (mut model, mut replica) = Replica::new(model, group, ReplicaOptions::new())?;
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        for micro in 0..setting.accumulation {
            let items = setting.items(step, group.rank().0, micro);
            let micro_step = micro_step(setting, &model, &items, &sync);
            if micro + 1 < setting.accumulation {
                replica.no_sync(&model, micro_step)?;
            } else {
                let reduced = replica.reduce(&model, micro_step)?;
                losses.extend(reduced.loss);
                model = optimizer.step(0.05, model, reduced.grads);
            }
        }
    }
    replica.verify(&model)?;
    Ok(Values { losses, ..model.values() })
}

/// Trains in one process: on whole global micro-batches, or on those of each rank if nothing is synchronized.
fn single<B: AutodiffBackend>(setting: Setting, world_size: usize) -> Result<Values> {
    let device = Default::default();
    let group = ProcessGroup::<B::InnerBackend>::solo(&device);
    let model = Model::<B>::new(&device, None)?;
    let (mut model, mut replica) = Replica::new(model, &group, ReplicaOptions::new())?;
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        for micro in 0..setting.accumulation {
            let ranks: Vec<_> = (0..world_size).map(|rank| setting.items(step, rank, micro)).collect();
            let batches: Vec<&[Vec<Item>]> =
                if setting.synchronized { vec![&ranks[..]] } else { ranks.chunks(1).collect() };
            for batch in batches {
                let weight: f64 = batch
                    .iter()
                    .filter(|items| !items.is_empty())
                    .map(|items| setting.weight(items.len()))
                    .sum();
                if weight == 0.0 {
                    continue;
                }
                let factor = |items: &Vec<Item>| setting.weight(items.len()) / items.len() as f64 / weight;
                let factors = batch.iter().flat_map(|items| vec![factor(items); items.len()]).collect();
                let loss = model.loss(&batch.concat(), factors, &device);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                replica.no_sync(&model, MicroStep::new(grads).with_loss(loss).with_weight(weight))?;
            }
        }
        let reduced = replica.reduce(&model, MicroStep::empty())?;
        losses.extend(reduced.loss);
        model = optimizer.step(0.05, model, reduced.grads);
    }
    Ok(Values { losses, ..model.values() })
}

fn compare<B: AutodiffBackend>(name: &str, tolerance: f64) -> Result<String> {
    let group = ProcessGroup::<B::InnerBackend>::from_env(&Default::default())?;
    let (mut text, mut worst) = (String::new(), 0.0f64);
    for setting in Setting::all() {
        let got = distributed::<B>(setting, &group)?;
        let expected = single::<B>(setting, group.world_size())?;
        let mut kinds = vec![
            ("parameter", &got.parameters, &expected.parameters),
            ("loss", &got.losses, &expected.losses),
        ];
        if setting.synchronized {
            kinds.push(("running state", &got.states, &expected.states));
            text += &format!("{:?}", got.states);
        }
        for (kind, got, expected) in kinds {
            assert_eq!(got.len(), expected.len(), "{setting:?}: {kind}");
            for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
                let error = (got - expected).abs() / expected.abs().max(1.0);
                worst = worst.max(error);
                if error.is_nan() || error > tolerance {
                    let text =
                        format!("{name} {setting:?}: {kind} {index} is {got}, one process has {expected}");
                    return Err(Error::new(ErrorKind::Diverged, text));
                }
            }
        }
    }
    Ok(format!("{worst:e} {text}"))
}

pub fn train() -> Result<String> {
    match argument().as_str() {
        "flex" => compare::<Autodiff<Ddp<Flex>>>("flex", 1e-6),
        "checkpointing" => compare::<Autodiff<Ddp<Flex>, BalancedCheckpointing>>("checkpointing", 1e-6),
        _ => compare::<Autodiff<Ddp<NdArray<f64>>>>("f64", 1e-12),
    }
}

fn on(world_size: usize) {
    for backend in ["flex", "checkpointing", "f64"] {
        let ranks = Launch::new("norm: training", world_size).argument(backend).succeed();
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{backend}: running states differ between ranks");
        println!("{backend} on {world_size}: worst error {}", ranks[0].split(' ').next().unwrap_or_default());
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
