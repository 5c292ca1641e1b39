//! Trains a small GPT on English text: alone, or as one of several processes that act as one.
//!
//! ```text
//! cargo run --release --bin gpt                                 # one process, no socket, no thread
//! cargo run --release --bin gpt -- --nproc 2                    # two processes on this machine
//! burnrun --nproc-per-node 2 target/release/gpt                 # the same under a launcher
//! ```
//!
//! All three train alike (but for rounding), because the *global batch* is the constant: `--total-batch-tokens` tokens
//! per optimizer step, one contiguous stretch of the text, whatever the number of processes. It is cut into
//! micro-batches of `--batch-size` rows of `--seq-len` tokens, and with
//! A = total / (batch size * sequence length * processes) rank r takes the micro-batches r*A to r*A+A-1, one after the
//! other, and averages gradients with its peers once.
//!
//! Read it from top to bottom: model, text, optimizer and schedule, log, training loop, arguments, `main`.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Initializer, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{
    AdamW, AdamWConfig, AdamWState, GradientsParams, LearningRate, Optimizer, SimpleOptimizer,
};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Device, ElementConversion, Int, Tensor, TensorData};
use burn_ddp::launch::Launcher;
use burn_ddp::{Ddp, Error, MicroStep, ProcessGroup, RankInfo, ReduceOp, Replica, ReplicaOptions, Result};
use burn_flex::Flex;
use burn_ndarray::NdArray;
use clap::{Parser, ValueEnum};
use serde::Serialize;
use tracing_subscriber::EnvFilter;

// ---------------------------------------------------------------------------------------------------- model

/// The size of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GptConfig {
    pub(crate) vocab: usize,
    pub(crate) seq_len: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) embd: usize,
}

/// GPT-2: token and position embeddings, pre-norm blocks, a final norm, and a head tied to the token embedding.
/// No dropout.
#[derive(Module, Debug)]
pub(crate) struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: Vec<Block<B>>,
    norm: LayerNorm<B>,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm_attention: LayerNorm<B>,
    query_key_value: Linear<B>,
    attended: Linear<B>,
    norm_mlp: LayerNorm<B>,
    expand: Linear<B>,
    contract: Linear<B>,
    heads: usize,
}

/// Weights from a normal distribution of deviation `std`, biases zero.
fn linear<B: Backend>(input: usize, output: usize, std: f64, device: &B::Device) -> Linear<B> {
    let weights = Initializer::Normal { mean: 0.0, std };
    let mut linear = LinearConfig::new(input, output).with_bias(false).with_initializer(weights).init(device);
    linear.bias = Some(Initializer::Zeros.init([output], device));
    linear
}

impl<B: Backend> Gpt<B> {
    pub(crate) fn new(config: &GptConfig, device: &B::Device) -> Self {
        let &GptConfig { vocab, seq_len, layers, heads, embd } = config;
        let std = 0.02;
        // Every block adds two branches to the residual stream: this keeps its variance independent of depth.
        let branch_std = std / ((2 * layers) as f64).sqrt();
        let embedding = |n| {
            EmbeddingConfig::new(n, embd)
                .with_initializer(Initializer::Normal { mean: 0.0, std })
                .init(device)
        };
        let norm = || LayerNormConfig::new(embd).init(device);
        let block = |_| Block {
            norm_attention: norm(),
            query_key_value: linear(embd, 3 * embd, std, device),
            attended: linear(embd, embd, branch_std, device),
            norm_mlp: norm(),
            expand: linear(embd, 4 * embd, std, device),
            contract: linear(4 * embd, embd, branch_std, device),
            heads,
        };
        Self {
            tokens: embedding(vocab),
            positions: embedding(seq_len),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
        }
    }

    /// What comes after each token, [batch * seq, vocab].
    pub(crate) fn logits(&self, inputs: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [batch, seq] = inputs.dims();
        let device = inputs.device();
        let positions = Tensor::arange(0..seq as i64, &device).unsqueeze();
        let mut x = self.tokens.forward(inputs) + self.positions.forward(positions);
        let future = Tensor::<B, 2, Bool>::tril_mask([seq, seq], 0, &device).unsqueeze();
        for block in &self.blocks {
            x = block.forward(x, future.clone());
        }
        let [_, _, embd] = x.dims();
        let x = self.norm.forward(x).reshape([batch * seq, embd]);
        x.matmul(self.tokens.weight.val().transpose())
    }

