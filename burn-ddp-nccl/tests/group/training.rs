//! A training over the fake is the training over TCP.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_ddp::{MicroStep, Replica, ReplicaOptions, Result};

use super::host::{B as Inner, group};
use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] = &[("training", training)];

type B = Autodiff<Inner>;

const STEPS: usize = 10;
const ACCUMULATION: usize = 2;
const PARAMS: usize = 5;
/// Buckets that leave in backward passes: all but the last one, of all steps but the first, which shows how long
/// windows are.
const EARLY: usize = if cfg!(feature = "overlap") { (STEPS - 1) * (PARAMS - 1) } else { 0 };

#[derive(Module, Debug)]
struct Model<B: Backend> {
    hidden: Linear<B>,
    out: Linear<B>,
    /// Rank 1 alone uses it.
    extra: Param<Tensor<B, 1>>,
}

impl<B: Backend> Model<B> {
    /// With odd sizes, and values that differ between ranks, until rank 0's are taken.
    fn new(rank: usize, device: &B::Device) -> Self {
        let linear = |inputs: usize, outputs: usize| {
            let mut linear = LinearConfig::new(inputs, outputs).init::<B>(device);
            let weight = noise(rank, inputs * outputs, device).reshape([inputs, outputs]);
            linear.weight = Param::from_tensor(weight);
            linear.bias = Some(Param::from_tensor(noise(rank + 1, outputs, device)));
            linear
        };
        let extra = Param::from_tensor(Tensor::zeros([3], device));
        Self { hidden: linear(5, 13), out: linear(13, 1), extra }
    }

    fn loss(&self, seed: usize, rank: usize) -> Tensor<B, 1> {
        let device = self.extra.device();
        let x = noise::<B>(seed, 4 * 5, &device).reshape([4, 5]);
        let y = self.out.forward(self.hidden.forward(x.clone()).tanh());
        let wanted = x.sum_dim(1);
        let loss = (y - wanted).powi_scalar(2).mean();
        if rank == 1 { loss + (self.extra.val() - 0.3).powi_scalar(2).mean() } else { loss }
    }
}

fn noise<B: Backend>(seed: usize, count: usize, device: &B::Device) -> Tensor<B, 1> {
    let value = |i: usize| ((seed * 7919 + i * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    Tensor::from_data(TensorData::new((0..count).map(value).collect::<Vec<f32>>(), [count]), device)
}

/// Losses, norms and parameters; the hash of the parameters; and the buckets that left in backward passes.
fn training() -> Result<String> {
    let group = group()?;
    let (rank, size, device) = (group.rank().0, group.world_size(), Default::default());
    let options =
        ReplicaOptions::new().with_clip_norm(0.5).with_bucket_bytes(1).with_buckets_in_flight(PARAMS);
    let (mut model, mut replica) = Replica::new(Model::<B>::new(rank, &device), &group, options)?;
    let mut optimizer = AdamConfig::new().init();
    let mut numbers = Vec::new();
    for step in 0..STEPS {
        let micro_step = |model: &Model<B>, micro: usize| {
            let loss = model.loss((step * size + rank) * ACCUMULATION + micro, rank);
            MicroStep::new(GradientsParams::from_grads(loss.backward(), model)).with_loss(loss)
        };
        for micro in 1..ACCUMULATION {
            replica.no_sync(&model, micro_step(&model, micro))?;
        }
        let reduced = replica.reduce(&model, micro_step(&model, 0))?;
        numbers.extend(reduced.loss.into_iter().chain(reduced.norm));
        model = optimizer.step(0.01, model, reduced.grads);
    }
    replica.verify(&model)?;
    for tensor in [
        model.hidden.weight.val().flatten::<1>(0, 1),
        model.out.weight.val().flatten(0, 1),
        model.extra.val(),
    ] {
        numbers.extend(tensor.into_data().iter::<f64>());
    }
    let numbers: Vec<String> = numbers.iter().map(f64::to_string).collect();
    let (hash, early) = (replica.parameter_hash(&model)?, replica.overlap().in_backward);
    Ok(format!("{}\n{hash}\n{early}", numbers.join(" ")))
}

#[test]
fn a_training_is_the_one_over_tcp_and_equal_on_all_ranks() {
    for world_size in 2..=4 {
        let texts = |argument| Launch::new("training", world_size).argument(argument).succeed();
        let (nccl, host) = (texts("nccl"), texts("host"));
        assert!(nccl.iter().all(|text| *text == nccl[0]), "ranks differ: {nccl:?}");
        let values = |text: &str| -> Vec<f64> {
            let line = text.lines().next().expect("a line");
            line.split(' ').map(|text| text.parse().expect("a number")).collect()
        };
        let early = nccl[0].lines().last().map(str::to_owned);
        assert_eq!(early, Some(EARLY.to_string()), "buckets that left early");
        let (got, expected) = (values(&nccl[0]), values(&host[0]));
        assert_eq!((got.len(), expected.len()), (2 * STEPS + 5 * 13 + 13 + 3, got.len()));
        for (got, expected) in got.iter().zip(&expected) {
            assert!((got - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{got}, over TCP {expected}");
        }
        let losses: Vec<f64> = got[..2 * STEPS].iter().step_by(2).copied().collect();
        assert!(losses[STEPS - 1] < losses[0], "{losses:?}");
    }
}
