//! `Reproducibility::AnyWorldSize`: the bits of a training do not depend on the number of ranks.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, FloatDType, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_ddp::{
    Ddp, Error, MicroStep, ProcessGroup, Reduced, Replica, ReplicaOptions, Reproducibility, Result,
};
use burn_flex::Flex;
use burn_ndarray::NdArray;

use crate::harness::{Case, Launch, argument};

pub const CASES: &[(&str, Case)] = &[("reproducible", reproducible), ("not reproducible", refused)];

const STEPS: usize = 6;
const FEATURES: usize = 5;
const ANY: Reproducibility = Reproducibility::AnyWorldSize { seed: 11 };

/// Buckets are sent from the last parameter to the first, and one that is not complete holds back those after it.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    /// Used by none.
    unused: Param<Tensor<B, 1>>,
    /// Used by some micro-batches alone.
    some: Param<Tensor<B, 1>>,
    /// Gets gradients of -0.0 from some micro-batches, and none from others.
    some_negative: Param<Tensor<B, 1>>,
    hidden: Linear<B>,
    dropout: Dropout,
    out: Linear<B>,
    /// Gets gradients of -0.0 from all micro-batches.
    negative: Param<Tensor<B, 1>>,
}

/// What is trained on, the same in every world.
#[derive(Clone, Copy)]
struct Setting {
    /// Micro-steps of an optimizer step, of all ranks.
    micro_batches: usize,
    dropout: f64,
    weights: bool,
}

impl Setting {
    fn of(name: &str) -> Self {
        let plain = Self { micro_batches: 4, dropout: 0.0, weights: false };
        match name {
            "plain" => plain,
            "dropout" => Self { dropout: 0.3, ..plain },
            "weights" => Self { weights: true, ..plain },
            "twelve" => Self { micro_batches: 12, dropout: 0.3, weights: true },
            other => panic!("no setting {other}"),
        }
    }

    /// Items of a micro-batch; with weights they differ, and some micro-batches are empty.
    fn items(&self, step: usize, micro: usize) -> usize {
        if self.weights { (step + 3 * micro) % 5 } else { 3 }
    }
}

/// Fixed numbers in -1..1 without any order.
fn noise(index: usize) -> f64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed >> 11) as f64 / (1u64 << 53) as f64) * 2.0 - 1.0
}

impl<B: AutodiffBackend> Model<B> {
    fn new(dropout: f64, device: &B::Device) -> Self {
        let one = || Param::from_tensor(Tensor::ones([1], device));
        Self {
            unused: one(),
            some: one(),
            some_negative: one(),
            // Lazy: their values are drawn when they are first looked at.
            hidden: LinearConfig::new(FEATURES, 16).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            out: LinearConfig::new(16, 1).init(device),
            negative: one(),
        }
    }

    fn micro_step(&self, setting: Setting, step: usize, micro: usize) -> MicroStep<B> {
        let items = setting.items(step, micro);
        if items == 0 {
            return MicroStep::empty();
        }
        let device = self.some.device();
        let first = (step * 64 + micro) * 64;
        let tensor = |offset: usize, width: usize| {
            let values = (0..items * width).map(|i| noise(first * offset + i)).collect::<Vec<_>>();
            let data = TensorData::new(values, [items, width]).convert::<B::FloatElem>();
            Tensor::<B, 2>::from_data(data, &device)
        };
        let hidden = self.dropout.forward(self.hidden.forward(tensor(7, FEATURES)).tanh());
        let mut loss = (self.out.forward(hidden) - tensor(13, 1)).powi_scalar(2).mean();
        loss = loss + self.negative.val() * -0.0;
        if (micro + step) % 4 == 1 {
            loss = loss + self.some.val() * noise(first) + self.some_negative.val() * -0.0;
        }
        let grads = GradientsParams::from_grads(loss.backward(), self);
        let micro_step = MicroStep::new(grads).with_loss(loss);
        if setting.weights { micro_step.with_weight(items as f64) } else { micro_step }
    }
}

