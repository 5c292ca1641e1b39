//! Buckets that leave during the backward pass: how many in every step, and that they change no bit.

use burn::nn::LinearConfig;
use burn::optim::{Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn_ddp::{GradientReduction, ProcessGroup, Rank, Replica, ReplicaOptions, Result};

use crate::harness::{Case, Launch, argument};
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("counts", counts),
    ("lazy", lazy),
    ("jitter", jitter),
    ("unused on one rank", unused_on_one_rank),
    ("used twice", used_twice),
    ("frozen", frozen),
    ("one bucket", one_bucket),
    ("lost marks", lost_marks),
];

fn group() -> Result<ProcessGroup<G>> {
    ProcessGroup::from_env(&Default::default())
}

/// A number for the items of one micro-step of one rank.
pub fn seed(rank: Rank, step: usize, micro: usize) -> usize {
    (step * 8 + micro) * 8 + rank.0
}

fn counts() -> Result<String> {
    let words = argument();
    let (accumulation, how) = words.split_once(' ').expect("two words");
    let accumulation = accumulation.parse().expect("a number");
    let options = match how {
        "told" => one_bucket_each().with_accumulation(accumulation),
        _ => one_bucket_each(),
    };
    let group = group()?;
    with_and_without(&group, Chain::new, options, accumulation, |replica, model, step, micro| {
        Ok(micro_step(model.loss(seed(replica.group().rank(), step, micro), |_| 0), model))
    })
}

#[test]
fn buckets_leave_in_the_last_backward_pass_of_every_step() {
    // The last bucket waits for the loss. Of weights nothing is known before the first micro-step.
    for (argument, first) in [("1 told", 0), ("1 learned", 0), ("4 told", 9), ("4 learned", 0), ("3 told", 9)]
    {
        let wanted = told(first, 9, PARAMS);
        for text in Launch::new("counts", 2).argument(argument).succeed() {
            assert_eq!(text, wanted, "{argument}");
        }
    }
}

#[test]
fn four_ranks_overlap_alike_and_one_has_nothing_to_send() {
    assert_eq!(Launch::new("counts", 4).argument("4 told").succeed(), vec![told(9, 9, PARAMS); 4]);
    assert_eq!(Launch::new("counts", 1).argument("4 told").succeed(), [told(0, 0, 0)]);
}

#[test]
fn a_world_of_one_that_is_connected_overlaps_too() {
    let texts = Launch::new("lazy", 1).env("BURN_DDP_CONNECT_ALONE", 1).succeed();
    assert_eq!(texts, [told(1, 1, 2)]);
}

/// A layer whose parameters are initialized lazily. Its accumulation and weights are known before the first pass.
fn lazy() -> Result<String> {
    let model = || {
        B::seed(&Default::default(), 1);
        Chain { layers: vec![LinearConfig::new(WIDTHS[0], 2).init(&Default::default())] }
    };
    let options = one_bucket_each().with_accumulation(1).with_reduction(GradientReduction::Sum);
    with_and_without(&group()?, model, options, 1, |replica, model, step, micro| {
        Ok(micro_step(model.loss(seed(replica.group().rank(), step, micro), |_| 0), model))
    })
}

/// Ranks are slow in different places, and few buckets may be in flight: how many leave early depends on timing, and
/// the order does not.
fn jitter() -> Result<String> {
    let group = group()?;
    let in_flight: usize = argument().parse().expect("a number");
    let options = ReplicaOptions::new().with_bucket_bytes(1).with_buckets_in_flight(in_flight);
    let told = with_and_without(&group, Chain::new, options, 1, |replica, model, step, micro| {
        let rank = replica.group().rank();
        let pause = |layer: usize| ((rank.0 * 7 + step * 5 + layer * 3) % 4) as u64 * 2;
        Ok(micro_step(model.loss(seed(rank, step, micro), pause), model))
    })?;
    assert!(!told.contains("10, 0"), "the last bucket never leaves early: {told}");
    Ok(told)
}

