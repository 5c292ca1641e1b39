//! What ranks agree on before the first step: the same model, rank 0's values, ids and optimizer state.

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor};
use burn_autodiff::Autodiff;
use burn_ddp::{Ddp, MicroStep, ProcessGroup, Replica, ReplicaOptions, Result, replica::verify_parameters};
use burn_flex::Flex;

use crate::harness::{Case, Launch, argument};

pub const CASES: &[(&str, Case)] = &[
    ("seeds", seeds),
    ("values", values),
    ("models", models),
    ("optimizer", optimizer),
    ("strict", strict),
    ("replaced", replaced),
    ("alone", alone),
    ("running state", running_state),
];

type I = Ddp<Flex>;
type B = Autodiff<I>;

fn group() -> Result<ProcessGroup<I>> {
    ProcessGroup::from_env(&Default::default())
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    layers: Vec<Linear<B>>,
    decoder: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(widths: &[[usize; 2]], device: &B::Device) -> Self {
        let linear = |[inputs, outputs]: &[usize; 2]| LinearConfig::new(*inputs, *outputs).init(device);
        Self { layers: widths.iter().map(linear).collect(), decoder: linear(&[4, 4]) }
    }

    fn loss(&self, rank: usize) -> Tensor<B, 1> {
        let device = self.decoder.weight.device();
        let mut x = Tensor::<B, 2>::ones([2, 4], &device) * (rank as f32 + 1.0);
        for layer in &self.layers {
            x = layer.forward(x).tanh();
        }
        self.decoder.forward(x).powi_scalar(2).mean()
    }
}

/// Five steps with another seed on each rank.
fn seeds() -> Result<String> {
    let group = group()?;
    B::seed(group.device(), 1 + group.rank().0 as u64);
    let model = Net::<B>::new(&[[4, 4], [4, 4]], group.device());
    let (mut model, mut replica) = Replica::new(model, &group, ReplicaOptions::new().with_check_every(2))?;
    let before = replica.parameter_hash(&model)?;
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..5 {
        let loss = model.loss(group.rank().0);
        let reduced = replica.reduce(&model, GradientsParams::from_grads(loss.backward(), &model))?;
        model = optimizer.step(0.01, model, reduced.grads);
    }
    replica.verify(&model)?;
    Ok(format!("{before} {}", replica.parameter_hash(&model)?))
}

#[test]
fn replicas_are_equal_before_the_first_step_and_after_the_fifth() {
    for world_size in [2, 4] {
        let ranks = Launch::new("seeds", world_size).succeed();
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{ranks:?}");
        let (before, after) = ranks[0].split_once(' ').expect("two hashes");
        assert_ne!(before, after, "training changed nothing");
    }
}

#[derive(Module, Debug)]
struct Odd<B: Backend> {
    one: Param<Tensor<B, 1>>,
    thousand: Param<Tensor<B, 1>>,
    transposed: Param<Tensor<B, 2>>,
    table: Param<Tensor<B, 2, Int>>,
    lazy: Linear<B>,
}

/// Unusual parameters: what rank 0 has before the broadcast is what everybody has after it.
fn values() -> Result<String> {
    let group = group()?;
    let device = group.device();
    B::seed(device, 7 + group.rank().0 as u64);
    let random = |count: usize| Tensor::<B, 1>::random([count], Distribution::Default, device);
    let model = Odd::<B> {
        one: Param::from_tensor(random(1)),
        thousand: Param::from_tensor(random(1000)),
        transposed: Param::from_tensor(random(12).reshape([3, 4]).transpose()),
        table: Param::initialized(
            burn::module::ParamId::new(),
            Tensor::full([2, 2], group.rank().0 as i64 + 3, device),
        ),
        lazy: LinearConfig::new(3, 5).init(device),
    };
    let text = |model: &Odd<B>| {
        let floats = [model.one.val().into_data(), model.thousand.val().into_data()];
        let matrices = [model.transposed.val().into_data(), model.lazy.weight.val().into_data()];
        let sum = |data: &burn::tensor::TensorData| data.iter::<f64>().sum::<f64>();
        let floats: Vec<f64> = floats.iter().chain(&matrices).map(sum).collect();
        format!(
            "{floats:?} {:?} {}",
            model.table.val().into_data().iter::<i64>().collect::<Vec<_>>(),
            model.transposed.val()
        )
    };
    // Visit order, as the replica materializes lazy parameters.
    let before = text(&model);
    let (model, _) = Replica::new(model, &group, ReplicaOptions::new())?;
    let ids = format!("{} {} {}", model.one.id, model.table.id, model.lazy.weight.id);
    Ok(format!("{before}|{} {ids}", text(&model)))
}

