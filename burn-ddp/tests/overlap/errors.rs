//! Mistakes after buckets were sent in a backward pass are errors that tell the remedy.

use burn::module::Module;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn_ddp::{MicroStep, ProcessGroup, Rank, ReduceOp, Replica, ReplicaOptions, Result};

use crate::harness::{Case, Launch, argument};
use crate::leaving::seed;
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[("mistake", mistake)];

/// A good first step, and then the mistake that the argument names.
fn mistake() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let (mut model, mut replica) = Replica::new(Chain::new(), &group, one_bucket_each())?;
    let mut optimizer = SgdConfig::new().init();
    let one = |model: &Chain<B>, step| micro_step(model.loss(seed(group.rank(), step, 0), |_| 0), model);
    let reduced = replica.reduce(&model, one(&model, 0))?;
    model = optimizer.step(0.1, model, reduced.grads);
    match argument().as_str() {
        "no_sync" => replica.no_sync(&model, one(&model, 1))?,
        "weight" => {
            replica.expect_weight(3.0)?;
            replica.reduce(&model, one(&model, 1).with_weight(5.0))?;
        }
        "no expectation" => {
            replica.reduce(&model, one(&model, 1).with_weight(2.0))?;
        }
        "bad expectation" => replica.expect_weight(f64::NAN)?,
        "empty" => {
            drop(one(&model, 1));
            replica.reduce(&model, MicroStep::empty())?;
        }
        "discard" | "discard twice" => {
            let late = one(&model, 1);
            replica.discard();
            if argument() == "discard twice" {
                replica.discard();
            }
            replica.reduce(&model, late)?;
        }
        "discard and go on" => {
            drop(one(&model, 1));
            replica.discard();
            group.barrier()?;
        }
        "drop" => {
            drop(one(&model, 1));
            drop(replica);
            group.barrier()?;
        }
        // Rank 1 does not use the parameter of the first bucket, and so sends nothing in its backward pass.
        "own collective" => {
            let mut used = model.clone();
            if group.rank() == Rank(1) {
                used.layers[4].weight = used.layers[4].weight.clone().no_grad();
            }
            drop(micro_step(used.loss(1, |_| 0), &model));
            assert_eq!(replica.overlap().in_backward == 0, group.rank() == Rank(1));
            own_collective(&group, &replica)?;
        }
        // A cause of its own, found between the backward pass and `reduce`.
        "own error" if group.rank() == Rank(1) => {
            drop(one(&model, 1));
            drop(replica);
            return group.finish(Err(burn_ddp::Error::config("cannot write the log: disk full")));
        }
        "own panic" if group.rank() == Rank(1) => {
            drop(one(&model, 1));
            panic!("disk full");
        }
        "finished" if group.rank() == Rank(1) => {
            drop(one(&model, 1));
            drop(replica);
            return group.finish(Ok("done".into()));
        }
        "own error" | "own panic" | "finished" => drop(replica.reduce(&model, one(&model, 1))?),
        "own collective of one rank" if group.rank() == Rank(1) => own_collective(&group, &replica)?,
        "own collective of one rank" => drop(replica.reduce(&model, one(&model, 1))?),
        "two passes" => {
            drop(one(&model, 1));
            replica.reduce(&model, one(&model, 2))?;
        }
        "a part" => {
            let mut grads = model.loss(1, |_| 0).backward();
            let some = GradientsParams::from_params(&mut grads, &model, &[model.layers[0].weight.id]);
            replica.reduce(&model, some)?;
        }
        "abort" => {
            if group.rank() == Rank(1) {
                group.abort("this rank has had enough");
            }
            replica.reduce(&model, one(&model, 1))?;
        }
        other => panic!("no mistake {other}"),
    }
    Ok("nobody noticed".into())
}

/// As many elements as the bucket that other ranks send first, and reduced in the same way.
fn own_collective(group: &ProcessGroup<G>, replica: &Replica<B>) -> Result<()> {
    let elements = replica.plan().buckets[0].bytes / size_of::<f32>();
    let ones = Tensor::<G, 1>::ones([elements], &Default::default());
    group.all_reduce(ones, ReduceOp::Mean).wait().map(drop)
}

#[test]
fn a_mistake_is_an_error_that_says_what_to_do() {
    let mistakes: &[(&str, &[&str])] = &[
        ("no_sync", &["no_sync after 9 gradient buckets", "micro-step 1", "with_accumulation"]),
        ("weight", &["weight 5", "weight 3", "expect_weight(5)"]),
        ("no expectation", &["weight 2", "weight 1", "expect_weight(2)"]),
        ("bad expectation", &["weight NaN"]),
        ("empty", &["layers.0.weight", "is missing", "with_overlap(false)"]),
        ("discard", &["discarded after 9", "leave the optimizer step out"]),
        ("discard twice", &["discarded after 9", "leave the optimizer step out"]),
        ("discard and go on", &["barrier was called after gradients", "with_overlap(false)"]),
        ("drop", &["dropped after 9", "call `reduce` first"]),
        ("own collective", &["all_reduce was called after gradients", "with_overlap(false)"]),
        (
            "own collective of one rank",
            &["different operations", "all_reduce of gradients #", "all_reduce #"],
        ),
        ("two passes", &["was taken in a backward pass", "is not empty", "with_overlap(false)"]),
        ("a part", &["was taken in a backward pass", "is missing"]),
    ];
    for (name, words) in mistakes {
        for outcome in Launch::new("mistake", 2).argument(name).run() {
            outcome.failed_saying(words);
        }
    }
}

#[test]
fn a_rank_that_leaves_after_a_backward_pass_tells_its_own_cause() {
    let causes: [(&str, &[&str]); 3] = [
        ("own error", &["rank 1 failed", "disk full"]),
        ("own panic", &["rank 1 panicked"]),
        ("finished", &["rank 1 failed", "dropped after 9"]),
    ];
    for (name, words) in causes {
        let outcomes = Launch::new("mistake", 2).argument(name).run();
        outcomes[0].failed_saying(words);
    }
}

#[test]
fn an_error_of_the_group_in_the_backward_pass_comes_out_of_reduce() {
    let outcomes = Launch::new("mistake", 2).argument("abort").run();
    outcomes[0].failed_saying(&[
        "rank 1",
        "gradient bucket 0 (`layers.4.weight`",
        "this rank has had enough",
    ]);
    assert!(!outcomes[0].stderr.contains("panicked"), "{}", outcomes[0].stderr);
}

#[test]
fn sizes_that_cannot_be_meant_are_refused_before_anything_is_sent() {
    let group = ProcessGroup::<G>::solo(&Default::default());
    for (options, text) in [
        (ReplicaOptions::new().with_bucket_bytes(0), "bucket_bytes is 0"),
        (ReplicaOptions::new().with_bucket_bytes(usize::MAX), "bucket_bytes is 18446744073709551615"),
        (ReplicaOptions::new().with_buckets_in_flight(0), "buckets_in_flight is 0"),
    ] {
        let refused = Replica::new(Chain::new(), &group, options).err().expect("refused");
        assert!(refused.to_string().contains(text), "{refused}");
        assert_eq!(refused.exit_code(), 2);
    }
    assert_eq!(group.stats().total_calls(), 0);
}