#[test]
fn ranks_that_are_slow_in_different_places_send_in_one_order() {
    for in_flight in [1, 2, 100] {
        for text in Launch::new("jitter", 3).argument(in_flight).succeed() {
            assert!(text.starts_with("[(0, 10), ("), "{text}");
            assert!(text.matches("(0, 10)").count() < STEPS, "nothing left early: {text}");
        }
    }
}

/// Rank 1 does not use the bias of the third layer.
fn unused_on_one_rank() -> Result<String> {
    let group = group()?;
    with_and_without(&group, Chain::new, one_bucket_each(), 1, |replica, model, step, micro| {
        let rank = replica.group().rank();
        let mut used = model.clone();
        if rank == Rank(1) {
            used.layers[2].bias = None;
        }
        Ok(micro_step(used.loss(seed(rank, step, micro), |_| 0), model))
    })
}

#[test]
fn a_parameter_that_one_rank_does_not_use_holds_its_buckets_back() {
    // Two parameters of each of the layers behind it leave early, and the weight beside it.
    let texts = Launch::new("unused on one rank", 2).succeed();
    assert_eq!(texts, [told(0, 9, PARAMS), told(0, 5, PARAMS)]);
}

fn used_twice() -> Result<String> {
    let group = group()?;
    with_and_without(&group, Chain::new, one_bucket_each(), 1, |replica, model, step, micro| {
        let seed = seed(replica.group().rank(), step, micro);
        let loss = model.loss(seed, |_| 0) + model.loss(seed + 1000, |_| 0);
        Ok(micro_step(loss, model))
    })
}

#[test]
fn a_parameter_used_twice_leaves_once_with_both_contributions() {
    assert_eq!(Launch::new("used twice", 2).succeed(), vec![told(0, 9, PARAMS); 2]);
}

fn frozen() -> Result<String> {
    let model = || {
        let mut model = Chain::new();
        let layer = model.layers.remove(2);
        model.layers.insert(2, burn::module::Module::no_grad(layer));
        model
    };
    let group = group()?;
    with_and_without(&group, model, one_bucket_each(), 1, |replica, model, step, micro| {
        Ok(micro_step(model.loss(seed(replica.group().rank(), step, micro), |_| 0), model))
    })
}

#[test]
fn frozen_parameters_hold_nothing_back() {
    assert_eq!(Launch::new("frozen", 2).succeed(), vec![told(0, 7, 8); 2]);
}

fn one_bucket() -> Result<String> {
    let group = group()?;
    with_and_without(&group, Chain::new, ReplicaOptions::new(), 1, |replica, model, step, micro| {
        Ok(micro_step(model.loss(seed(replica.group().rank(), step, micro), |_| 0), model))
    })
}

#[test]
fn a_model_of_one_bucket_has_nothing_to_overlap() {
    assert_eq!(Launch::new("one bucket", 2).succeed(), vec![told(0, 0, 1); 2]);
}

/// A fork in the third step loses the marks; `mark` puts them back for one backward pass each time.
fn lost_marks() -> Result<String> {
    let group = group()?;
    let mut ends = Vec::new();
    let mut early = Vec::new();
    for overlap in [true, false] {
        let options = one_bucket_each().with_overlap(overlap);
        let (mut model, mut replica) = Replica::new(Chain::new(), &group, options)?;
        let mut optimizer = SgdConfig::new().init();
        let mut before = 0;
        for step in 0..STEPS {
            match step {
                2 => model = burn::module::Module::fork(model, &Default::default()),
                4 => replica.mark(&model),
                _ => {}
            }
            let one = micro_step(model.loss(seed(group.rank(), step, 0), |_| 0), &model);
            let reduced = replica.reduce(&model, one)?;
            model = optimizer.step(0.1, model, reduced.grads);
            let now = replica.overlap().in_backward;
            early.push(now - before);
            before = now;
        }
        ends.push(model.bits());
    }
    assert_eq!(ends[0], ends[1], "lost marks change numbers");
    Ok(format!("{:?}", &early[..STEPS]))
}

#[test]
fn lost_marks_cost_overlap_and_nothing_else() {
    assert_eq!(Launch::new("lost marks", 2).succeed(), vec!["[0, 9, 0, 0, 9, 0]"; 2]);
}
