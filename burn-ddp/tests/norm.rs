//! Normalization over ranks: synchronized statistics, and running states that are made equal.

mod training;

use std::fmt::Write;

use burn::module::{AutodiffModule, Module};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::GradientsParams;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_ddp::nn::{SyncBatchNorm, SyncBatchNormConfig, SyncGroup};
use burn_ddp::{BufferSync, Ddp, Error, ErrorKind, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;

use crate::harness::{Case, Launch, argument};

pub const CASES: &[(&str, Case)] = &[
    ("norm: statistics", statistics),
    ("norm: large mean", large_mean),
    ("norm: sum", sum),
    ("norm: evaluation", evaluation),
    ("norm: two forwards", two_forwards),
    ("norm: buffers", buffers),
    ("norm: equal buffers", equal_buffers),
    ("norm: no buffers", no_buffers),
    ("norm: as burn's", as_burns),
    ("norm: a rank fails", a_rank_fails),
    ("norm: foreign", foreign),
    ("norm: training", training::train),
];

type I = Ddp<Flex>;
type B = Autodiff<I>;

fn group() -> Result<(ProcessGroup<I>, SyncGroup)> {
    let group = ProcessGroup::from_env(&Default::default())?;
    let sync = SyncGroup::new(&group);
    Ok((group, sync))
}

fn layer<B: Backend>(features: usize, sync: Option<&SyncGroup>) -> Result<SyncBatchNorm<B>> {
    SyncBatchNormConfig::new(features).init(&Default::default(), sync)
}

/// A batch of items with one channel.
fn items<B: Backend>(values: &[f32]) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len(), 1]), &Default::default())
}

fn floats<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Running mean and variance, with what is pending.
fn running<B: AutodiffBackend>(layer: &BatchNorm<B>) -> (Vec<f64>, Vec<f64>) {
    (floats(layer.running_mean.value_sync()), floats(layer.running_var.value_sync()))
}

fn calls<B: Backend>(group: &ProcessGroup<B>) -> u64 {
    group.stats().total_calls()
}

/// Normalizes `[-1, 1]` on rank 0 and `[3, 5]` on the others, in the element type that the argument names.
fn statistics() -> Result<String> {
    let (group, sync) = group()?;
    let layer = layer::<B>(1, Some(&sync))?;
    let x = items(if group.rank().is_root() { &[-1.0, 1.0] } else { &[3.0, 5.0] });
    let before = calls(&group);
    let y = match argument().as_str() {
        "half" => {
            struct Half;
            impl<B: Backend> burn::module::ModuleMapper<B> for Half {
                fn map_float<const D: usize>(
                    &mut self,
                    param: burn::module::Param<Tensor<B, D>>,
                ) -> burn::module::Param<Tensor<B, D>> {
                    param.map(|tensor| tensor.cast(FloatDType::F16))
                }
            }
            let y = layer.clone().map(&mut Half).forward(x.cast(FloatDType::F16));
            assert_eq!(y.dtype(), burn::tensor::DType::F16);
            y
        }
        _ => layer.forward(x),
    };
    assert_eq!(calls(&group) - before, 1, "one collective a forward pass");
    let (mean, var) = running(&layer);
    Ok(format!("{:.3?} {:.4} {:.4}", floats(y), mean[0], var[0]))
}

/// tracel-ai/burn#4650: mean 2 and variance 5 on both, running variance 0.9 * 1 + 0.1 * 5.
#[test]
fn statistics_are_those_of_the_global_batch() {
    for dtype in ["single", "half"] {
        let texts = Launch::new("norm: statistics", 2).argument(dtype).succeed();
        let expected = |values: [f64; 2]| {
            let y = values.map(|x| (x - 2.0) / 5.00001f64.sqrt());
            format!("{y:.3?} 0.2000 1.4000")
        };
        match dtype {
            "half" => {
                assert!(texts.iter().all(|text| text.ends_with(" 0.2000 1.4004")), "{texts:?}");
                assert!(texts[0].starts_with("[-1.342, -0.447]"), "{texts:?}");
            }
            _ => assert_eq!(texts, [expected([-1.0, 1.0]), expected([3.0, 5.0])]),
        }
    }
}

