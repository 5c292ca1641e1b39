//! Data that are uneven, endless, sharded twice or broken: every rank ends, and every item is used once.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{self, DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::Dataset;
use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_ddp::data::{self, DataLoaderBuilder, Lockstep, Uneven};
use burn_ddp::{Ddp, MicroStep, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch, argument};

pub const CASES: &[(&str, Case)] = &[
    ("uneven", uneven),
    ("streams", streams),
    ("items", items),
    ("validation", validation),
    ("broken data", broken_data),
    ("devices", devices),
    ("verified", verified),
];

type G = Ddp<Flex>;
type B = Autodiff<G>;
type Device = <G as burn::tensor::backend::BackendTypes>::Device;

fn group() -> Result<ProcessGroup<G>> {
    ProcessGroup::from_env(&Default::default())
}

/// A stream of batches, which counts its items or not.
struct Stream {
    batches: std::vec::IntoIter<Vec<f32>>,
    processed: usize,
    counts: bool,
}

impl Stream {
    fn boxed(batches: &[&[f32]], counts: bool) -> Box<dyn DataLoaderIterator<Vec<f32>>> {
        let batches: Vec<_> = batches.iter().map(|batch| batch.to_vec()).collect();
        Box::new(Self { batches: batches.into_iter(), processed: 0, counts })
    }
}

impl Iterator for Stream {
    type Item = Vec<f32>;

    fn next(&mut self) -> Option<Vec<f32>> {
        let batch = self.batches.next()?;
        self.processed += if self.counts { batch.len() } else { 0 };
        Some(batch)
    }
}

impl DataLoaderIterator<Vec<f32>> for Stream {
    fn progress(&self) -> Progress {
        Progress::new(self.processed, 0)
    }
}

/// `loss = mean(w * x)`, so the gradient is `mean(x)`.
#[derive(Module, Debug)]
struct Toy<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

impl Toy<B> {
    fn new(device: &Device) -> Self {
        Self { w: Param::from_tensor(Tensor::zeros([1], device)) }
    }

    fn micro_step(&self, batch: Option<&[f32]>, items: usize) -> MicroStep<B> {
        let Some(batch) = batch.filter(|batch| !batch.is_empty()) else { return MicroStep::empty() };
        let x = Tensor::<B, 1>::from_data(TensorData::from(batch), &self.w.device());
        let loss = (self.w.val() * x).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), self);
        MicroStep::new(gradients).with_loss(loss).with_weight(items as u32)
    }
}

/// Trains on uneven batches; returns the optimizer steps, `w`, the counted items, and the hash.
fn uneven() -> Result<String> {
    let group = group()?;
    let argument = argument();
    let (name, policy) = argument.split_once(' ').expect("two words");
    let batches: &[&[f32]] = match (name, group.rank().0) {
        ("three-and-two", 0) => &[&[1., 1.], &[1., 1.], &[4., 6.]],
        ("three-and-two", _) => &[&[3., 3.], &[3., 3.]],
        ("empty", 0) => &[&[1.], &[], &[1.]],
        ("empty", _) => &[&[1.], &[7.], &[1.]],
        ("counts", 0) => &[&[7.]],
        ("counts", 1) => &[&[1., 1., 1.]],
        ("counts", 2) => &[],
        ("counts", _) => &[&[1., 1.]],
        other => panic!("no data {other:?}"),
    };
    let uneven = if policy == "truncate" { Uneven::Truncate } else { Uneven::Join };
    let (mut model, mut replica) = Replica::new(Toy::new(group.device()), &group, ReplicaOptions::new())?;
    let mut optimizer = SgdConfig::new().init();
    let mut lockstep = Lockstep::new(Stream::boxed(batches, true), &group, uneven);
    let (mut steps, mut counted, mut ended) = (0, 0, false);
    while let Some(round) = lockstep.next(false)? {
        assert!(!ended, "a round after the last");
        ended = round.last;
        let skip = policy == "skip-together" && {
            let all = group.all_gather_bytes(vec![u8::from(round.items == 0)])?;
            all.concat().contains(&1)
        };
        if skip {
            continue;
        }
        counted += round.items_all;
        let reduced = replica.reduce(&model, model.micro_step(round.batch.as_deref(), round.items))?;
        model = optimizer.step(0.1, model, reduced.grads);
        steps += 1;
    }
    assert!(ended && lockstep.next(false)?.is_none());
    let w: f32 = model.w.val().into_scalar();
    Ok(format!("{steps} {w:.4} {counted} {}", replica.parameter_hash(&model)?))
}

