//! Ranks that disagree, come late, die or leave: an error that names them, soon, and no communicator left.

use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{ProcessGroup, Rank, ReduceOp, Result};
use rustix::process::Signal;

use super::host::{B, events, group};
use crate::fake::{self, Script, Step};
use crate::harness::{Case, Launch, Outcome, argument, mark};

pub const CASES: &[(&str, Case)] = &[
    ("disagreement", disagreement),
    ("late", late),
    ("killed", killed),
    ("device failure", device_failure),
    ("dropped group", dropped_group),
    ("mixed list", mixed_list),
];

/// Collectives of NCCL never end from now on.
fn hang() {
    fake::play(Script { collective: Step::Never, ..Script::default() });
}

fn tensor(group: &ProcessGroup<B>, count: usize) -> Tensor<B, 1> {
    Tensor::full([count], group.rank().0 as f64, group.device())
}

fn list(group: &ProcessGroup<B>, counts: &[usize]) -> Vec<AnyTensor<B>> {
    let one = |count: &usize| AnyTensor::Float(tensor(group, *count).into_primitive().tensor());
    counts.iter().map(one).collect()
}

/// NCCL, which had a collective in flight, was aborted once, and the memory went after that.
fn aborted_first() {
    let events = events();
    let at = |name| events.iter().enumerate().filter(move |(_, event)| **event == name).map(|(at, _)| at);
    let (aborts, memory): (Vec<_>, Vec<_>) = (at("abort").collect(), at("memory").collect());
    assert!(aborts.len() == 1 && memory.len() == 1 && aborts[0] < memory[0], "{events:?}");
}

/// Checks that the rank ended with an error, and not with the panic of an assertion that has the same words.
fn failed(outcome: &Outcome, words: &[&str]) {
    outcome.failed_saying(words);
    assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
}

/// Ranks start collectives that differ as the argument says.
fn disagreement() -> Result<String> {
    let group = group()?;
    // The others may have failed before this rank is told that the first one is done.
    let first = group.all_reduce(tensor(&group, 4), ReduceOp::Sum).wait();
    hang();
    let odd = group.rank().0 % 2;
    let start = Instant::now();
    let second = match argument().as_str() {
        "count" => group.all_reduce(tensor(&group, 4 + odd), ReduceOp::Sum).wait().map(drop),
        "dtype" if odd == 1 => {
            let ints = Tensor::<B, 1, Int>::zeros([4], group.device());
            group.all_reduce(ints, ReduceOp::Sum).wait().map(drop)
        }
        "op" => group.all_reduce(tensor(&group, 4), [ReduceOp::Sum, ReduceOp::Max][odd]).wait().map(drop),
        "root" => group.broadcast(tensor(&group, 4), Rank(odd)).wait().map(drop),
        "kind" if odd == 1 => group.broadcast(tensor(&group, 4), Rank(0)).wait().map(drop),
        "wire" if odd == 1 => group.barrier(),
        "nothing" if odd == 1 => group.all_reduce_list(Vec::new(), ReduceOp::Sum).wait().map(drop),
        "division" => {
            let counts: [&[usize]; 2] = [&[8], &[3, 5]];
            group.all_reduce_list(list(&group, counts[odd]), ReduceOp::Sum).wait().map(drop)
        }
        _ => group.all_reduce(tensor(&group, 4), ReduceOp::Sum).wait().map(drop),
    };
    let error = first.and(second).expect_err("ranks disagree").to_string();
    assert!(start.elapsed() < Duration::from_secs(3), "{error} after {:?}", start.elapsed());
    let again = group.all_reduce(tensor(&group, 4), ReduceOp::Sum).wait().expect_err("a group that failed");
    drop(group);
    assert_eq!(events().iter().filter(|event| **event == "abort").count(), 1, "{error}");
    Ok(format!("{error}\n{again}"))
}

#[test]
fn ranks_that_disagree_are_an_error_that_names_both() {
    let table = [
        ("count", "4 x f32", "5 x f32"),
        ("dtype", "f32", "i32"),
        ("op", "sum", "max"),
        ("root", "broadcast", "root"),
        ("kind", "all_reduce", "broadcast"),
        ("wire", "all_reduce", "barrier"),
        ("nothing", "4 x f32", "0 x u8"),
        ("division", "8 x f32", "other sizes"),
    ];
    for world_size in [2, 3] {
        for (what, one, other) in table {
            for text in Launch::new("disagreement", world_size).argument(what).succeed() {
                for word in ["rank 0", "rank 1", one, other] {
                    let named = text.contains(word) || (world_size == 3 && word.starts_with("rank"));
                    assert!(named, "{what} of {world_size}: `{word}` is not in: {text}");
                }
            }
        }
    }
}

