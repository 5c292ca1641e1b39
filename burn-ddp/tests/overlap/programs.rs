//! Programs other than a plain loop: two replicas, weights, ranks without items, layers that communicate.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn_ddp::nn::SyncGroup;
use burn_ddp::{GradientReduction, MicroStep, ProcessGroup, ReduceOp, Replica, ReplicaOptions, Result};

use crate::harness::{Case, Launch, argument};
use crate::leaving::seed;
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("two replicas", two_replicas),
    ("twins", twins),
    ("weights", weights),
    ("layers", layers),
    ("checked", checked),
];

fn group() -> Result<ProcessGroup<G>> {
    ProcessGroup::from_env(&Default::default())
}

/// A generator and a critic, each with a replica. The generator's loss passes through the critic, whose gradients in
/// that backward pass belong to no replica. `frozen`: it passes through a copy of the critic that is not trained.
/// `one bucket`, `afterwards`: no gradient of the generator could leave early anyway.
fn two_replicas() -> Result<String> {
    let group = group()?;
    let frozen = argument() == "frozen";
    let mut ends = Vec::new();
    let mut early = Vec::new();
    for overlap in [true, false] {
        let options = one_bucket_each().with_overlap(overlap);
        let linear = |inputs, outputs, seed| {
            let mut linear: Linear<B> = LinearConfig::new(inputs, outputs).init(&Default::default());
            linear.weight = burn::module::Param::from_tensor(filled([inputs, outputs], seed));
            linear.bias = Some(burn::module::Param::from_tensor(filled([outputs], seed + 1)));
            linear
        };
        let of_generator = match argument().as_str() {
            "one bucket" => ReplicaOptions::new().with_overlap(overlap),
            "afterwards" => options.clone().with_overlap(false),
            _ => options.clone(),
        };
        let (mut generator, mut of_generator) =
            Replica::new(vec![linear(3, 4, 1), linear(4, 5, 3)], &group, of_generator)?;
        let (mut critic, mut of_critic) =
            Replica::new(vec![linear(5, 6, 5), linear(6, 1, 7)], &group, options)?;
        let (mut optimizer_g, mut optimizer_c) = (SgdConfig::new().init(), SgdConfig::new().init());
        let through = |model: &Vec<Linear<B>>, x: Tensor<B, 2>| {
            model.iter().fold(x, |x, layer| layer.forward(x).tanh())
        };
        for step in 0..STEPS {
            let seed = seed(group.rank(), step, 0);
            let fake = through(&generator, filled([4, 3], 100 + seed)).detach();
            let loss = through(&critic, fake).mean() - through(&critic, filled([4, 5], 900 + seed)).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &critic);
            let reduced = of_critic.reduce(&critic, grads)?;
            critic = optimizer_c.step(0.1, critic, reduced.grads);

            let judge = if frozen { critic.clone().no_grad() } else { critic.clone() };
            let loss = -through(&judge, through(&generator, filled([4, 3], 500 + seed))).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &generator);
            let reduced = of_generator.reduce(&generator, grads)?;
            generator = optimizer_g.step(0.1, generator, reduced.grads);
        }
        of_generator.verify(&generator)?;
        of_critic.verify(&critic)?;
        let bits = |model: &Vec<Linear<B>>| Chain { layers: model.clone() }.bits();
        ends.push((bits(&generator), bits(&critic)));
        early.push((of_generator.overlap().in_backward, of_critic.overlap().in_backward));
    }
    assert_eq!(ends[0], ends[1], "overlap changes numbers");
    assert_eq!(early[1], (0, 0));
    Ok(format!("{:?}", early[0]))
}

#[test]
fn a_backward_pass_through_two_replicas_is_reduced_afterwards() {
    for argument in ["both", "one bucket", "afterwards"] {
        assert_eq!(
            Launch::new("two replicas", 2).argument(argument).succeed(),
            ["(0, 0)", "(0, 0)"],
            "{argument}"
        );
    }
}

#[test]
fn a_frozen_copy_of_the_other_model_lets_both_overlap() {
    // Three of four buckets, in all steps but the first.
    assert_eq!(Launch::new("two replicas", 2).argument("frozen").succeed(), ["(15, 15)", "(15, 15)"]);
}