/// Loss and norm by their bits, and the gradients of the parameters that are not plain.
fn tell<B: AutodiffBackend>(reduced: &Reduced, model: &Model<B>) -> String {
    let bits = |number: Option<f64>| number.map(|number| format!("{:016x}", number.to_bits()));
    let gradient = |param: &Param<Tensor<B, 1>>| {
        let gradient = reduced.grads.get::<B::InnerBackend, 1>(param.id);
        gradient.map(|gradient| gradient.into_data().iter::<f64>().collect::<Vec<_>>())
    };
    format!(
        "loss {:?} norm {:?} some {:?} negative {:?} both {:?} unused {:?}",
        bits(reduced.loss),
        bits(reduced.norm),
        gradient(&model.some),
        gradient(&model.negative),
        gradient(&model.some_negative),
        gradient(&model.unused),
    )
}

fn train<I: Backend>(setting: Setting) -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<Ddp<I>>::from_env(&device)?;
    let (rank, accumulation) = (group.rank().0, setting.micro_batches / group.world_size());
    // Other ranks start elsewhere: what they draw is rank 0's, or comes from the seeds of micro-steps.
    Autodiff::<Ddp<I>>::seed(&device, 5 + rank as u64);
    let options = ReplicaOptions::new().with_norm().with_accumulation(accumulation).with_reproducibility(ANY);
    // One bucket a parameter, any number of them on their way: with the feature `overlap` they leave early.
    let options = options.with_bucket_bytes(1).with_buckets_in_flight(100);
    let model = Model::<Autodiff<Ddp<I>>>::new(setting.dropout, &device);
    let (mut model, mut replica) = Replica::new(model, &group, options)?;
    let mut optimizer = AdamConfig::new().init();
    let mut lines = Vec::new();
    for step in 0..STEPS {
        if step == 3 && accumulation > 1 {
            // A window that is given up leaves no trace, in the random stream neither.
            replica.no_sync(&model, model.micro_step(setting, step, rank))?;
            replica.discard();
        }
        let own = rank * accumulation..(rank + 1) * accumulation;
        for micro in own.start..own.end - 1 {
            replica.no_sync(&model, model.micro_step(setting, step, micro))?;
        }
        let items = setting.items(step, own.end - 1);
        if setting.weights && items > 0 {
            replica.expect_weight(items as f64)?;
        }
        let reduced = replica.reduce(&model, model.micro_step(setting, step, own.end - 1))?;
        let told = tell(&reduced, &model);
        model = optimizer.step(0.01, model, reduced.grads);
        lines.push(format!("{told} hash {:016x}", replica.parameter_hash(&model)?));
    }
    // All but the parameters that not every micro-batch uses, in most steps.
    let early = replica.overlap().in_backward;
    let overlaps = cfg!(feature = "overlap") && group.world_size() > 1;
    assert!(if overlaps { early >= 3 * 5 } else { early == 0 }, "{early} buckets left early");
    Ok(lines.join("\n"))
}

fn reproducible() -> Result<String> {
    let argument = argument();
    let (backend, setting) = argument.split_once(' ').expect("a backend and a setting");
    match backend {
        "flex" => train::<Flex>(Setting::of(setting)),
        "f32" => train::<NdArray<f32>>(Setting::of(setting)),
        _ => train::<NdArray<f64>>(Setting::of(setting)),
    }
}

/// Trains in worlds of 1, 2 and 4, which all have to say the same, and returns that.
fn same_everywhere(backend: &str, setting: &str) -> String {
    let run = |world_size| {
        Launch::new("reproducible", world_size).argument(format!("{backend} {setting}")).succeed()
    };
    let one = run(1).remove(0);
    assert_eq!(one.lines().count(), STEPS);
    for world_size in [2, 4] {
        for text in run(world_size) {
            assert_eq!(text.lines().count(), STEPS);
            for (step, (text, one)) in text.lines().zip(one.lines()).enumerate() {
                assert_eq!(text, one, "{backend}, {setting}, step {step}, {world_size} ranks");
            }
        }
    }
    one
}

#[test]
fn the_bits_of_f32_are_the_same_for_every_world() {
    let plain = same_everywhere("flex", "plain");
    assert_ne!(plain, same_everywhere("flex", "dropout"));
    let first = plain.lines().next().expect("a step");
    // -0.0 + 0.0 is 0.0.
    assert!(first.contains("negative Some([-0.0]) both Some([0.0]) unused None"), "{first}");
}