    /// Mean cross-entropy over all tokens.
    pub(crate) fn loss(&self, inputs: Tensor<B, 2, Int>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let logits = self.logits(inputs);
        let [tokens, _] = logits.dims();
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets.reshape([tokens]))
    }
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 3>, future: Tensor<B, 4, Bool>) -> Tensor<B, 3> {
        let x = x.clone() + self.attention(self.norm_attention.forward(x), future);
        let hidden = gelu(self.expand.forward(self.norm_mlp.forward(x.clone())));
        x + self.contract.forward(hidden)
    }

    fn attention(&self, x: Tensor<B, 3>, future: Tensor<B, 4, Bool>) -> Tensor<B, 3> {
        let [batch, seq, embd] = x.dims();
        let width = embd / self.heads;
        let projected = self.query_key_value.forward(x);
        let heads = |part: usize| {
            let part = projected.clone().narrow(2, part * embd, embd);
            part.reshape([batch, seq, self.heads, width]).swap_dims(1, 2)
        };
        let scores = heads(0).matmul(heads(1).transpose()) / (width as f64).sqrt();
        let weights = softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
        let mixed = weights.matmul(heads(2)).swap_dims(1, 2).reshape([batch, seq, embd]);
        self.attended.forward(mixed)
    }
}

// ----------------------------------------------------------------------------------------------------- text

/// What is trained on unless `--data` names another file; `data/README.md` says where it comes from.
const DEFAULT_TEXT: &str = include_str!("../../data/new-testament.txt");

/// How text becomes tokens.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Tokenizer {
    /// One token a character; the vocabulary is the sorted set of characters of the text.
    Char,
    /// The byte pairs of GPT-2 (r50k_base).
    Gpt2,
}

/// A tokenized text. Its last tenth is held out from training.
pub(crate) struct Text {
    pub(crate) train: Vec<i32>,
    pub(crate) held_out: Vec<i32>,
    pub(crate) vocab: usize,
    /// Entropy in nats of one token drawn without its neighbours: the loss of a model that knows only how often
    /// each token occurs.
    pub(crate) unigram_entropy: f64,
}

impl Text {
    pub(crate) fn new(text: &str, tokenizer: Tokenizer) -> Result<Self> {
        let (mut tokens, vocab): (Vec<i32>, usize) = match tokenizer {
            Tokenizer::Char => {
                let mut alphabet: Vec<char> = text.chars().collect();
                alphabet.sort_unstable();
                alphabet.dedup();
                let index = |c| alphabet.partition_point(|other| *other < c) as i32;
                (text.chars().map(index).collect(), alphabet.len())
            }
            Tokenizer::Gpt2 => {
                let r50k = tiktoken_rs::r50k_base()
                    .map_err(|error| Error::config(format!("--tokenizer gpt2: {error}")))?;
                (r50k.encode_ordinary(text).into_iter().map(|token| token as i32).collect(), 50_257)
            }
        };
        let mut counts = vec![0_usize; vocab];
        tokens.iter().for_each(|token| counts[*token as usize] += 1);
        let share = |count: usize| count as f64 / tokens.len() as f64;
        let unigram_entropy = counts
            .into_iter()
            .filter(|count| *count > 0)
            .map(|count| share(count) * (1.0 / share(count)).ln())
            .sum();
        let held_out = tokens.split_off(tokens.len() - tokens.len() / 10);
        Ok(Self { train: tokens, held_out, vocab, unigram_entropy })
    }
}

/// Where in the training text micro-batch `micro` of optimizer step `step` lies: a function of the global batch
/// alone, so that the order is the same for every world size. When the next global batch (and the one token after it
/// that is its last target) would not fit whole, the text starts again from its beginning, on all ranks at once.
pub(crate) fn stretch(
    train_tokens: usize,
    total: usize,
    micro_batch: usize,
    step: usize,
    micro: usize,
) -> Range<usize> {
    let global_batches = (train_tokens - 1) / total;
    let start = step % global_batches * total + micro * micro_batch;
    start..start + micro_batch + 1
}

/// Inputs and targets of shape [batch, seq_len] from batch * seq_len + 1 consecutive tokens.
pub(crate) fn batch<B: Backend>(
    tokens: &[i32],
    seq_len: usize,
    device: &B::Device,
) -> (Tensor<B, 2, Int>, Tensor<B, 2, Int>) {
    let rows = (tokens.len() - 1) / seq_len;
    let tensor =
        |tokens: &[i32]| Tensor::from_data(TensorData::new(tokens.to_vec(), [rows, seq_len]), device);
    (tensor(&tokens[..tokens.len() - 1]), tensor(&tokens[1..]))
}