#[test]
fn every_rank_has_rank_zeros_values_and_ids() {
    let ranks = Launch::new("values", 4).succeed();
    let (before, _) = ranks[0].split_once('|').expect("before and after");
    let after: Vec<_> = ranks.iter().map(|rank| rank.split_once('|').expect("before and after").1).collect();
    assert!(after[0].starts_with(before), "rank 0 changed: {}", ranks[0]);
    assert!(after.iter().all(|text| *text == after[0]), "{after:#?}");
    assert!(!ranks[1].starts_with(before), "the ranks must begin with different values");
}

fn models() -> Result<String> {
    let group = group()?;
    if argument() == "shared" {
        let mut model = Net::<B>::new(&[[4, 4], [4, 4]], group.device());
        model.layers[1] = model.layers[0].clone();
        return Replica::new(model, &group, ReplicaOptions::new()).map(|_| String::new());
    }
    let widths: &[[usize; 2]] = match (argument().as_str(), group.rank().0) {
        ("one layer less", 1) => &[[4, 4]],
        ("transposed", 1) => &[[4, 4], [3, 2]],
        ("transposed", _) => &[[4, 4], [2, 3]],
        _ => &[[4, 4], [4, 4]],
    };
    let options = match (argument().as_str(), group.rank().0) {
        ("options", 2) => ReplicaOptions::new().with_clip_norm(0.5),
        _ => ReplicaOptions::new(),
    };
    Replica::new(Net::<B>::new(widths, group.device()), &group, options)?;
    Ok(String::new())
}

#[test]
fn different_models_are_refused_on_all_ranks_by_path_shape_and_rank() {
    for outcome in Launch::new("models", 2).argument("transposed").run() {
        outcome.failed_saying(&["`layers.1.weight`", "[2, 3]", "[3, 2]", "rank 0", "rank 1"]);
    }
    for outcome in Launch::new("models", 3).argument("one layer less").run() {
        outcome.failed_saying(&["`layers.1.weight`", "rank 0", "rank 1", "6 parameters", "4 on rank 1"]);
    }
}

#[test]
fn one_parameter_in_two_places_is_refused_by_both_paths() {
    for outcome in Launch::new("models", 2).argument("shared").run() {
        outcome.failed_saying(&["`layers.0.weight`", "`layers.1.weight`"]);
    }
    Launch::new("models", 1).argument("shared").succeed();
}

#[test]
fn different_options_are_refused_on_all_ranks() {
    for outcome in Launch::new("models", 3).argument("options").run() {
        outcome.failed_saying(&["options differ", "rank 0", "rank 2", "clip_norm: Some(0.5)"]);
    }
}

/// Rank 0 has momentum; the others take it over and go on alike.
fn optimizer() -> Result<String> {
    let group = group()?;
    B::seed(group.device(), 5);
    let (mut model, mut replica) =
        Replica::new(Net::<B>::new(&[[4, 4]], group.device()), &group, ReplicaOptions::new())?;
    let mut optimizer = AdamConfig::new().init();
    if group.rank().is_root() && argument() != "fresh" {
        let loss = model.loss(3);
        // Its own state only: the model it steps is thrown away.
        let _ = optimizer.step(0.1, model.clone(), GradientsParams::from_grads(loss.backward(), &model));
    }
    let mut optimizer = replica.broadcast_optimizer(optimizer, &model)?;
    for _ in 0..2 {
        let loss = model.loss(group.rank().0);
        let reduced = replica.reduce(&model, GradientsParams::from_grads(loss.backward(), &model))?;
        model = optimizer.step(0.1, model, reduced.grads);
    }
    replica.verify(&model)?;
    Ok(replica.parameter_hash(&model)?.to_string())
}

#[test]
fn optimizer_state_is_taken_from_rank_zero() {
    let ranks = Launch::new("optimizer", 3).succeed();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{ranks:?}");
    assert_ne!(ranks, Launch::new("optimizer", 3).argument("fresh").succeed(), "the state was lost");
}

/// Rank 1's gradients lack `decoder.bias`.
fn strict() -> Result<String> {
    let group = group()?;
    let options = ReplicaOptions::new();
    let options = if argument() == "strict" { options.with_strict() } else { options };
    let (mut model, mut replica) = Replica::new(Net::<B>::new(&[[4, 4]], group.device()), &group, options)?;
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..3 {
        let loss = model.loss(group.rank().0);
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        if group.rank().0 == 1 {
            let bias = model.decoder.bias.as_ref().expect("made with one");
            grads.remove::<I, 1>(bias.id).expect("a gradient");
        }
        let reduced = replica.reduce(&model, grads)?;
        model = optimizer.step(0.1, model, reduced.grads);
    }
    replica.verify(&model)?;
    Ok(String::new())
}