#[test]
fn ranks_with_different_numbers_of_batches_take_the_same_steps() {
    let table = [
        // Steps 2 and 2, then 5 for rank 0 alone.
        ("three-and-two join", 2, "3 -0.9000 10 "),
        ("three-and-two truncate", 2, "2 -0.4000 8 "),
        // 1, then the 7 of rank 1 alone or nothing, then 1.
        ("empty zeros", 2, "3 -0.9000 5 "),
        ("empty skip-together", 2, "2 -0.2000 4 "),
        // (7 + 3 + 0 + 2) / 6
        ("counts join", 4, "1 -0.2000 6 "),
    ];
    for (argument, world, expected) in table {
        let ranks = Launch::new("uneven", world).argument(argument).succeed();
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{argument}: {ranks:?}");
        assert!(ranks[0].starts_with(expected), "{argument}: {}", ranks[0]);
    }
}

/// Iterates twice over streams of 5 and 4 batches that do not count items; returns the rounds, each compared with that
/// of the other rank.
fn streams() -> Result<String> {
    let group = group()?;
    let uneven = if argument() == "join" { Uneven::Join } else { Uneven::Truncate };
    let batches = vec![[1.0f32].as_slice(); 5 - group.rank().0];
    let mut texts = Vec::new();
    for epoch in 0..2u8 {
        let mut lockstep = Lockstep::new(Stream::boxed(&batches, false), &group, uneven);
        let mut rounds = Vec::new();
        while let Some(round) = lockstep.next(false)? {
            let all = group.all_gather_bytes(vec![epoch, rounds.len() as u8])?;
            assert_eq!(all[0], all[1]);
            rounds.push(format!("{}{}", round.items_all, if round.last { "." } else { "" }));
        }
        texts.push(rounds.join(" "));
    }
    // A stop that one rank requests ends all.
    let mut lockstep = Lockstep::new(Stream::boxed(&batches, false), &group, uneven);
    let mut rounds = 0;
    while let Some(round) = lockstep.next(group.rank().0 == 1 && rounds == 2)? {
        rounds += 1;
        assert_eq!(round.stop, round.last);
    }
    texts.push(rounds.to_string());
    Ok(texts.join(" | "))
}

#[test]
fn streams_of_unknown_length_end_together() {
    for text in Launch::new("streams", 2).argument("truncate").succeed() {
        assert_eq!(text, "2 2 2 2. | 2 2 2 2. | 3");
    }
    for text in Launch::new("streams", 2).argument("join").succeed() {
        assert_eq!(text, "2 2 2 2 1. | 2 2 2 2 1. | 3");
    }
}

/// Numbers, one of which may be bad.
#[derive(Clone)]
struct Numbers {
    range: std::ops::Range<usize>,
    bad: Option<(usize, bool)>,
}

impl Numbers {
    fn of(range: std::ops::Range<usize>) -> Self {
        Self { range, bad: None }
    }
}

impl Dataset<usize> for Numbers {
    fn get(&self, index: usize) -> Option<usize> {
        match self.bad {
            Some((bad, true)) if bad == index => panic!("bad row 13"),
            Some((bad, false)) if bad == index => None,
            _ => self.range.clone().nth(index),
        }
    }

    fn len(&self) -> usize {
        self.range.len()
    }
}

#[derive(Clone)]
struct Collect;