#[test]
fn the_bits_of_f64_are_the_same_for_every_world() {
    assert_ne!(same_everywhere("f64", "plain"), same_everywhere("f64", "dropout"));
}

#[test]
fn the_bits_of_weighted_micro_steps_are_the_same_for_every_world() {
    same_everywhere("flex", "weights");
    same_everywhere("f32", "weights");
}

#[test]
fn windows_that_are_no_power_of_two_are_the_same_for_every_world() {
    same_everywhere("flex", "twelve");
    same_everywhere("f64", "twelve");
}

#[test]
fn every_micro_batch_draws_numbers_of_its_own() {
    let texts = Launch::new("not reproducible", 2).argument("draws").succeed();
    // Rank 0 has the micro-batches 0 and 1 of two steps, rank 1 has 2 and 3.
    let draws: Vec<_> = texts.iter().flat_map(|text| text.split(' ')).collect();
    assert_eq!(draws.len(), 8);
    assert!((0..8).all(|i| (0..i).all(|j| draws[i] != draws[j])), "{draws:?}");
}

#[derive(Module, Debug)]
struct One<B: Backend> {
    weight: Param<Tensor<B, 1>>,
}

/// What is refused, and what each micro-step draws.
fn refused() -> Result<String> {
    type B = Autodiff<Ddp<Flex>>;
    let device = Default::default();
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&device)?;
    let argument = argument();
    let options = ReplicaOptions::new().with_reproducibility(ANY);
    let options = match argument.as_str() {
        "no accumulation" => options,
        "unequal" => options.with_accumulation(2 + group.rank().0),
        "draws" => options.with_accumulation(2),
        _ => options.with_accumulation(3),
    };
    let weight = Tensor::<B, 1>::ones([1], &device);
    let weight = if argument == "half" { weight.cast(FloatDType::F16) } else { weight };
    let model = One { weight: Param::from_tensor(weight) };
    let (model, mut replica) = Replica::new(model, &group, options)?;
    let grads = || GradientsParams::from_grads(model.weight.val().sum().backward(), &model);
    let draw = || {
        let drawn = Tensor::<B, 1>::random([1], Distribution::Default, &device);
        drawn.into_scalar().to_bits().to_string()
    };
    match argument.as_str() {
        "short" => {
            replica.no_sync(&model, grads())?;
            replica.reduce(&model, grads())?;
        }
        "long" => {
            for _ in 0..3 {
                replica.no_sync(&model, grads())?;
            }
            replica.reduce(&model, grads())?;
        }
        "draws" => {
            let mut texts = Vec::new();
            for _ in 0..2 {
                texts.push(draw());
                replica.no_sync(&model, grads())?;
                texts.push(draw());
                replica.reduce(&model, grads())?;
            }
            return Ok(texts.join(" "));
        }
        _ => {}
    }
    Err(Error::config("was not refused"))
}

#[test]
fn what_cannot_be_reproduced_is_refused_by_name_on_all_ranks() {
    let cases: [(&str, usize, &[&str]); 9] = [
        ("world", 3, &["a world of 3", "2 and 4"]),
        ("no accumulation", 2, &["ReplicaOptions::accumulation"]),
        ("no accumulation", 1, &["ReplicaOptions::accumulation"]),
        ("unequal", 2, &["options differ", "accumulation: Some(2)", "accumulation: Some(3)"]),
        ("half", 2, &["`weight` is f16", "f32 and f64"]),
        ("half", 1, &["`weight` is f16", "f32 and f64"]),
        ("short", 2, &["a window of 2 micro-steps", "accumulation is 3"]),
        ("long", 2, &["a window of 4 micro-steps", "accumulation is 3"]),
        ("long", 1, &["a window of 4 micro-steps", "accumulation is 3"]),
    ];
    for (argument, world_size, words) in cases {
        for outcome in Launch::new("not reproducible", world_size).argument(argument).run() {
            outcome.failed_saying(words);
        }
    }
}