/// Relative error of the variance of 300 values on each rank with mean 1000 and deviation near 1.
fn large_mean() -> Result<String> {
    let (group, sync) = group()?;
    let values = |rank: usize| -> Vec<f32> {
        (0..300).map(|i| 1000.0 + rank as f32 * 0.1 + ((i * 37 + rank * 11) % 101) as f32 / 29.0).collect()
    };
    let layer = SyncBatchNormConfig::new(1).with_momentum(1.0).init::<B>(group.device(), Some(&sync))?;
    let y = floats(layer.forward(items(&values(group.rank().0))));
    let all: Vec<f64> = (0..group.world_size()).flat_map(values).map(f64::from).collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let var = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64;
    let (got_mean, got_var) = running(&layer);
    let worst = y
        .iter()
        .zip(values(group.rank().0))
        .fold(0.0, |worst: f64, (y, x)| worst.max((y - (f64::from(x) - mean) / (var + 1e-5).sqrt()).abs()));
    Ok(format!("{:e} {:e} {worst:e}", (got_mean[0] / mean - 1.0).abs(), (got_var[0] / var - 1.0).abs()))
}

#[test]
fn a_large_mean_costs_the_variance_no_digits() {
    for text in Launch::new("norm: large mean", 3).succeed() {
        let errors: Vec<f64> = text.split(' ').map(|error| error.parse().expect("a number")).collect();
        // An ulp of 1000 in f32 is 6e-5, by which the mean, and so each output, may be off.
        assert!(errors[0] < 1.5e-7 && errors[1] < 1e-5 && errors[2] < 1.5e-4, "{text}");
    }
}

fn sum_on<B: AutodiffBackend<InnerBackend = I>>(sync: &SyncGroup) -> String {
    let rank = sync.rank().0 as f32;
    let w = Tensor::<B, 2>::full([1, 2], rank + 1.0, &Default::default()).require_grad();
    let y = sync.all_reduce_sum(w.clone());
    let gradient = |y: Tensor<B, 2>| {
        let grads = y.sum().backward();
        floats(w.grad(&grads).expect("a gradient"))
    };
    let mean = sync.all_reduce_sum(w.clone()) / sync.world_size() as f64;
    // The losses of all ranks count, each with its own factor.
    let scaled = sync.all_reduce_sum(w.clone()) * (rank + 1.0);
    format!("{:?} {:?} {:?} {:?}", floats(y.clone()), gradient(y), gradient(mean), gradient(scaled))
}

fn sum() -> Result<String> {
    let (group, sync) = group()?;
    let (plain, balanced) = (sum_on::<B>(&sync), sum_on::<Autodiff<I, BalancedCheckpointing>>(&sync));
    assert_eq!(plain, balanced);
    let inner = floats(sync.all_reduce_sum(Tensor::<I, 1>::ones([2], group.device())));
    assert_eq!(inner, [group.world_size() as f64; 2]);
    Ok(plain)
}

/// tracel-ai/burn#4873: a sum goes back as a sum, a mean of ones as a mean of ones.
#[test]
fn the_gradient_of_a_sum_over_ranks_is_the_sum_of_gradients() {
    for text in Launch::new("norm: sum", 2).succeed() {
        assert_eq!(text, "[3.0, 3.0] [2.0, 2.0] [1.0, 1.0] [3.0, 3.0]");
    }
    for text in Launch::new("norm: sum", 1).succeed() {
        assert_eq!(text, "[1.0, 1.0] [1.0, 1.0] [1.0, 1.0] [1.0, 1.0]");
    }
}

/// Makes two steps, between which only rank 0 evaluates, three times.
fn evaluation() -> Result<String> {
    let (group, sync) = group()?;
    let sync = (argument() == "sync").then_some(&sync);
    let (model, mut replica) = Replica::new(layer::<B>(1, sync)?, &group, ReplicaOptions::new())?;
    let x = [group.rank().0 as f32, 1.0, 4.0];
    let mut text = String::new();
    for step in 0..2 {
        let loss = model.forward(items(&x)).powi_scalar(3).mean();
        replica.reduce(&model, GradientsParams::from_grads(loss.backward(), &model))?;
        if step == 0 && group.rank().is_root() {
            let before = calls(&group);
            let valid = model.valid();
            assert!(valid.group().is_some() == sync.is_some());
            for _ in 0..3 {
                text = format!("{:?}", floats(valid.forward(items(&x))));
            }
            assert_eq!(calls(&group), before, "evaluation communicates");
        }
    }
    replica.verify(&model)?;
    Ok(text)
}