impl<B: Backend> Batcher<B, usize, Vec<usize>> for Collect {
    fn batch(&self, items: Vec<usize>, _: &B::Device) -> Vec<usize> {
        items
    }
}

type Loader = Arc<dyn DataLoader<B, Vec<usize>>>;

fn burns(data: Numbers, batch: usize, seed: Option<u64>) -> Loader {
    let builder = dataloader::DataLoaderBuilder::<B, _, _>::new(Collect).batch_size(batch);
    match seed {
        Some(seed) => builder.shuffle(seed).num_workers(1),
        None => builder,
    }
    .build(data)
}

/// Builds the loader that the first word of the argument names; the next words are the numbers of items and of items a
/// batch.
fn loader(words: &[&str], group: &ProcessGroup<G>) -> Result<Loader> {
    let number = |at: usize| words[at].parse::<usize>().expect("a number");
    let (items, batch, rank) = (number(1), number(2), group.rank().0);
    let all = Numbers::of(0..items);
    Ok(match words[0] {
        "built" => DataLoaderBuilder::new(Collect, group).batch_size(batch).shuffle(1).build(all)?,
        "built-sliced" => data::slice(loader(&[&["built"], &words[1..]].concat(), group)?, group),
        "slice" => data::slice(burns(all, batch, None), group),
        "slice-twice" => data::slice(data::slice(burns(all, batch, None), group), group),
        "stride" => data::stride(burns(all, batch, Some(7)), group),
        "stride-slice" => data::stride(data::slice(burns(all, batch, None), group), group),
        "local" => data::local(burns(Numbers::of(rank * items..(rank + 1) * items), batch, None), group),
        "local-slice" => data::slice(loader(&[&["local"], &words[1..]].concat(), group)?, group),
        other => panic!("no loader {other}"),
    })
}

/// Iterates over three epochs of a loader; returns the items of each.
fn items() -> Result<String> {
    let group = group()?;
    let argument = argument();
    let loader = loader(&argument.split(' ').collect::<Vec<_>>(), &group)?;
    data::verify(&loader, &group)?;
    let mut epochs = Vec::new();
    for _ in 0..3 {
        let mut seen = Vec::new();
        let mut lockstep = Lockstep::new(loader.iter(), &group, Uneven::Join);
        let mut all = 0;
        while let Some(round) = lockstep.next(false)? {
            let batch = round.batch.unwrap_or_default();
            assert_eq!(batch.len(), round.items);
            all += round.items_all;
            assert_eq!(round.progress.items_processed, all);
            seen.extend(batch.iter().map(usize::to_string));
        }
        epochs.push(seen.join(" "));
    }
    Ok(epochs.join(";"))
}

/// Items of each rank in each epoch.
fn epochs(argument: &str, world: usize) -> Vec<Vec<Vec<usize>>> {
    let texts = Launch::new("items", world).argument(argument).succeed();
    let ranks: Vec<Vec<Vec<usize>>> = texts
        .iter()
        .map(|text| {
            let numbers =
                |text: &str| text.split_whitespace().map(|n| n.parse().expect("a number")).collect();
            text.split(';').map(numbers).collect()
        })
        .collect();
    (0..3).map(|epoch| ranks.iter().map(|rank| rank[epoch].clone()).collect()).collect()
}

fn used_once(ranks: &[Vec<usize>], items: usize) {
    let mut all = ranks.concat();
    all.sort_unstable();
    assert_eq!(all, (0..items).collect::<Vec<_>>());
}

#[test]
fn every_item_is_used_once_by_default() {
    // Burn's own splitter gives 1 and 2 batches here.
    for ranks in epochs("built 11 5", 2) {
        used_once(&ranks, 11);
        assert_eq!(ranks.iter().map(Vec::len).collect::<Vec<_>>(), [7, 4]);
    }
    // Fewer items in a batch than ranks.
    epochs("built 5 2", 3).iter().for_each(|ranks| used_once(ranks, 5));
}

