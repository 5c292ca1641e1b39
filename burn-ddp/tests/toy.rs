//! Gradient and loss arithmetic on one scalar parameter `w`, from 0: `loss = mean(w * x)`, so the gradient is
//! `mean(x)`; SGD with learning rate 0.1. Each value can be checked in the head.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_ddp::{Ddp, GradientReduction, MicroStep, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch, argument};

pub const CASES: &[(&str, Case)] = &[
    ("toy", toy),
    ("partly used", partly_used),
    ("half", half),
    ("one reduction", one_reduction),
    ("two hundred", two_hundred),
];

type B = Autodiff<Ddp<Flex>>;

#[derive(Module, Debug)]
struct Toy<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

impl<B: Backend> Toy<B> {
    fn new(device: &B::Device) -> Self {
        Self { w: Param::from_tensor(Tensor::zeros([1], device)) }
    }

    fn loss(&self, items: &[f32], divisor: f32) -> Tensor<B, 1> {
        let x = Tensor::<B, 1>::from_data(TensorData::from(items), &self.w.device());
        (self.w.val() * x).mean() / divisor
    }
}

/// What a rank trains on and what comes out of it.
struct Scenario {
    /// Optimizer steps of micro-steps of items.
    windows: Vec<Vec<Vec<f32>>>,
    weighted: bool,
    options: ReplicaOptions,
    /// By which the loss is divided beforehand.
    divisor: f32,
}

impl Scenario {
    fn new(windows: &[&[&[f32]]]) -> Self {
        let windows =
            windows.iter().map(|window| window.iter().map(|micro| micro.to_vec()).collect()).collect();
        Self { windows, weighted: false, options: ReplicaOptions::new().with_norm(), divisor: 1.0 }
    }

    fn weighted(self) -> Self {
        Self { weighted: true, ..self }
    }

    fn with(self, change: impl FnOnce(ReplicaOptions) -> ReplicaOptions) -> Self {
        Self { options: change(self.options), ..self }
    }

    fn of(name: &str, rank: usize) -> Self {
        let pick = |ranks: [&[&[&[f32]]]; 2]| Self::new(ranks[rank % 2]);
        match name {
            "mean" => pick([&[&[&[1., 3.]]], &[&[&[5., 7.]]]]),
            "sum" => {
                pick([&[&[&[1., 3.]]], &[&[&[5., 7.]]]]).with(|o| o.with_reduction(GradientReduction::Sum))
            }
            "accumulated" => pick([&[&[&[1.], &[2.]]], &[&[&[3.], &[4.]]]]),
            "unequal" => pick([&[&[&[1., 2.]]], &[&[&[3.]]]]),
            "unequal, weighted" => pick([&[&[&[1., 2.]]], &[&[&[3.]]]]).weighted(),
            "three to one" => pick([&[&[&[1., 1., 1.]]], &[&[&[5.]]]]),
            "three to one, weighted" => pick([&[&[&[1., 1., 1.]]], &[&[&[5.]]]]).weighted(),
            "divided beforehand" => {
                let scenario =
                    pick([&[&[&[1.]]], &[&[&[3.]]]]).with(|o| o.with_reduction(GradientReduction::Sum));
                Self { divisor: 2.0, ..scenario }
            }
            "divided beforehand, two steps" => {
                let scenario = pick([&[&[&[1.]], &[&[1.]]], &[&[&[3.]], &[&[3.]]]]);
                Self { divisor: 2.0, ..scenario.with(|o| o.with_reduction(GradientReduction::Sum)) }
            }
            "weights on rank 1 alone" => {
                let scenario = pick([&[&[&[1.]]], &[&[&[3.]]]]);
                Self { weighted: rank == 1, ..scenario }
            }
            "not a number" => pick([&[&[&[f32::NAN]]], &[&[&[3.]]]]).with(|o| o.with_clip_norm(1.0)),
            "four micro-steps" => pick([&[&[&[1.], &[1.], &[1.], &[1.]]]; 2]),
            "incomplete window" => pick([&[&[&[1.], &[2.]], &[&[3.], &[4.]], &[&[5.]]]; 2]),
            "below the limit" => pick([&[&[&[0.8]]]; 2]).with(|o| o.with_clip_norm(1.0)),
            "clipped" => pick([&[&[&[0.8]]]; 2]).with(|o| o.with_clip_norm(0.4)),
            "an empty rank" => pick([&[&[&[1.]], &[&[]]], &[&[&[3.]], &[&[7.]]]]).weighted(),
            "four ranks, one empty" => {
                let mine: [&[f32]; 4] = [&[7.], &[1., 1., 1.], &[], &[1., 1.]];
                Self::new(&[&[mine[rank]]]).weighted()
            }
            other => panic!("no scenario {other}"),
        }
    }
}