// ----------------------------------------------------------------------------------- optimizer and schedule

/// AdamW that decays matrices (embeddings included) and leaves vectors (biases, norms) alone.
#[derive(Clone)]
pub(crate) struct DecayMatrices {
    matrices: AdamW,
    vectors: AdamW,
}

impl DecayMatrices {
    pub(crate) fn new(weight_decay: f32) -> Self {
        let adamw = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        Self {
            matrices: adamw.clone().with_weight_decay(weight_decay).build(),
            vectors: adamw.with_weight_decay(0.0).build(),
        }
    }
}

impl<B: Backend> SimpleOptimizer<B> for DecayMatrices {
    type State<const D: usize> = AdamWState<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<B, D>, Option<Self::State<D>>) {
        let adamw = if D >= 2 { &self.matrices } else { &self.vectors };
        adamw.step(lr, parameter, grad, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device<B>) -> Self::State<D> {
        <AdamW as SimpleOptimizer<B>>::to_device(state, device)
    }
}

/// Linear warm-up to `peak`, then half a cosine down to a tenth of it.
pub(crate) fn learning_rate(peak: f64, warmup: usize, steps: usize, step: usize) -> f64 {
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let progress = (step - warmup) as f64 / (steps - warmup) as f64;
    let floor = 0.1 * peak;
    floor + 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()) * (peak - floor)
}

// ------------------------------------------------------------------------------------------------------ log

/// One optimizer step, as `--log-json` writes it.
#[derive(Serialize)]
struct Record {
    step: usize,
    loss: f64,
    norm: f64,
    lr: f64,
    dt_ms: f64,
    tokens_per_sec: u64,
    world_size: usize,
}

/// Prints a line; a reader that has gone is an error like any other.
fn say(line: std::fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|error| Error::io("cannot write to standard output", error))
}

/// The log of rank 0; the other ranks have none.
struct Log(Option<JsonLines>);

struct JsonLines {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    length: u64,
}

impl Log {
    fn open(root: bool, path: Option<&Path>) -> Result<Self> {
        let create = |path: &Path| match File::create(path) {
            Ok(file) => Ok(JsonLines { path: path.into(), file, length: 0 }),
            Err(error) => Err(Error::io(format!("--log-json {}", path.display()), error)),
        };
        path.filter(|_| root).map(create).transpose().map(Self)
    }

    fn step(&mut self, record: &Record) -> Result<()> {
        if let Some(lines) = &mut self.0 {
            lines.write(record)?;
        }
        let Record { step, loss, norm, lr, dt_ms, tokens_per_sec, .. } = record;
        say(format_args!(
            "step {step:>4} | loss {loss:.6} | norm {norm:.4} | lr {lr:.2e} | dt {dt_ms:.2}ms | tok/s {tokens_per_sec}"
        ))
    }
}

impl JsonLines {
    /// One unbuffered write a line: a process that is killed leaves every step it finished. A line that does not fit
    /// on the disk is taken back.
    fn write(&mut self, record: &Record) -> Result<()> {
        let failed = |error| Error::io(format!("--log-json {}: cannot write", self.path.display()), error);
        let line = serde_json::to_string(record).map_err(|error| failed(error.into()))? + "\n";
        self.file.write_all(line.as_bytes()).map_err(|error| {
            // A device has no length to go back to.
            let _ = self.file.set_len(self.length);
            failed(error)
        })?;
        self.length += line.len() as u64;
        Ok(())
    }
}

// ------------------------------------------------------------------------------------------------- training

/// One micro-step: forward and backward, nothing sent.
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

/// Mean loss over all whole windows of the held-out text. Rank r takes every window whose index is r modulo the
/// world size, and the sum over ranks is exact: no window is left out or taken twice.
fn evaluate<B: Backend>(model: &Gpt<B>, plan: &Plan, group: &ProcessGroup<B>) -> Result<f64> {
    let windows = plan.held_out_windows();
    let device = Default::default();
    let mut sum = 0.0;
    for window in (group.rank().0..windows).step_by(group.world_size()) {
        let tokens = &plan.text.held_out[window * plan.micro_batch..][..plan.micro_batch + 1];
        let (inputs, targets) = batch(tokens, plan.model.seq_len, &device);
        sum += model.loss(inputs, targets).into_scalar().elem::<f32>();
    }
    let total = group.all_reduce(Tensor::<B, 1>::from_floats([sum], &device), ReduceOp::Sum).wait()?;
    Ok(total.into_scalar().elem::<f64>() / windows as f64)
}