/// pytorch/pytorch#54059: evaluation on one rank blocked the next step.
#[test]
fn one_rank_alone_may_evaluate() {
    for norm in ["sync", "plain"] {
        let texts = Launch::new("norm: evaluation", 2).argument(norm).succeed();
        assert!(!texts[0].is_empty() && texts[1].is_empty());
    }
}

/// Forward twice, add the losses, one backward; compares the gradients with those of one process.
fn two_forwards() -> Result<String> {
    type I = Ddp<NdArray<f64>>;
    type B = Autodiff<I>;
    let group = ProcessGroup::<I>::from_env(&Default::default())?;
    let (rank, size) = (group.rank().0, group.world_size());
    let batch = |rank: usize, number: usize| [0.0, 1.0, 3.0].map(|x| x + (rank + 5 * number) as f32 * 0.7);
    let loss = |layer: &SyncBatchNorm<B>, ranks: std::ops::Range<usize>| {
        let of = |number: usize| {
            let x: Vec<f32> = ranks.clone().flat_map(|rank| batch(rank, number)).collect();
            (layer.forward(items(&x)) - items(&x).cos()).square().mean()
        };
        of(0) + of(1)
    };
    let gradients = |layer: &SyncBatchNorm<B>, grads: &GradientsParams| {
        [layer.gamma.id, layer.beta.id].map(|id| floats(grads.get::<I, 1>(id).expect("a gradient"))[0])
    };
    let sync = (argument() == "sync").then(|| SyncGroup::new(&group));
    let (layer, mut replica) = Replica::new(layer::<B>(1, sync.as_ref())?, &group, ReplicaOptions::new())?;
    let grads = GradientsParams::from_grads(loss(&layer, rank..rank + 1).backward(), &layer);
    let got = gradients(&layer, &replica.reduce(&layer, grads)?.grads);

    // Synchronized: one batch of all items. Plain: each rank's items by themselves, averaged.
    let alone = SyncBatchNormConfig::new(1).init::<B>(group.device(), None)?;
    let share = if sync.is_some() { size } else { 1 };
    let parts: Vec<_> = (0..size).step_by(share).map(|start| start..start + share).collect();
    let count = parts.len() as f64;
    let mut expected = [0.0; 2];
    for ranks in parts {
        let grads = GradientsParams::from_grads(loss(&alone, ranks).backward(), &alone);
        let part = gradients(&alone, &grads);
        expected = std::array::from_fn(|index| expected[index] + part[index] / count);
    }
    for (got, expected) in got.iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-12 && expected.abs() > 1e-2, "{got} {expected}");
    }
    Ok(String::new())
}

/// pytorch/pytorch#22095: buffers that changed in the second forward broke the first one's backward.
#[test]
fn two_forwards_may_share_a_backward() {
    for norm in ["sync", "plain"] {
        assert_eq!(Launch::new("norm: two forwards", 2).argument(norm).succeed().len(), 2);
    }
}

/// Takes a batch of mean 0 on rank 0 and 4 on rank 1; returns the running mean in use and in a record.
fn buffers() -> Result<String> {
    let (group, _) = group()?;
    let (layer, replica) = Replica::new(layer::<B>(1, None)?, &group, ReplicaOptions::new())?;
    let mean = group.rank().0 as f32 * 4.0;
    layer.forward(items(&[mean - 1.0, mean + 1.0]));
    let how = if argument() == "root" { BufferSync::Root } else { BufferSync::Average };
    replica.sync_buffers(&layer, how)?;
    let in_use = floats(layer.valid().running_mean.value())[0];
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let record = |error: burn::record::RecorderError| Error::new(ErrorKind::Io, error.to_string());
    let bytes = Recorder::<B>::record(&recorder, layer.clone().into_record(), ()).map_err(record)?;
    let saved = Recorder::<B>::load(&recorder, bytes, group.device()).map_err(record)?;
    let saved = BatchNormConfig::new(1).init::<B>(group.device()).load_record(saved);
    Ok(format!("{in_use:?} {:?}", floats(saved.running_mean.value())[0]))
}