#[test]
fn every_epoch_has_another_order_that_all_ranks_share() {
    let first = epochs("built 16 4", 2);
    first.iter().for_each(|ranks| used_once(ranks, 16));
    let orders: BTreeSet<_> = first.iter().collect();
    assert_eq!(orders.len(), 3, "{first:?}");
    assert_eq!(epochs("built 16 4", 2), first, "run again");
}

#[test]
fn data_are_sharded_once() {
    for argument in [
        "slice 40 3",
        "slice-twice 40 3",
        "built 40 4",
        "built-sliced 40 4",
        "stride 40 5",
        "local-slice 10 4",
    ] {
        for ranks in epochs(argument, 4) {
            used_once(&ranks, 40);
            assert!(ranks.iter().all(|items| items.len() == 10), "{argument}: {ranks:?}");
        }
    }
    for ranks in epochs("stride-slice 40 3", 4) {
        assert_eq!(ranks[1], (10..20).collect::<Vec<_>>());
    }
    for ranks in epochs("local 10 4", 4) {
        assert_eq!(ranks[3], (30..40).collect::<Vec<_>>());
    }
    // The last round of batches is not complete, and neither is its last batch.
    epochs("stride 23 3", 3).iter().for_each(|ranks| used_once(ranks, 23));
}

/// Counts items and right answers of a validation set in which only item 0 is answered wrongly.
fn validation() -> Result<String> {
    let group = group()?;
    let data = Numbers::of(0..21);
    let loader: Arc<dyn DataLoader<G, Vec<usize>>> = match argument().as_str() {
        "slice" => {
            let loader = dataloader::DataLoaderBuilder::new(Collect).batch_size(4).build(data);
            data::slice(loader, &group)
        }
        _ => DataLoaderBuilder::new(Collect, &group).batch_size(8).build(data)?,
    };
    let mut lockstep = Lockstep::new(loader.iter(), &group, Uneven::Join);
    let (mut counted, mut right) = (0, 0);
    while let Some(round) = lockstep.next(false)? {
        let mine = round.batch.unwrap_or_default().iter().filter(|item| **item != 0).count();
        counted += round.items_all;
        right +=
            group.all_gather_bytes(vec![mine as u8])?.iter().map(|all| usize::from(all[0])).sum::<usize>();
    }
    Ok(format!("{counted} {:.6}", right as f64 / counted as f64))
}

#[test]
fn validation_counts_every_item_once() {
    for argument in ["slice", "built"] {
        for world in [1, 2, 3] {
            for text in Launch::new("validation", world).argument(argument).succeed() {
                assert_eq!(text, "21 0.952381", "{argument} on {world} ranks");
            }
        }
    }
}

/// Trains on data of which rank 1's second batch is bad.
fn broken_data() -> Result<String> {
    let group = group()?;
    let argument = argument();
    let words: Vec<_> = argument.split(' ').collect();
    let mut data = Numbers::of(0..16);
    let workers = words[2].parse().expect("a number");
    let loader: Loader = match words[0] {
        "built" => {
            data.bad = (group.rank().0 == 1).then_some((6, words[1] == "panic"));
            DataLoaderBuilder::new(Collect, &group).batch_size(4).num_workers(workers).build(data)?
        }
        _ => {
            data.bad = (group.rank().0 == 1).then_some((10, words[1] == "panic"));
            data::slice(burns(data, 2, None), &group)
        }
    };
    let (mut model, mut replica) = Replica::new(Toy::new(group.device()), &group, ReplicaOptions::new())?;
    let mut optimizer = SgdConfig::new().init();
    let mut lockstep = Lockstep::new(loader.iter(), &group, Uneven::Join);
    while let Some(round) = lockstep.next(false)? {
        let batch = round.batch.map(|batch| batch.iter().map(|item| *item as f32).collect::<Vec<_>>());
        let reduced = replica.reduce(&model, model.micro_step(batch.as_deref(), round.items))?;
        model = optimizer.step(0.1, model, reduced.grads);
    }
    Ok("an epoch".into())
}

