//! The training run of one rank.

use std::time::Instant;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Tensor};
use burn_ddp::{Ddp, MicroStep, ProcessGroup, ReduceOp, Replica, ReplicaOptions, Reproducibility, Result};
use burn_ddp_examples::{Program, Trains, agree_on_arguments, say};

use super::args::Args;
use super::log::{Log, Record};
use super::model::Gpt;
use super::optimizer::{DecayMatrices, learning_rate};
use super::plan::Plan;
use super::text::{batch, stretch};

/// Forward and backward pass of one micro-step; nothing is sent.
fn micro_step<B: AutodiffBackend>(
    model: &Gpt<B>,
    tokens: &[i32],
    seq_len: usize,
    device: &B::Device,
) -> MicroStep<B> {
    let (inputs, targets) = batch(tokens, seq_len, device);
    let loss = model.loss(inputs, targets);
    let grads = GradientsParams::from_grads(loss.backward(), model);
    MicroStep::new(grads).with_loss(loss)
}

/// Mean loss over all whole windows of the held-out text. Rank r evaluates the windows whose index is r modulo the
/// world size and has zero for the others, so the sum over ranks is exact. All losses are then added in the order of
/// the text, whatever the world size.
fn evaluate<B: Backend>(model: &Gpt<B>, plan: &Plan, group: &ProcessGroup<B>) -> Result<f64> {
    let mut losses = vec![0.0_f32; plan.held_out_windows()];
    let device = group.device();
    for (window, loss) in losses.iter_mut().enumerate().skip(group.rank().0).step_by(group.world_size()) {
        let tokens = &plan.text.held_out[window * plan.micro_batch..][..plan.micro_batch + 1];
        let (inputs, targets) = batch(tokens, plan.model.seq_len, device);
        *loss = model.loss(inputs, targets).into_scalar().elem();
    }
    let losses = Tensor::<B, 1>::from_floats(losses.as_slice(), device);
    let losses = group.all_reduce(losses, ReduceOp::Sum).wait()?.into_data();
    Ok(losses.iter::<f64>().sum::<f64>() / plan.held_out_windows() as f64)
}

/// The training run of one rank.
pub(crate) struct Training<'a> {
    pub(crate) args: &'a Args,
    pub(crate) plan: &'a Plan,
}

impl Program for Training<'_> {
    fn train<B: Trains>(self, group: &ProcessGroup<Ddp<B>>) -> Result<()> {
        train(group, self.args, self.plan)
    }
}

/// Trains as one rank of `group`.
pub(crate) fn train<B: Backend>(group: &ProcessGroup<Ddp<B>>, args: &Args, plan: &Plan) -> Result<()> {
    agree_on_arguments(group, &args.of_training(), &format!("a text of {} tokens", plan.text.train.len()))?;
    let device = group.device();
    let root = group.rank().is_root();
    Autodiff::<Ddp<B>>::seed(device, args.seed);
    let model = Gpt::<Autodiff<Ddp<B>>>::new(&plan.model, device);
    // From here on every rank holds rank 0's weights.
    let (mut model, mut replica) = Replica::new(model, group, replica_options(args, plan))?;
    if args.dropout > 0.0 && !args.reproducible && !root {
        // Ranks that drop the same activations would train on less than they could.
        Autodiff::<Ddp<B>>::seed(device, args.seed.wrapping_add(group.rank().0 as u64));
    }
    let mut optimizer = OptimizerAdaptor::from(DecayMatrices::new(args.weight_decay));
    let mut log = Log::open(root, args.log_json.as_deref())?;
    if root {
        say_setup(&model, group, args, plan)?;
    }

    let own = group.rank().0 * plan.accumulation..(group.rank().0 + 1) * plan.accumulation;
    let mut last_loss = f64::NAN;
    for step in 0..args.steps {
        let started = Instant::now();
        let micro_step = |model: &_, micro| {
            let stretch =
                stretch(plan.text.train.len(), args.total_batch_tokens, plan.micro_batch, step, micro);
            micro_step(model, &plan.text.train[stretch], args.seq_len, device)
        };
        for micro in own.start..own.end - 1 {
            replica.no_sync(&model, micro_step(&model, micro))?;
        }
        let reduced = replica.reduce(&model, micro_step(&model, own.end - 1))?;
        let lr = learning_rate(args.lr, args.warmup(), args.steps, step);
        model = optimizer.step(lr, model, reduced.grads);
        last_loss = reduced.loss.unwrap_or(f64::NAN);
        if root {
            let seconds = started.elapsed().as_secs_f64();
            log.step(&Record {
                step,
                loss: last_loss,
                norm: reduced.norm.unwrap_or(f64::NAN),
                lr,
                dt_ms: (seconds * 1e5).round() / 100.0,
                tokens_per_sec: (args.total_batch_tokens as f64 / seconds) as u64,
                world_size: group.world_size(),
            })?;
        }
        if args.eval_every > 0 && (step + 1) % args.eval_every == 0 {
            let held_out = evaluate(&model.valid(), plan, group)?;
            if root {
                say(format_args!("eval after step {step:>4} | held-out loss {held_out:.6}"))?;
            }
        }
    }

    replica.verify(&model)?;
    if root {
        let hash = replica.parameter_hash(&model)?;
        say(format_args!("parameter hash {hash:016x}, equal on all {} ranks", group.world_size()))?;
        let entropy = plan.text.unigram_entropy;
        say(format_args!("final loss {last_loss:.4}, unigram entropy of the text {entropy:.4}"))?;
    }
    Ok(())
}

fn replica_options(args: &Args, plan: &Plan) -> ReplicaOptions {
    let options = ReplicaOptions::new().with_accumulation(plan.accumulation);
    let options = match args.clip {
        0.0 => options.with_norm(),
        clip => options.with_clip_norm(clip),
    };
    match args.reproducible {
        true => options.with_reproducibility(Reproducibility::AnyWorldSize { seed: args.seed }),
        false => options,
    }
}

/// Prints backend, model, text and the cut of the global batch.
fn say_setup<B: Backend>(
    model: &Gpt<Autodiff<Ddp<B>>>,
    group: &ProcessGroup<Ddp<B>>,
    args: &Args,
    plan: &Plan,
) -> Result<()> {
    let device = group.device();
    say(format_args!(
        "{} on {device:?} | {} parameters, vocabulary of {}, {} training tokens | {} tokens a step = {} x {} x {} \
         process(es) x {} micro-step(s)",
        B::name(device),
        model.num_params(),
        plan.text.vocab,
        plan.text.train.len(),
        args.total_batch_tokens,
        args.batch_size,
        args.seq_len,
        group.world_size(),
        plan.accumulation,
    ))
}