/// Trains the scenario and says `w`, the last loss, the last norm and the parameter hash.
fn toy() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&device)?;
    let Scenario { windows, weighted, options, divisor } = Scenario::of(&argument(), group.rank().0);
    let (mut model, mut replica) = Replica::new(Toy::<B>::new(&device), &group, options)?;
    let mut optimizer = SgdConfig::new().init();
    let (mut loss, mut norm) = (f64::NAN, f64::NAN);
    for window in windows {
        let (last, before) = window.split_last().expect("a micro-step");
        let micro_step = |model: &Toy<B>, items: &[f32]| {
            if items.is_empty() {
                return MicroStep::empty();
            }
            let loss = model.loss(items, divisor);
            let micro_step =
                MicroStep::new(GradientsParams::from_grads(loss.backward(), model)).with_loss(loss);
            if weighted { micro_step.with_weight(items.len() as f64) } else { micro_step }
        };
        for items in before {
            replica.no_sync(&model, micro_step(&model, items))?;
        }
        let reduced = replica.reduce(&model, micro_step(&model, last))?;
        (loss, norm) = (reduced.loss.unwrap_or(f64::NAN), reduced.norm.unwrap_or(f64::NAN));
        model = optimizer.step(0.1, model, reduced.grads);
    }
    let w: f32 = model.w.val().into_scalar();
    Ok(format!("{w} {loss} {norm} {}", replica.parameter_hash(&model)?))
}

struct Expected {
    w: f64,
    loss: Option<f64>,
    norm: Option<f64>,
}

fn check(scenario: &str, world_size: usize, expected: Expected) {
    let ranks = Launch::new("toy", world_size).argument(scenario).succeed();
    for text in &ranks {
        assert_eq!(*text, ranks[0], "{scenario}: ranks differ");
        let numbers: Vec<f64> = text.split(' ').take(3).map(|word| word.parse().expect("a number")).collect();
        let wanted = [Some(expected.w), expected.loss, expected.norm];
        for ((got, wanted), what) in numbers.iter().zip(wanted).zip(["w", "loss", "norm"]) {
            if let Some(wanted) = wanted {
                assert!((got - wanted).abs() < 1e-6, "{scenario}: {what} is {got}, not {wanted}");
            }
        }
    }
}

fn w(w: f64) -> Expected {
    Expected { w, loss: None, norm: None }
}

#[test]
fn the_mean_is_over_ranks_by_default_and_a_sum_rescales_nothing() {
    check("mean", 2, Expected { w: -0.4, loss: Some(0.0), norm: Some(4.0) });
    check("sum", 2, w(-0.8));
    check("divided beforehand", 2, Expected { w: -0.2, loss: None, norm: Some(2.0) });
    // The sum of the shares is the loss of the whole: (-0.2 * 1 + -0.2 * 3) / 2.
    check("divided beforehand, two steps", 2, Expected { w: -0.4, loss: Some(-0.4), norm: Some(2.0) });
}

#[test]
fn weights_on_some_ranks_alone_are_an_error_on_all() {
    for outcome in Launch::new("toy", 2).argument("weights on rank 1 alone").run() {
        outcome.failed_saying(&["1 of 2 micro-steps", "weight"]);
    }
}

#[test]
fn a_gradient_that_is_not_a_number_shows_on_all_ranks_alike() {
    for text in Launch::new("toy", 2).argument("not a number").succeed() {
        assert!(text.starts_with("NaN NaN NaN"), "{text}");
    }
}

#[test]
fn accumulated_micro_steps_equal_the_whole_batch() {
    check("accumulated", 2, w(-0.25));
    check("four micro-steps", 2, w(-0.1));
    check("four micro-steps", 1, w(-0.1));
}

#[test]
fn an_incomplete_window_is_divided_by_its_real_number_of_micro_steps() {
    // The last loss is taken at w = -0.5, x = 5.
    check("incomplete window", 2, Expected { w: -1.0, loss: Some(-2.5), norm: Some(5.0) });
}

#[test]
fn items_weigh_where_weights_are_given() {
    check("unequal", 2, w(-0.225));
    check("unequal, weighted", 2, w(-0.2));
    check("three to one", 2, w(-0.3));
    check("three to one, weighted", 2, w(-0.2));
}

#[test]
fn a_rank_without_items_joins_and_adds_nothing() {
    // Step 1: (1 + 3) / 2 = 2; step 2: rank 1 alone, 7, with loss -0.2 * 7.
    check("an empty rank", 2, Expected { w: -0.9, loss: Some(-1.4), norm: Some(7.0) });
    check("four ranks, one empty", 4, Expected { w: -0.2, loss: Some(0.0), norm: Some(2.0) });
}

#[test]
fn clipping_is_by_the_norm_of_the_reduced_gradient() {
    check("below the limit", 2, Expected { w: -0.08, loss: None, norm: Some(0.8) });
    check("clipped", 2, Expected { w: -0.04, loss: None, norm: Some(0.8) });
}

#[derive(Module, Debug)]
struct Pair<B: Backend> {
    a: Param<Tensor<B, 1>>,
    b: Param<Tensor<B, 1>>,
}

