//! Collectives of a group give the results that they give over TCP.

use std::fmt::Write;

use burn::tensor::{DType, FloatDType, Int, IntDType, Tensor, TensorData};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{ProcessGroup, Rank, ReduceOp, Result};

use super::host::{B, events, group, into_data, numbers};
use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] =
    &[("collectives", collectives), ("split", split), ("in flight", in_flight), ("lifetime", lifetime)];

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];

fn floats(seed: usize, count: usize) -> Tensor<B, 1> {
    let values: Vec<f32> = (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 7.0 - 5.0).collect();
    Tensor::from_data(TensorData::new(values, [count]), &Default::default())
}

fn ints(seed: usize, count: usize) -> Tensor<B, 1, Int> {
    let values: Vec<i64> = (0..count).map(|i| ((i * 53 + seed * 17) % 97) as i64 - 40).collect();
    Tensor::from_data(TensorData::new(values, [count]), (&Default::default(), DType::I64))
}

/// One line for each result: a name, a shape, numbers.
struct Results(String);

impl Results {
    fn add(&mut self, name: &str, shape: &[usize], values: &[f64]) {
        let values: Vec<String> = values.iter().map(|value| format!("{value:?}")).collect();
        writeln!(self.0, "{name};{shape:?};{}", values.join(" ")).expect("a string");
    }

    fn tensor<const D: usize, K: burn::tensor::BasicOps<B>>(&mut self, name: &str, tensor: Tensor<B, D, K>) {
        let shape = tensor.dims();
        self.add(&format!("{name} {:?}", tensor.dtype()), &shape, &numbers(tensor));
    }
}