#[test]
fn broken_data_on_one_rank_stop_all_with_the_cause() {
    let none = "Dataset::get returned None for item 6 of 16";
    let table = [
        ("built panic 0", "bad row 13 (in Dataset::get of item 6 of 16)"),
        ("built panic 2", "bad row 13 (in Dataset::get of item 6 of 16)"),
        ("built none 0", none),
        ("built none 2", none),
        ("sliced panic 0", "bad row 13"),
        ("sliced none 0", "ended after 2 of 8 items"),
    ];
    for (argument, text) in table {
        let mut ranks = Launch::new("broken data", 2).argument(argument).start();
        for rank in 0..2 {
            assert!(ranks.time_until_end_of(rank) < Duration::from_secs(10), "{argument}");
        }
        let outcomes = ranks.wait();
        outcomes[0].failed_saying(&["rank 1 failed", text]);
        outcomes[1].failed_saying(&["the data loader of rank 1", text]);
        let told = outcomes[1].stderr.matches("panicked at").count();
        assert_eq!(told, usize::from(!argument.starts_with("sliced none")), "{}", outcomes[1].stderr);
    }
}

/// A batcher whose batch is the name of its device.
struct Where;

impl<B: Backend> Batcher<B, usize, B::Device> for Where {
    fn batch(&self, _: Vec<usize>, device: &B::Device) -> B::Device {
        device.clone()
    }
}

fn devices() -> Result<String> {
    let group = group()?;
    let build = || DataLoaderBuilder::<B, _, _>::new(Where, &group).batch_size(2).num_workers(1);
    let loaders = [
        build().build(Numbers::of(0..4))?,
        build().set_device(*group.device()).build(Numbers::of(0..4))?,
        build().build(Numbers::of(0..4))?.to_device(group.device()),
    ];
    let seen: Vec<_> = loaders.iter().flat_map(|loader| loader.iter().collect::<Vec<_>>()).collect();
    assert!(seen.iter().all(|device| device == group.device()));
    Ok(seen.len().to_string())
}

#[test]
fn batches_are_made_on_the_ranks_device() {
    assert_eq!(Launch::new("devices", 2).succeed(), ["6", "6"]);
}

fn verified() -> Result<String> {
    let group = group()?;
    let rank = group.rank().0;
    let build = || DataLoaderBuilder::<B, _, _>::new(Collect, &group).batch_size(4);
    let loader = match argument().as_str() {
        "whole" => burns(Numbers::of(0..21), 4, None),
        "seed" => build().shuffle(rank as u64).build(Numbers::of(0..21))?,
        "length" => build().build(Numbers::of(0..21 + rank))?,
        "kind" if rank == 0 => build().build(Numbers::of(0..21))?,
        _ => data::stride(burns(Numbers::of(0..21), 4, None), &group),
    };
    data::verify(&loader, &group)?;
    Ok("alike".into())
}

#[test]
fn loaders_that_differ_or_are_whole_are_named() {
    let table: &[(&str, &[&str])] = &[
        ("whole", &["each of 2 ranks", "DataLoaderBuilder", "data::slice", "data::stride", "data::local"]),
        ("seed", &["rank 0 has 21 items", "seed 0", "rank 1 has 21 items", "seed 1"]),
        ("length", &["rank 0 has 21 items", "rank 1 has 22 items"]),
        ("kind", &["rank 0 has 21 items", "rank 1 has a stride over 21 items"]),
    ];
    for (argument, words) in table {
        for outcome in Launch::new("verified", 2).argument(argument).run() {
            outcome.failed_saying(words);
        }
    }
    assert_eq!(Launch::new("verified", 1).argument("whole").succeed(), ["alike"]);
    assert_eq!(Launch::new("verified", 2).argument("stride").succeed(), ["alike"; 2]);
}
