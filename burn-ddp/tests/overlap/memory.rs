//! The memory that overlap costs, and the collectives that buckets save.

use std::time::Instant;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_ddp::{MicroStep, ProcessGroup, Replica, ReplicaOptions, Result};

use crate::harness::{Case, Launch, argument};
use crate::setup::{B, G, filled};

pub const CASES: &[(&str, Case)] = &[("peak", peak), ("small parameters", small_parameters)];

/// 16 layers of 4 MiB.
const LAYERS: usize = 16;
const WIDTH: usize = 1024;

#[derive(Module, Debug)]
struct Large<B: Backend> {
    layers: Vec<Linear<B>>,
}

/// Trains three steps, alone or with the replica that the argument names. Returns the peak of resident memory in KiB.
fn peak() -> Result<String> {
    let device = Default::default();
    let layer = || LinearConfig::new(WIDTH, WIDTH).with_bias(false).init::<B>(&device);
    let mut model = Large { layers: (0..LAYERS).map(|_| layer()).collect() };
    let mut optimizer = SgdConfig::new().init();
    let loss = |model: &Large<B>| {
        let x = model.layers.iter().fold(filled([2, WIDTH], 1), |x, layer| layer.forward(x).tanh());
        x.mean()
    };
    let overlap = match argument().as_str() {
        "plain" => {
            for _ in 0..3 {
                let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
                model = optimizer.step(0.1, model, grads);
            }
            return Ok(peak_kib());
        }
        how => how == "overlap",
    };
    let options =
        ReplicaOptions::new().with_bucket_bytes(4 << 20).with_buckets_in_flight(2).with_overlap(overlap);
    let group = ProcessGroup::<G>::from_env(&device)?;
    let (made, mut replica) = Replica::new(model, &group, options)?;
    model = made;
    for _ in 0..3 {
        let loss = loss(&model);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let reduced = replica.reduce(&model, MicroStep::new(grads).with_loss(loss))?;
        model = optimizer.step(0.1, model, reduced.grads);
    }
    assert_eq!(replica.overlap().in_backward > 0, overlap);
    Ok(peak_kib())
}

fn peak_kib() -> String {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").trim().into()
}

#[test]
fn the_peak_of_memory_rises_by_less_than_24_mb_over_plain_training() {
    let kib = |texts: Vec<String>| {
        texts.iter().map(|text| text.parse::<i64>().expect("KiB")).max().expect("a rank")
    };
    let run = |how: &str, world| kib(Launch::new("peak", world).argument(how).succeed());
    let plain = run("plain", 1);
    for how in ["overlap", "afterwards"] {
        let rise = run(how, 2) - plain;
        println!("64 MiB of parameters, buckets of 4 MiB, 2 in flight, {how}: {rise} KiB over {plain}");
        assert!(rise * 1024 < 24_000_000, "{how}: {rise} KiB");
    }
}

#[derive(Module, Debug)]
struct Many<B: Backend> {
    params: Vec<Param<Tensor<B, 1>>>,
}

/// 200 parameters of 64 floats: collectives of an optimizer step and its median time, in buckets and each by itself.
fn small_parameters() -> Result<String> {
    let device = Default::default();
    let group = ProcessGroup::<G>::from_env(&device)?;
    let mut texts = Vec::new();
    for options in [ReplicaOptions::new(), ReplicaOptions::new().with_bucket_bytes(1)] {
        let params = (0..200).map(|_| Param::from_tensor(Tensor::<B, 1>::ones([64], &device))).collect();
        let (model, mut replica) = Replica::new(Many { params }, &group, options)?;
        let buckets = replica.plan().buckets.len() as u64;
        let before = group.stats().calls("all_reduce");
        let mut times = Vec::new();
        for _ in 0..20 {
            let loss = model.params.iter().map(|param| param.val().sum()).reduce(|a, b| a + b).expect("many");
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let start = Instant::now();
            replica.reduce(&model, grads)?;
            times.push(start.elapsed());
        }
        assert_eq!(group.stats().calls("all_reduce") - before, 20 * buckets);
        times.sort_unstable();
        texts.push(format!("{buckets} {}", times[10].as_micros()));
    }
    Ok(texts.join(" "))
}

#[test]
fn two_hundred_small_parameters_are_one_reduction() {
    for text in Launch::new("small parameters", 2).succeed() {
        let numbers: Vec<f64> = text.split(' ').map(|number| number.parse().expect("a number")).collect();
        let [one, together, many, apart] = numbers[..] else { panic!("four numbers: {text}") };
        assert_eq!((one, many), (1.0, 200.0));
        println!(
            "reduce() of 200 parameters: {together} us in one bucket, {apart} us each by itself, {:.1} times",
            apart / together
        );
    }
}