fn collectives() -> Result<String> {
    let group = group()?;
    let (rank, size) = (group.rank().0, group.world_size());
    let mut results = Results(String::new());
    for op in OPS {
        let mine = floats(rank, 15).reshape([3, 5]);
        let before = mine.to_data();
        results.tensor("int all_reduce float", group.all_reduce(ints(rank, 9), op).wait()?);
        results.tensor("all_reduce", group.all_reduce(mine.clone(), op).wait()?);
        assert_eq!(mine.to_data(), before, "the caller's tensor stays as it was");
        for dtype in [FloatDType::F64, FloatDType::F16, FloatDType::BF16] {
            results.tensor("all_reduce", group.all_reduce(mine.clone().cast(dtype), op).wait()?);
        }
        results.tensor("int all_reduce", group.all_reduce(ints(rank, 9).cast(IntDType::I32), op).wait()?);
        for count in [7, 8, 2, 1, 12, 0] {
            results.tensor("reduce_scatter", group.reduce_scatter(floats(rank, count), op).wait()?);
            results.tensor("int reduce_scatter", group.reduce_scatter(ints(rank, count), op).wait()?);
        }
    }
    for root in (0..size).map(Rank) {
        results.tensor("int broadcast", group.broadcast(ints(rank, 5), root).wait()?);
        results.tensor("broadcast", group.broadcast(floats(rank, 6).reshape([2, 1, 3]), root).wait()?);
        results.tensor("bool broadcast", group.broadcast(floats(rank, 6).greater_elem(0.0), root).wait()?);
    }
    results.tensor("all_gather", group.all_gather(floats(rank, 6).reshape([2, 3])).wait()?);
    results.tensor("int all_gather", group.all_gather(ints(rank, 3)).wait()?);
    results.tensor("bool all_gather", group.all_gather(floats(rank, 3).greater_elem(0.0)).wait()?);
    results.tensor(
        "all_gather of nothing",
        group.all_gather(Tensor::<B, 2>::empty([0, 3], group.device())).wait()?,
    );
    results.tensor("all_reduce of nothing", group.all_reduce(floats(0, 0), ReduceOp::Sum).wait()?);
    assert!(group.all_reduce_list(Vec::new(), ReduceOp::Sum).wait()?.is_empty());
    lists(&group, &mut results)?;
    let bytes = group.all_gather_bytes(vec![rank as u8; rank])?;
    assert_eq!(bytes, (0..size).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
    let gathered = group.gather_bytes(vec![7; rank], Rank(0)).wait()?;
    assert_eq!(gathered.len(), if rank == 0 { size } else { 0 });
    group.barrier()?;
    Ok(results.0)
}

/// Many tensors at once, none of which may overwrite its neighbour.
fn lists(group: &ProcessGroup<B>, results: &mut Results) -> Result<()> {
    let rank = group.rank().0;
    let sizes: Vec<usize> = (0..40).chain([127, 128, 129, 300, 1, 512]).collect();
    let float = |(index, &count): (usize, &usize)| {
        let flat = floats(rank + index * 3, count * 2);
        // To a reshape, a size of 0 means "as before".
        if count == 0 {
            return AnyTensor::Float(flat.into_primitive().tensor());
        }
        let tensor = flat.reshape([2, count]);
        AnyTensor::Float(tensor.into_primitive().tensor())
    };
    let int =
        |(index, &count): (usize, &usize)| AnyTensor::Int(ints(rank + index * 3, count).into_primitive());
    let of = |make: &dyn Fn((usize, &usize)) -> AnyTensor<B>| -> Vec<AnyTensor<B>> {
        sizes.iter().enumerate().map(make).collect()
    };
    let last = Rank(group.world_size() - 1);
    let works = [
        ("list", group.all_reduce_list(of(&float), ReduceOp::Mean)),
        ("int list", group.all_reduce_list(of(&int), ReduceOp::Sum)),
        ("broadcast list", group.broadcast_list(of(&float), last)),
        ("int broadcast list", group.broadcast_list(of(&int), last)),
    ];
    for (name, work) in works {
        for tensor in work.wait()? {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            let values: Vec<f64> = into_data(tensor).iter().collect();
            results.add(&format!("{name} {dtype:?}"), &shape, &values);
        }
    }
    Ok(())
}

/// Compares names, shapes, integers and results without arithmetic exactly, and other numbers up to rounding.
fn assert_alike(nccl: &str, host: &str) {
    assert_eq!(nccl.lines().count(), host.lines().count());
    for (nccl, host) in nccl.lines().zip(host.lines()) {
        let parts = |line: &str| -> (String, Vec<f64>) {
            let (name, values) = line.rsplit_once(';').expect("three parts");
            let number = |text: &str| text.parse().expect("a number");
            (name.to_owned(), values.split(' ').filter(|text| !text.is_empty()).map(number).collect())
        };
        let ((name, got), (expected_name, expected)) = (parts(nccl), parts(host));
        assert_eq!(name, expected_name);
        assert_eq!(got.len(), expected.len(), "{name}");
        let half = name.contains("F16");
        let exact = ["int", "bool", "broadcast", "gather"].iter().any(|word| name.starts_with(word));
        let tolerance = if exact {
            0.0
        } else if half {
            1e-2
        } else {
            1e-6
        };
        for (got, expected) in got.iter().zip(&expected) {
            let allowed = tolerance * expected.abs().max(1.0);
            assert!((got - expected).abs() <= allowed, "{name}: {got}, over TCP {expected}");
        }
    }
}

#[test]
fn collectives_give_what_they_give_over_tcp() {
    for world_size in 1..=4 {
        let texts = |argument| {
            let launch = Launch::new("collectives", world_size).env("BURN_DDP_CONNECT_ALONE", 1);
            launch.argument(argument).succeed()
        };
        let (nccl, host) = (texts("nccl"), texts("host"));
        assert!(nccl[0].lines().count() > 250, "{}", nccl[0].lines().count());
        nccl.iter().zip(&host).for_each(|(nccl, host)| assert_alike(nccl, host));
    }
}

/// All-reduces in halves with reversed ranks and in the whole group, in turns.
fn split() -> Result<String> {
    let whole = group()?;
    let rank = whole.rank().0;
    let half = whole.split(Some((rank % 2) as u32), -(rank as i64))?.expect("all take part");
    let sum = |group: &ProcessGroup<B>| -> Result<f64> {
        let mine = Tensor::<B, 1>::full([3], 1 << rank, group.device());
        Ok(numbers(group.all_reduce(mine, ReduceOp::Sum).wait()?)[0])
    };
    let text = format!("{} {} {} {}", half.rank(), sum(&half)?, sum(&whole)?, sum(&half)?);
    drop(half);
    let inits = events().iter().filter(|event| **event == "init").count();
    Ok(format!("{text} {} {inits}", sum(&whole)?))
}

#[test]
fn each_part_of_a_group_has_a_communicator_of_its_own() {
    let expected =
        ["rank 1 5 15 5 15 2", "rank 1 10 15 10 15 2", "rank 0 5 15 5 15 2", "rank 0 10 15 10 15 2"];
    assert_eq!(Launch::new("split", 4).succeed(), expected);
}

/// Several at once, waited for from the last to the first; some are dropped.
fn in_flight() -> Result<String> {
    let group = group()?;
    let (rank, size) = (group.rank().0 as f64, group.world_size() as f64);
    let work = |i: usize| {
        let mine = Tensor::<B, 1>::full([i * 50 + 1], i as f64 + rank, group.device());
        group.all_reduce(mine, ReduceOp::Sum)
    };
    let works: Vec<_> = (0..12).map(work).collect();
    for (i, work) in works.into_iter().enumerate().rev() {
        if i % 3 == 1 {
            drop(work);
            continue;
        }
        let expected = i as f64 * size + size * (size - 1.0) / 2.0;
        assert_eq!(numbers(work.wait()?), vec![expected; i * 50 + 1], "work {i}");
    }
    let last = numbers(work(2).wait()?)[0];
    Ok(last.to_string())
}

#[test]
fn works_are_waited_for_in_any_order_or_not_at_all() {
    assert_eq!(Launch::new("in flight", 3).succeed(), ["9", "9", "9"]);
}

/// The calls of NCCL from the start of a group to its end.
fn lifetime() -> Result<String> {
    let group = group()?;
    group.all_reduce(floats(0, 3), ReduceOp::Sum).wait()?;
    drop(group);
    let all = events().into_iter().filter(|event| *event != "in progress");
    Ok(all.collect::<Vec<_>>().join(" "))
}

#[test]
fn a_group_takes_leave_of_nccl() {
    let calls = "init group_start all_reduce group_end enqueued record memory finalize destroy";
    assert_eq!(Launch::new("lifetime", 2).succeed(), [calls; 2]);
}