/// Three steps; rank 0 uses `a` and `b`, other ranks `a` alone, nobody `b` where the argument is `nobody`.
fn partly_used() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&device)?;
    let zero = || Param::from_tensor(Tensor::<B, 1>::zeros([1], &device));
    let (mut model, mut replica) =
        Replica::new(Pair { a: zero(), b: zero() }, &group, ReplicaOptions::new())?;
    let mut optimizer = SgdConfig::new().init();
    let mut first = String::new();
    for step in 0..3 {
        let loss = match (group.rank().0, argument().as_str()) {
            (0, "some") => model.a.val() * 2.0 + model.b.val() * 4.0,
            _ => model.a.val() * 6.0,
        };
        let reduced = replica.reduce(&model, GradientsParams::from_grads(loss.sum().backward(), &model))?;
        if step == 0 {
            let gradient = |param: &Param<Tensor<B, 1>>| {
                let gradient = reduced.grads.get::<Ddp<Flex>, 1>(param.id);
                gradient.map(|gradient| gradient.into_scalar())
            };
            first = format!("{:?} {:?}", gradient(&model.a), gradient(&model.b));
        }
        model = optimizer.step(0.1, model, reduced.grads);
    }
    replica.verify(&model)?;
    Ok(format!("{first} b = {}", model.b.val().into_scalar()))
}

#[test]
fn a_parameter_used_on_one_rank_gets_zeros_from_the_others() {
    for text in Launch::new("partly used", 2).argument("some").succeed() {
        assert!(text.starts_with("Some(4.0) Some(2.0) b = -0.6"), "{text}");
    }
}

#[test]
fn a_parameter_used_on_no_rank_is_left_alone() {
    for text in Launch::new("partly used", 2).argument("nobody").succeed() {
        assert_eq!(text, "Some(6.0) None b = 0");
    }
}

/// One step on a parameter of half precision; the gradient has to come back as it went.
fn half() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&device)?;
    let half = |value: f32| Tensor::<B, 1>::full([1], value, &device).cast(FloatDType::F16);
    let model = Toy { w: Param::from_tensor(half(1.0)) };
    let (model, mut replica) = Replica::new(model, &group, ReplicaOptions::new().with_norm())?;
    let mut texts = Vec::new();
    for _ in 0..2 {
        let grads = |x: f32| GradientsParams::from_grads((model.w.val() * half(x)).sum().backward(), &model);
        // Each fits the type, their sum does not.
        replica.no_sync(&model, grads(60000.0))?;
        let reduced = replica.reduce(&model, grads(20000.0))?;
        let gradient = reduced.grads.get::<Ddp<Flex>, 1>(model.w.id).expect("a gradient");
        texts.push(format!("{:?} {:.2e}", gradient.dtype(), gradient.into_data().iter::<f64>().sum::<f64>()));
    }
    Ok(texts.join(" "))
}

#[test]
fn half_precision_gradients_come_back_as_they_went() {
    for world_size in [1, 2] {
        for text in Launch::new("half", world_size).succeed() {
            assert_eq!(text, "F16 4.00e4 F16 4.00e4", "{world_size} ranks");
        }
    }
}

fn one_reduction() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&device)?;
    let (mut model, mut replica) =
        Replica::new(Toy::<B>::new(&device), &group, ReplicaOptions::new().with_clip_norm(1.0))?;
    let mut optimizer = SgdConfig::new().init();
    let before = group.stats();
    for _ in 0..5 {
        let micro_step = |model: &Toy<B>| {
            let loss = model.loss(&[1.0], 1.0);
            MicroStep::new(GradientsParams::from_grads(loss.backward(), model)).with_loss(loss)
        };
        for _ in 0..7 {
            replica.no_sync(&model, micro_step(&model))?;
        }
        let reduced = replica.reduce(&model, micro_step(&model))?;
        model = optimizer.step(0.1, model, reduced.grads);
    }
    let after = group.stats();
    let all = after.total_calls() - before.total_calls();
    Ok(format!("{} {all}", after.calls("all_reduce") - before.calls("all_reduce")))
}

#[test]
fn an_optimizer_step_of_eight_micro_steps_is_one_collective() {
    assert_eq!(Launch::new("one reduction", 2).succeed(), ["5 5", "5 5"]);
}

#[derive(Module, Debug)]
struct Many<B: Backend> {
    params: Vec<Param<Tensor<B, 1>>>,
}

fn two_hundred() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&device)?;
    let params = (0..200).map(|_| Param::from_tensor(Tensor::<B, 1>::ones([64], &device))).collect();
    let (model, mut replica) = Replica::new(Many { params }, &group, ReplicaOptions::new())?;
    let before = group.stats().total_calls();
    let loss = model.params.iter().map(|param| param.val().sum()).reduce(|a, b| a + b).expect("many");
    replica.reduce(
        &model,
        MicroStep::new(GradientsParams::from_grads(loss.backward(), &model)).with_loss(loss),
    )?;
    Ok((group.stats().total_calls() - before).to_string())
}

#[test]
fn two_hundred_small_parameters_are_one_collective() {
    assert_eq!(Launch::new("two hundred", 2).succeed(), ["1", "1"]);
}