#[test]
fn a_missing_gradient_is_an_error_by_name_in_strict_mode_and_zero_otherwise() {
    for outcome in Launch::new("strict", 3).argument("strict").run() {
        outcome.failed_saying(&["`decoder.bias`", "[4]", "rank 1"]);
        assert!(!outcome.stderr.contains("rank 2"), "{}", outcome.stderr);
    }
    Launch::new("strict", 3).argument("default").succeed();
}

/// A layer is replaced between two steps.
fn replaced() -> Result<String> {
    let group = group()?;
    let (mut model, mut replica) =
        Replica::new(Net::<B>::new(&[[4, 4], [4, 4]], group.device()), &group, ReplicaOptions::new())?;
    for step in 0..2 {
        if step == 1 && (argument() == "everywhere" || group.rank().0 == 1) {
            model.layers[1] = LinearConfig::new(4, 4).init(group.device());
        }
        let loss = model.loss(group.rank().0);
        replica.reduce(&model, GradientsParams::from_grads(loss.backward(), &model))?;
    }
    Ok(String::new())
}

#[test]
fn a_changed_set_of_parameters_is_an_error() {
    for outcome in Launch::new("replaced", 2).argument("everywhere").run() {
        outcome.failed_saying(&["parameter set changed", "`layers.1.weight`"]);
    }
    for outcome in Launch::new("replaced", 2).argument("on one rank").run() {
        outcome.failed_saying(&["parameter set changed", "`layers.1.weight`"]);
    }
}

/// Each rank trains alone; the check finds out.
fn alone() -> Result<String> {
    type Plain = Autodiff<Ddp<Flex>>;
    let group = group()?;
    Plain::seed(group.device(), 3);
    let mut model = Net::<Plain>::new(&[[4, 4]], group.device());
    let mut optimizer = AdamConfig::new().init();
    for step in 1..4 {
        let loss = model.loss(group.rank().0);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.1, model, grads);
        verify_parameters(&model, &group, step)?;
    }
    Ok(String::new())
}

#[test]
fn ranks_that_train_alone_are_found_out() {
    for outcome in Launch::new("alone", 2).run() {
        outcome.failed_saying(&["ranks differ at step 1", "`layers.0.weight`", "rank 1"]);
    }
}

#[derive(Module, Debug)]
struct Normed<B: Backend> {
    inner: Linear<B>,
    norm: BatchNorm<B>,
}

/// Rank 0 has seen data before start-up; then each rank sees other data and trains.
fn running_state() -> Result<String> {
    let group = group()?;
    let device = group.device();
    let model = Normed::<B> {
        inner: LinearConfig::new(2, 2).init(device),
        norm: BatchNormConfig::new(2).init(device),
    };
    let forward = |model: &Normed<B>, value: f32| {
        let x = Tensor::<B, 3>::ones([2, 2, 4], device) * value;
        model.norm.forward(x)
    };
    if group.rank().is_root() {
        let _ = forward(&model, 10.0);
    }
    let mean =
        |model: &Normed<B>| format!("{:?}", model.norm.running_mean.value_sync().into_data().to_vec::<f32>());
    let (mut model, mut replica) = Replica::new(model, &group, ReplicaOptions::new())?;
    let at_start = mean(&model);
    let mut optimizer = AdamConfig::new().init();
    for step in 0..2 {
        let loss = forward(&model, group.rank().0 as f32 + step as f32).powi_scalar(2).mean()
            + model.inner.forward(Tensor::<B, 2>::ones([1, 2], device)).mean();
        let micro_step = MicroStep::new(GradientsParams::from_grads(loss.backward(), &model));
        let reduced = replica.reduce(&model, micro_step)?;
        model = optimizer.step(0.1, model, reduced.grads);
    }
    replica.verify(&model)?;
    Ok(format!("{at_start}|{}", mean(&model)))
}

#[test]
fn running_states_start_as_rank_zeros_and_are_never_reduced() {
    let ranks = Launch::new("running state", 2).succeed();
    let split: Vec<_> = ranks.iter().map(|rank| rank.split_once('|').expect("two")).collect();
    assert_eq!(split[0].0, split[1].0, "the start differs");
    assert!(split[0].0.contains("1.0"), "rank 0's state of 0.1 * 10 was not sent: {}", split[0].0);
    assert_ne!(split[0].1, split[1].1, "each rank has seen other data");
}