/// pytorch/pytorch#30718.
#[test]
fn running_states_are_averaged_or_those_of_rank_0() {
    let close = |text: &str, expected: f64| {
        let values: Vec<f64> = text.split(' ').map(|value| value.parse().expect("a number")).collect();
        assert!(values.len() == 2 && values.iter().all(|value| (value - expected).abs() < 1e-7), "{text}");
    };
    for (how, expected) in [("average", 0.2), ("root", 0.0)] {
        let texts = Launch::new("norm: buffers", 2).argument(how).succeed();
        assert_eq!(texts[0], texts[1]);
        close(&texts[0], expected);
    }
}

/// Three ranks with equal running means that averaging would change, and unequal running variances.
fn equal_buffers() -> Result<String> {
    let (group, _) = group()?;
    let rank = group.rank().0 as f32;
    let thirds: Vec<f32> = (1..200).map(|i| i as f32 * 0.013).filter(|a| (a + a + a) / 3.0 != *a).collect();
    assert!(thirds.len() > 10);
    let layer = layer::<B>(thirds.len(), None)?;
    let (layer, replica) = Replica::new(layer, &group, ReplicaOptions::new())?;
    let tensor = |values: &[f32]| Tensor::<B, 1>::from_floats(values, group.device());
    layer.running_mean.update(tensor(&thirds));
    layer.running_var.update(tensor(&vec![rank * 3.0; thirds.len()]));
    let before = group.stats();
    replica.sync_buffers(&layer, BufferSync::Average)?;
    let after = group.stats();
    let reduced = |kind| after.calls(kind) - before.calls(kind);
    assert_eq!((reduced("all_gather"), reduced("all_reduce")), (1, 1));
    let (mean, var) = running(&layer);
    assert!(mean.iter().zip(&thirds).all(|(got, old)| *got == f64::from(*old)), "{mean:?}");
    assert!(var.iter().all(|var| *var == 3.0), "{var:?}");
    // All are equal now, so the second call only compares.
    replica.sync_buffers(&layer, BufferSync::Root)?;
    assert_eq!(calls(&group) - after.total_calls(), 1);
    // The next update continues from the synchronized state.
    layer.forward(Tensor::<B, 2>::ones([2, thirds.len()], group.device()));
    let expected = 0.9 * f64::from(thirds[0]) + 0.1;
    assert!((running(&layer).0[0] - expected).abs() < 1e-6);
    Ok(String::new())
}

#[test]
fn equal_running_states_are_left_alone() {
    assert_eq!(Launch::new("norm: equal buffers", 3).succeed().len(), 3);
}

fn no_buffers() -> Result<String> {
    let (group, _) = group()?;
    let model = burn::nn::LinearConfig::new(2, 2).init::<B>(group.device());
    let (model, replica) = Replica::new(model, &group, ReplicaOptions::new())?;
    let before = calls(&group);
    replica.sync_buffers(&model, BufferSync::Average)?;
    if group.world_size() == 1 {
        let (layer, replica) = Replica::new(layer::<B>(1, None)?, &group, ReplicaOptions::new())?;
        replica.sync_buffers(&layer, BufferSync::Average)?;
    }
    Ok((calls(&group) - before).to_string())
}

#[test]
fn nothing_is_sent_without_running_states_or_peers() {
    assert_eq!(Launch::new("norm: no buffers", 2).succeed(), ["0", "0"]);
    assert_eq!(Launch::new("norm: no buffers", 1).succeed(), ["0"]);
}