/// The last rank does not come.
fn late() -> Result<String> {
    let group = group()?;
    group.barrier()?;
    mark("connected");
    if group.rank().0 + 1 == group.world_size() {
        loop {
            std::thread::park();
        }
    }
    let error = group.all_reduce(tensor(&group, 4), ReduceOp::Sum).wait().expect_err("a rank is missing");
    aborted_first();
    Err(error)
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    for world_size in [2, 3] {
        let mut ranks = Launch::new("late", world_size).env("BURN_DDP_TIMEOUT", 1).start();
        (0..world_size).for_each(|rank| ranks.wait_for_mark(rank, "connected"));
        let last = world_size - 1;
        for rank in 0..last {
            assert!(ranks.time_until_end_of(rank) < Duration::from_secs(5), "rank {rank} of {world_size}");
        }
        ranks.signal(last, Signal::KILL);
        for outcome in &ranks.wait()[..last] {
            failed(outcome, &[&format!("rank {last}"), "all_reduce"]);
        }
    }
}

/// All ranks are in a collective that does not end.
fn killed() -> Result<String> {
    let group = group()?;
    hang();
    let work = group.all_reduce(tensor(&group, 1000), ReduceOp::Sum);
    while !events().contains(&"enqueued") {
        std::thread::yield_now();
    }
    mark("in flight");
    let error = work.wait().expect_err("a rank dies");
    aborted_first();
    Err(error)
}

#[test]
fn a_rank_that_dies_in_a_collective_is_named_within_seconds() {
    let mut ranks = Launch::new("killed", 3).start();
    (0..3).for_each(|rank| ranks.wait_for_mark(rank, "in flight"));
    ranks.signal(2, Signal::KILL);
    for rank in 0..2 {
        assert!(ranks.time_until_end_of(rank) < Duration::from_secs(5), "rank {rank}");
    }
    for outcome in &ranks.wait()[..2] {
        failed(outcome, &["rank 2 is lost"]);
    }
}

/// NCCL reports an error on rank 1.
fn device_failure() -> Result<String> {
    let group = group()?;
    hang();
    if group.rank().0 == 1 {
        fake::play(Script { collective: Step::Fails(1), ..Script::default() });
    }
    let error = group.all_reduce(tensor(&group, 4), ReduceOp::Sum).wait().expect_err("the device fails");
    // Others may be told before they have begun.
    if group.rank().0 == 1 {
        aborted_first();
    }
    Err(error)
}

#[test]
fn a_failing_device_is_an_error_on_all_ranks() {
    for outcome in Launch::new("device failure", 3).run() {
        failed(&outcome, &["rank 1", "all_reduce", "unhandled cuda error"]);
    }
}

/// Rank 0 drops the group with a collective in flight and another behind it.
fn dropped_group() -> Result<String> {
    let group = group()?;
    hang();
    let work = group.all_reduce(tensor(&group, 4), ReduceOp::Sum);
    let behind = group.all_reduce(tensor(&group, 4), ReduceOp::Sum);
    if group.rank().is_root() {
        drop((work, behind));
        drop(group);
        return Ok(String::new());
    }
    let errors = [work, behind].map(|work| work.wait().expect_err("it has no end").to_string());
    Ok(errors.join("\n"))
}

#[test]
fn a_group_dropped_with_unfinished_work_ends_it_everywhere() {
    let mut ranks = Launch::new("dropped group", 2).start();
    for rank in 0..2 {
        assert!(ranks.time_until_end_of(rank) < Duration::from_secs(5), "rank {rank}");
    }
    let outcomes = ranks.wait();
    assert!(outcomes.iter().all(|outcome| outcome.status.success()), "{outcomes:?}");
    for line in outcomes[1].text.lines() {
        assert!(line.contains("rank 0") && line.contains("unfinished"), "{line}");
    }
}

/// Tensors of two types in one list.
fn mixed_list() -> Result<String> {
    let group = group()?;
    let mut list = list(&group, &[4, 4]);
    list.push(match argument().ends_with("bool") {
        true => AnyTensor::Bool(tensor(&group, 4).greater_elem(0.0).into_primitive()),
        false => AnyTensor::Int(Tensor::<B, 1, Int>::zeros([4], group.device()).into_primitive()),
    });
    let error = group.broadcast_list(list, Rank(0)).wait().expect_err("two types");
    Ok(error.to_string())
}

#[test]
fn a_list_of_two_types_is_an_error_that_names_both() {
    for (element, name) in [("int", "i32"), ("bool", "u8")] {
        for kind in ["nccl", "host"] {
            let alone = Launch::new("mixed list", 1).env("BURN_DDP_CONNECT_ALONE", 1);
            let expected =
                format!("one collective over tensors of f32 and of {name}: all must have one dtype");
            assert_eq!(alone.argument(format!("{kind} {element}")).succeed(), [expected], "{kind}");
        }
    }
}