/// Two models of equal sizes: both backward passes, and then the calls that the argument names.
fn twins() -> Result<String> {
    let group = group()?;
    let mut ends = Vec::new();
    let mut early = Vec::new();
    for overlap in [true, false] {
        let options =
            ReplicaOptions::new().with_bucket_bytes(1).with_buckets_in_flight(1).with_overlap(overlap);
        let (mut one, mut of_one) = Replica::new(Chain::new(), &group, options.clone())?;
        let (mut other, mut of_other) = Replica::new(Chain::new(), &group, options)?;
        let (mut optimizer_1, mut optimizer_2) = (SgdConfig::new().init(), SgdConfig::new().init());
        for step in 0..STEPS {
            let rank = group.rank();
            let pause = |layer: usize| ((rank.0 * 7 + step * 5 + layer * 3) % 4) as u64 * 2;
            let first = micro_step(one.loss(seed(rank, step, 0), pause), &one);
            let second = micro_step(other.loss(seed(rank, step, 1), pause), &other);
            let (first, second) = match argument().as_str() {
                "in order" => {
                    let first = of_one.reduce(&one, first)?;
                    (first, of_other.reduce(&other, second)?)
                }
                "reversed" => {
                    let second = of_other.reduce(&other, second)?;
                    (of_one.reduce(&one, first)?, second)
                }
                _ => {
                    group.all_reduce(Tensor::<G, 1>::ones([2], &Default::default()), ReduceOp::Sum).wait()?;
                    (of_one.reduce(&one, first)?, of_other.reduce(&other, second)?)
                }
            };
            one = optimizer_1.step(0.1, one, first.grads);
            other = optimizer_2.step(0.1, other, second.grads);
        }
        of_one.verify(&one)?;
        of_other.verify(&other)?;
        ends.push((one.bits(), other.bits()));
        early.push((of_one.overlap().in_backward, of_other.overlap().in_backward));
    }
    assert_eq!(ends[0], ends[1], "overlap changes numbers");
    assert!(early[0].0 > 0, "nothing left early");
    Ok(format!("{} {:?}", early[0].1, early[1]))
}

#[test]
fn one_replica_at_a_time_sends_in_its_backward_pass() {
    assert_eq!(Launch::new("twins", 2).argument("in order").succeed(), vec!["0 (0, 0)"; 2]);
    for (argument, operation) in [("reversed", "all_reduce of gradients"), ("all_reduce", "all_reduce")] {
        for outcome in Launch::new("twins", 2).argument(argument).run() {
            let refusal = format!("{operation} was called after gradients of a replica");
            outcome.failed_saying(&[&refusal, "with_overlap(false)"]);
        }
    }
}

/// Ranks and micro-steps count differently; in odd steps the last micro-step of rank 1 has no items.
fn weights() -> Result<String> {
    let group = group()?;
    let expected = argument() != "unexpected";
    let options = one_bucket_each().with_accumulation(3);
    let options = match argument().as_str() {
        "sum" => options.with_reduction(GradientReduction::Sum),
        _ => options,
    };
    with_and_without(&group, Chain::new, options, 3, |replica, model, step, micro| {
        let rank = replica.group().rank();
        let weight = ((rank.0 + micro + step) % 3 + 1) as f64;
        if rank.0 == 1 && step % 2 == 1 && micro == 2 {
            return Ok(MicroStep::empty());
        }
        if expected && micro == 2 {
            replica.expect_weight(weight)?;
        }
        Ok(micro_step(model.loss(seed(rank, step, micro), |_| 0), model).with_weight(weight))
    })
}

#[test]
fn weighted_micro_steps_overlap_if_the_weight_is_told() {
    for argument in ["expected", "sum"] {
        let texts = Launch::new("weights", 2).argument(argument).succeed();
        assert_eq!(texts[0], told(9, 9, PARAMS));
        assert_eq!(texts[1], "[(9, 1), (0, 10), (9, 1), (0, 10), (9, 1), (0, 10)]");
    }
    assert_eq!(Launch::new("weights", 2).argument("unexpected").succeed(), vec![told(0, 0, PARAMS); 2]);
}

/// While layers of the group may communicate in the backward pass, buckets wait.
fn layers() -> Result<String> {
    let group = group()?;
    // Those of a part hold back the whole's.
    let part = match argument().as_str() {
        "part" => group.split(Some(0), 0)?,
        _ => None,
    };
    let sync = SyncGroup::new(part.as_ref().unwrap_or(&group));
    with_and_without(&group, Chain::new, one_bucket_each(), 1, |replica, model, step, micro| {
        let rank = replica.group().rank();
        let loss = model.loss(seed(rank, step, micro), |_| 0);
        Ok(micro_step(sync.all_reduce_sum(loss), model))
    })
}

#[test]
fn buckets_wait_where_layers_communicate_in_the_backward_pass() {
    for argument in ["whole", "part"] {
        assert_eq!(Launch::new("layers", 2).argument(argument).succeed(), vec![told(0, 0, PARAMS); 2]);
    }
}

/// Other collectives of a replica come after all buckets, independently of how many left early.
fn checked() -> Result<String> {
    let group = group()?;
    let options = one_bucket_each().with_check_every(1).with_strict().with_clip_norm(0.01);
    with_and_without(&group, Chain::new, options, 1, |replica, model, step, micro| {
        let rank = replica.group().rank();
        if rank.0 == 1 && step == 3 {
            // Without items, and so without a backward pass.
            return Ok(MicroStep::empty());
        }
        Ok(micro_step(model.loss(seed(rank, step, micro), |_| 0), model))
    })
}

#[test]
fn checks_and_norms_come_after_all_buckets() {
    let texts = Launch::new("checked", 2).succeed();
    assert_eq!(texts[0], told(0, 9, PARAMS));
    assert_eq!(texts[1], "[(0, 10), (9, 1), (9, 1), (0, 10), (9, 1), (9, 1)]");
}