/// Compares output, gradients and running states with those of Burn's layer, bit for bit.
fn as_burns() -> Result<String> {
    let (group, sync) = group()?;
    let x = || {
        let values: Vec<f32> = (0..5 * 3 * 4).map(|i| ((i * 37) % 23) as f32 / 7.0).collect();
        Tensor::<B, 3>::from_data(TensorData::new(values, [5, 3, 4]), group.device()).require_grad()
    };
    let burns = BatchNormConfig::new(3).init::<B>(group.device());
    let expected = bits(&burns, x(), |x| burns.forward(x));
    for sync in [None, Some(&sync)] {
        let layer = layer::<B>(3, sync)?;
        assert_eq!(bits(&layer, x(), |x| layer.forward(x)), expected, "{layer:?}");
    }
    Ok((calls(&group)).to_string())
}

fn bits(layer: &BatchNorm<B>, x: Tensor<B, 3>, forward: impl Fn(Tensor<B, 3>) -> Tensor<B, 3>) -> String {
    let y = forward(x.clone());
    let grads = y.clone().powi_scalar(3).mean().backward();
    let mut text = String::new();
    let mut add = |data: TensorData| write!(text, "{:?}", data.bytes).expect("a string");
    add(y.into_data());
    add(x.grad(&grads).expect("a gradient").into_data());
    add(layer.gamma.val().grad(&grads).expect("a gradient").into_data());
    add(layer.beta.val().grad(&grads).expect("a gradient").into_data());
    add(layer.running_mean.value_sync().into_data());
    add(layer.running_var.value_sync().into_data());
    text
}

#[test]
fn alone_it_is_burns_layer_bit_for_bit() {
    assert_eq!(Launch::new("norm: as burn's", 1).succeed(), ["0"]);
}

/// Rank 1 fails in the second step, before its forward pass or (by argument) before its backward pass.
fn a_rank_fails() -> Result<String> {
    let (group, sync) = group()?;
    let (layer, mut replica) = Replica::new(layer::<B>(1, Some(&sync))?, &group, ReplicaOptions::new())?;
    let x = items::<B>(&[1.0, 2.0 + group.rank().0 as f32]).require_grad();
    let fails = |when: &str, step: usize| step == 1 && group.rank().0 == 1 && argument() == when;
    let broken = || group.finish(Err(Error::new(ErrorKind::Program, "the batcher is broken")));
    for step in 0..2 {
        if fails("forward", step) {
            return broken();
        }
        let y = layer.forward(x.clone());
        if fails("backward", step) {
            return broken();
        }
        let grads = GradientsParams::from_grads(y.powi_scalar(3).mean().backward(), &layer);
        match replica.reduce(&layer, grads) {
            Ok(_) => assert_eq!(step, 0),
            Err(error) => {
                let (mean, var) = running(&layer);
                assert!(mean[0].is_finite() && var[0].is_finite());
                return Err(error.context(format!("running mean {:.3}", mean[0])));
            }
        }
    }
    Ok(String::new())
}

#[test]
fn a_failure_in_a_forward_or_backward_pass_comes_out_of_the_reduction() {
    // The running mean has moved to the global mean 1.75 once or twice, and never to a rank's own mean.
    for (when, mean) in [("forward", "running mean 0.175"), ("backward", "running mean 0.332")] {
        let outcomes = Launch::new("norm: a rank fails", 2).argument(when).run();
        outcomes[0].failed_saying(&["the batcher is broken", "rank 1", mean]);
        outcomes[1].failed_saying(&["the batcher is broken"]);
    }
}

/// Normalizes a tensor of a backend that the group cannot send.
fn foreign() -> Result<String> {
    let (group, sync) = group()?;
    type Other = Autodiff<NdArray>;
    let error = SyncBatchNormConfig::new(1).init::<Other>(&Default::default(), Some(&sync)).err();
    let error = error.expect("another backend").to_string();
    assert!(error.contains("NdArray") && error.contains("Ddp<") && error.contains("Flex"), "{error}");
    let x = sync.all_reduce_sum(Tensor::<Other, 1>::ones([2], &Default::default()));
    assert_eq!(floats(x), [1.0; 2]);
    group.barrier()?;
    Ok(String::new())
}

#[test]
fn a_foreign_backend_is_refused_by_name() {
    for outcome in Launch::new("norm: foreign", 2).run() {
        outcome.failed_saying(&["NdArray", "Ddp<", "all_reduce_sum"]);
    }
}
