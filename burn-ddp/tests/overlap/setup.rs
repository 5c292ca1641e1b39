//! A chain of layers, all of different size, and a training of it that reports when its buckets were sent.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use burn_ddp::{Ddp, MicroStep, OverlapStats, ProcessGroup, Replica, ReplicaOptions, Result};
use burn_flex::Flex;

pub type G = Ddp<Flex>;
pub type B = Autodiff<G>;

/// No two parameters of the chain have the same size, so ranks that sent buckets in different orders would disagree on
/// the number of elements, which is an error.
pub const WIDTHS: [usize; 6] = [3, 5, 7, 4, 6, 2];
pub const PARAMS: u64 = 10;
pub const STEPS: usize = 6;

#[derive(Module, Debug)]
pub struct Chain<B: Backend> {
    pub layers: Vec<Linear<B>>,
}

/// Fixed numbers in -1..1 without any order.
pub fn noise(index: usize) -> f32 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed >> 11) as f64 / (1u64 << 53) as f64) as f32 * 2.0 - 1.0
}

pub fn filled<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<B, D> {
    let values = (0..shape.iter().product()).map(|index| noise(seed * 1000 + index)).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

impl Chain<B> {
    pub fn new() -> Self {
        let layer = |(number, sizes): (usize, &[usize])| {
            let mut layer = LinearConfig::new(sizes[0], sizes[1]).init(&Default::default());
            layer.weight = Param::from_tensor(filled([sizes[0], sizes[1]], 2 * number));
            layer.bias = Some(Param::from_tensor(filled([sizes[1]], 2 * number + 1)));
            layer
        };
        Self { layers: WIDTHS.windows(2).enumerate().map(layer).collect() }
    }

    /// The loss of one batch, with a pause of `pause(layer)` in the backward pass before each layer's.
    pub fn loss(&self, seed: usize, pause: impl Fn(usize) -> u64) -> Tensor<B, 1> {
        let mut x = filled([4, WIDTHS[0]], 100 + seed);
        for (number, layer) in self.layers.iter().enumerate() {
            x = paused(layer.forward(x).tanh(), pause(number));
        }
        x.powi_scalar(2).mean()
    }

    pub fn bits(&self) -> Vec<u32> {
        struct Bits(Vec<u32>);
        impl ModuleVisitor<B> for Bits {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                self.0.extend(param.val().into_data().iter::<f32>().map(f32::to_bits));
            }
        }
        let mut bits = Bits(Vec::new());
        self.visit(&mut bits);
        bits.0
    }
}

/// `tensor`, whose gradient takes `milliseconds` longer.
fn paused(tensor: Tensor<B, 2>, milliseconds: u64) -> Tensor<B, 2> {
    #[derive(Debug)]
    struct Pause;
    impl Backward<G, 1> for Pause {
        type State = u64;
        fn backward(self, ops: Ops<u64, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            std::thread::sleep(Duration::from_millis(ops.state));
            unary::<G, _>(ops.parents, ops.node, grads, |gradient| gradient);
        }
    }
    if milliseconds == 0 {
        return tensor;
    }
    let tensor = tensor.into_primitive().tensor();
    type None = burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
    let output = match Pause.prepare::<None>([tensor.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(milliseconds, tensor.primitive),
        OpsKind::UnTracked(prep) => prep.finish(tensor.primitive),
    };
    Tensor::from_primitive(TensorPrimitive::Float(output))
}

/// The result of a training.
pub struct Run {
    pub model: Chain<B>,
    /// Buckets of each step: sent in the backward pass, and after it.
    pub sent: Vec<(u64, u64)>,
}

/// Options under which each parameter is a bucket and all of them may be on their way at a time, so that how many leave
/// early does not hang on how fast the others are.
pub fn one_bucket_each() -> ReplicaOptions {
    ReplicaOptions::new().with_bucket_bytes(1).with_buckets_in_flight(100)
}

pub fn micro_step(loss: Tensor<B, 1>, model: &Chain<B>) -> MicroStep<B> {
    MicroStep::new(GradientsParams::from_grads(loss.backward(), model)).with_loss(loss)
}

/// Trains `model` [`STEPS`] steps of windows of `accumulation` micro-steps, made by
/// `each(replica, model, step, micro)`.
pub fn train(
    model: Chain<B>,
    group: &ProcessGroup<G>,
    options: ReplicaOptions,
    accumulation: usize,
    each: impl Fn(&mut Replica<B>, &Chain<B>, usize, usize) -> Result<MicroStep<B>>,
) -> Result<Run> {
    let (mut model, mut replica) = Replica::new(model, group, options)?;
    let mut optimizer = SgdConfig::new().init();
    let (mut sent, mut before) = (Vec::new(), OverlapStats::default());
    for step in 0..STEPS {
        for micro in 0..accumulation - 1 {
            let one = each(&mut replica, &model, step, micro)?;
            replica.no_sync(&model, one)?;
        }
        let last = each(&mut replica, &model, step, accumulation - 1)?;
        let reduced = replica.reduce(&model, last)?;
        model = optimizer.step(0.1, model, reduced.grads);
        let now = replica.overlap();
        assert_eq!(now.steps, step as u64 + 1);
        sent.push((now.in_backward - before.in_backward, now.after_backward - before.after_backward));
        before = now;
    }
    replica.verify(&model)?;
    Ok(Run { model, sent })
}

/// Trains with and without overlap; the parameters must be equal to the last bit. Returns when buckets were sent.
pub fn with_and_without(
    group: &ProcessGroup<G>,
    model: impl Fn() -> Chain<B>,
    options: ReplicaOptions,
    accumulation: usize,
    each: impl Fn(&mut Replica<B>, &Chain<B>, usize, usize) -> Result<MicroStep<B>>,
) -> Result<String> {
    let with = train(model(), group, options.clone(), accumulation, &each)?;
    let without = train(model(), group, options.with_overlap(false), accumulation, &each)?;
    assert!(without.sent.iter().all(|(early, _)| *early == 0), "{:?}", without.sent);
    assert_eq!(with.model.bits(), without.model.bits(), "overlap changes numbers");
    Ok(format!("{:?}", with.sent))
}

/// The text of [`with_and_without`] for steps of which the first sends `first` buckets early and the others `early`.
pub fn told(first: u64, early: u64, buckets: u64) -> String {
    let step = |early| (early, buckets - early);
    let mut all = vec![step(first)];
    all.resize(STEPS, step(early));
    format!("{all:?}")
}