/// Ranks that were started by hand may have been given different arguments: they would train, but not as one.
fn agree<B: Backend>(args: &Args, plan: &Plan, group: &ProcessGroup<B>) -> Result<()> {
    let mine = format!("{} on a text of {} tokens", args.essence(), plan.text.train.len());
    let all = group.all_gather_bytes(mine.into_bytes())?;
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]);
    match (1..all.len()).find(|rank| all[*rank] != all[0]) {
        None => Ok(()),
        Some(rank) => {
            Err(Error::config(format!("rank 0 was given {}, but rank {rank} {}", text(0), text(rank))))
        }
    }
}

/// The whole training run of one rank. Peers are told why if it fails.
fn train<B: Backend>(args: &Args, plan: &Plan) -> Result<()> {
    let group = ProcessGroup::<Ddp<B>>::from_env(&Default::default())?;
    group.finish(train_in(&group, args, plan))
}

fn train_in<B: Backend>(group: &ProcessGroup<Ddp<B>>, args: &Args, plan: &Plan) -> Result<()> {
    agree(args, plan, group)?;
    let device = Default::default();
    let root = group.rank().is_root();
    Autodiff::<Ddp<B>>::seed(&device, args.seed);
    let model = Gpt::<Autodiff<Ddp<B>>>::new(&plan.model, &device);
    let options = match args.clip {
        0.0 => ReplicaOptions::new().with_norm(),
        clip => ReplicaOptions::new().with_clip_norm(clip),
    };
    // From here on every rank holds rank 0's weights.
    let (mut model, mut replica) = Replica::new(model, group, options)?;
    let mut optimizer = OptimizerAdaptor::from(DecayMatrices::new(args.weight_decay));
    let mut log = Log::open(root, args.log_json.as_deref())?;
    if root {
        say(format_args!(
            "{} parameters, vocabulary of {}, {} training tokens | {} tokens a step = {} x {} x {} process(es) x {} micro-step(s)",
            model.num_params(),
            plan.text.vocab,
            plan.text.train.len(),
            args.total_batch_tokens,
            args.batch_size,
            args.seq_len,
            group.world_size(),
            plan.accumulation,
        ))?;
    }

    let own = group.rank().0 * plan.accumulation..(group.rank().0 + 1) * plan.accumulation;
    let mut last_loss = f64::NAN;
    for step in 0..args.steps {
        let started = Instant::now();
        let micro_step = |model: &_, micro| {
            let stretch =
                stretch(plan.text.train.len(), args.total_batch_tokens, plan.micro_batch, step, micro);
            micro_step(model, &plan.text.train[stretch], args.seq_len, &device)
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
        say(format_args!(
            "parameter hash {:016x}, equal on all {} ranks",
            replica.parameter_hash(&model)?,
            group.world_size()
        ))?;
        say(format_args!(
            "final loss {last_loss:.4}, unigram entropy of the text {:.4}",
            plan.text.unigram_entropy
        ))?;
    }
    Ok(())
}

// ------------------------------------------------------------------------------------------------ arguments

/// Train a small GPT on text, in one process or several that act as one.
#[derive(Parser, Debug)]
#[command(version)]
pub(crate) struct Args {
    /// Start this many processes on this machine; without it, be the one process that trains, or the rank that a
    /// launcher's environment names
    #[arg(long)]
    nproc: Option<usize>,
    /// Who computes
    #[arg(long, value_enum, default_value = "flex")]
    backend: BackendName,
    /// UTF-8 text to train on [default: the New Testament, King James Version]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = 200)]
    pub(crate) steps: usize,
    /// Rows of a micro-batch
    #[arg(long, default_value_t = 8)]
    pub(crate) batch_size: usize,
    /// Tokens of a row
    #[arg(long, default_value_t = 64)]
    pub(crate) seq_len: usize,
    /// Tokens of an optimizer step over all processes: the global batch
    #[arg(long, default_value_t = 2048)]
    pub(crate) total_batch_tokens: usize,
    /// Transformer blocks
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Attention heads of a block
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Width of the residual stream; a multiple of --heads
    #[arg(long, default_value_t = 128)]
    embd: usize,
    /// Highest learning rate; it ends at a tenth of it
    #[arg(long, default_value_t = 1e-3)]
    pub(crate) lr: f64,
    /// Steps of linear warm-up [default: a tenth of --steps]
    #[arg(long)]
    warmup_steps: Option<usize>,
    /// AdamW's weight decay, on matrices only
    #[arg(long, default_value_t = 0.1)]
    pub(crate) weight_decay: f32,
    /// Largest global norm of the gradient; 0 does not clip
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
    /// Seed of the initial weights
    #[arg(long, default_value_t = 1337)]
    pub(crate) seed: u64,
    /// How text becomes tokens
    #[arg(long, value_enum, default_value = "char")]
    pub(crate) tokenizer: Tokenizer,
    /// Write one JSON object a step to this file, replacing it
    #[arg(long, value_name = "FILE")]
    log_json: Option<PathBuf>,
    /// Measure the loss on the held-out last tenth of the text every so many steps; 0 never does
    #[arg(long, default_value_t = 0)]
    eval_every: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BackendName {
    Flex,
    Ndarray,
}

/// What follows from the arguments, the text and the number of processes. Making one finds everything that can be
/// wrong with them, before a process is started or a file is written.
pub(crate) struct Plan {
    pub(crate) text: Text,
    pub(crate) model: GptConfig,
    /// Tokens of a micro-batch.
    pub(crate) micro_batch: usize,
    /// Micro-batches of one rank in one optimizer step.
    pub(crate) accumulation: usize,
}

impl Plan {
    pub(crate) fn new(args: &Args, world_size: usize) -> Result<Self> {
        args.check_ranges()?;
        let micro_batch = args.batch_size.saturating_mul(args.seq_len);
        let accumulation = accumulation(args.total_batch_tokens, args.batch_size, args.seq_len, world_size)?;
        let (name, text) = match &args.data {
            Some(path) => (path.display().to_string(), read_text(path)?),
            None => ("the default text".into(), DEFAULT_TEXT.into()),
        };
        let text = Text::new(&text, args.tokenizer)?;
        let (train, total) = (text.train.len(), args.total_batch_tokens);
        if train <= total {
            return Err(Error::config(format!(
                "{name} is too short: it has {train} tokens to train on (the last tenth is held out), and one global \
                 batch takes {total} and one; lower --total-batch-tokens or give a longer text"
            )));
        }
        let &Args { seq_len, layers, heads, embd, .. } = args;
        let model = GptConfig { vocab: text.vocab, seq_len, layers, heads, embd };
        let plan = Self { text, model, micro_batch, accumulation };
        if args.eval_every > 0 && plan.held_out_windows() == 0 {
            return Err(Error::config(format!(
                "{name} is too short for --eval-every: its held-out tenth has {} tokens, and one micro-batch takes \
                 {micro_batch} and one; lower --batch-size or --seq-len, or give a longer text",
                plan.text.held_out.len()
            )));
        }
        Ok(plan)
    }

    fn held_out_windows(&self) -> usize {
        self.text.held_out.len().saturating_sub(1) / self.micro_batch
    }
}

/// Largest number that counts anything; products of them fit into 64 bits.
const LARGEST: usize = 1 << 20;
/// Parameters of the blocks.
const LARGEST_MODEL: usize = 1 << 30;

impl Args {
    /// The arguments that make a difference to what is trained.
    fn essence(&self) -> String {
        let Self { steps, batch_size, seq_len, total_batch_tokens, layers, heads, embd, lr, .. } = self;
        let Self { weight_decay, clip, seed, tokenizer, eval_every, .. } = self;
        format!(
            "--steps {steps} --batch-size {batch_size} --seq-len {seq_len} --total-batch-tokens {total_batch_tokens} \
             --layers {layers} --heads {heads} --embd {embd} --lr {lr} --warmup-steps {} --weight-decay {weight_decay} \
             --clip {clip} --seed {seed} --tokenizer {tokenizer:?} --eval-every {eval_every}",
            self.warmup()
        )
    }

    pub(crate) fn warmup(&self) -> usize {
        self.warmup_steps.unwrap_or(self.steps / 10)
    }

    fn check_ranges(&self) -> Result<()> {
        let counts = [
            ("--nproc", self.nproc.unwrap_or(1)),
            ("--steps", self.steps),
            ("--batch-size", self.batch_size),
            ("--seq-len", self.seq_len),
            ("--total-batch-tokens", self.total_batch_tokens),
            ("--layers", self.layers),
            ("--heads", self.heads),
            ("--embd", self.embd),
        ];
        if let Some((flag, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(Error::config(format!("{flag} 0: give at least 1")));
        }
        if let Some((flag, count)) = counts.into_iter().find(|(_, count)| *count > LARGEST) {
            return Err(Error::config(format!("{flag} {count}: give at most {LARGEST}")));
        }
        let parameters = (12 * self.layers * self.embd).saturating_mul(self.embd);
        if parameters > LARGEST_MODEL {
            return Err(Error::config(format!(
                "--layers {} of --embd {}: {parameters} parameters are too many for this example",
                self.layers, self.embd
            )));
        }
        let numbers =
            [("--lr", self.lr), ("--weight-decay", f64::from(self.weight_decay)), ("--clip", self.clip)];
        if let Some((flag, number)) = numbers.into_iter().find(|(_, n)| !n.is_finite() || *n < 0.0) {
            return Err(Error::config(format!("{flag} {number}: give a number that is not negative")));
        }
        let &Self { embd, heads, .. } = self;
        if !embd.is_multiple_of(heads) {
            let proposal = neighbours(embd, heads);
            return Err(Error::config(format!(
                "--embd {embd} is not a multiple of --heads {heads}: use {proposal}"
            )));
        }
        match &self.log_json {
            Some(path) if path.is_dir() || !parent(path).is_dir() || is_pipe(path) => Err(Error::config(
                format!("--log-json {}: give the path of a file in a directory that exists", path.display()),
            )),
            Some(path) if self.data.as_deref().is_some_and(|data| same_file(data, path)) => {
                Err(Error::config(format!("--log-json {}: that is the text of --data", path.display())))
            }
            _ => Ok(()),
        }
    }
}

fn is_pipe(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo())
}

fn same_file(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn read_text(path: &Path) -> Result<String> {
    let refuse = |why: String| Err(Error::config(format!("--data {}: {why}", path.display())));
    if is_pipe(path) {
        return refuse("a pipe can be read by one process only; give a file".into());
    }
    match std::fs::read(path).map(String::from_utf8) {
        Ok(Ok(text)) if text.is_empty() => refuse("the file is empty; give a text to train on".into()),
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => {
            refuse(format!("not UTF-8 at byte {}; convert the text", error.utf8_error().valid_up_to()))
        }
        Err(error) => refuse(format!("cannot be read: {error}")),
    }
}

/// Micro-batches of one rank in one optimizer step.
pub(crate) fn accumulation(total: usize, batch: usize, seq: usize, world_size: usize) -> Result<usize> {
    let unit = batch.saturating_mul(seq).saturating_mul(world_size);
    if total.is_multiple_of(unit) {
        return Ok(total / unit);
    }
    Err(Error::config(format!(
        "--total-batch-tokens {total} is not a multiple of --batch-size {batch} x --seq-len {seq} x {world_size} \
         process(es) = {unit}: use {}",
        neighbours(total, unit)
    )))
}

/// The multiples of `unit` next to `value`, for a message.
fn neighbours(value: usize, unit: usize) -> String {
    let below = value / unit * unit;
    let above = below.saturating_add(unit);
    if below == 0 { above.to_string() } else { format!("{below} or {above}") }
}

fn run(args: &Args) -> Result<()> {
    let rank = RankInfo::from_env()?;
    let launched = rank.master.is_some();
    match args.nproc {
        Some(nproc) if !launched => {
            Plan::new(args, nproc)?;
            Launcher::new(nproc).args(std::env::args_os().skip(1)).run()
        }
        Some(nproc) if nproc != rank.world_size => Err(Error::config(format!(
            "--nproc {nproc} under a launcher of {} processes: leave --nproc out",
            rank.world_size
        ))),
        _ => {
            let plan = Plan::new(args, rank.world_size)?;
            match args.backend {
                BackendName::Flex => train::<Flex>(args, &plan),
                BackendName::Ndarray => train::<NdArray>(args, &plan),
            }
        }
    }
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without standard error there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "gpt: {error}");
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1))
        }
    }
}
