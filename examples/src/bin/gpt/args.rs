//! The arguments, and their checks.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use burn_ddp::{Error, Result};
use burn_ddp_examples::{Processes, check_counts, check_not_negative, check_output_file, check_share};
use clap::Parser;

use super::text::Tokenizer;

/// Train a small GPT on text, in one process or several that act as one.
#[derive(Parser, Debug)]
#[command(version, allow_negative_numbers = true)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// UTF-8 text to train on [default: the New Testament, King James Version]
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
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
    pub(crate) layers: usize,
    /// Attention heads of a block
    #[arg(long, default_value_t = 4)]
    pub(crate) heads: usize,
    /// Width of the residual stream; a multiple of --heads
    #[arg(long, default_value_t = 128)]
    pub(crate) embd: usize,
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
    pub(crate) clip: f64,
    /// Seed of the initial weights and of dropout
    #[arg(long, default_value_t = 1337)]
    pub(crate) seed: u64,
    /// Share of embeddings, attention weights and outputs of both branches of a block that is set to zero in training
    #[arg(long, default_value_t = 0.0)]
    pub(crate) dropout: f64,
    /// Train to the same bits with 1, 2, 4, 8 .. processes
    #[arg(long)]
    pub(crate) reproducible: bool,
    /// How text becomes tokens
    #[arg(long, value_enum, default_value = "char")]
    pub(crate) tokenizer: Tokenizer,
    /// Write one JSON object a step to this file, replacing it
    #[arg(long, value_name = "FILE")]
    pub(crate) log_json: Option<PathBuf>,
    /// Measure the loss on the held-out last tenth of the text every so many steps; 0 never does
    #[arg(long, default_value_t = 0)]
    pub(crate) eval_every: usize,
}

/// Most parameters of the blocks.
const LARGEST_MODEL: usize = 1 << 30;

impl Args {
    /// The arguments that determine the training, with their flags.
    pub(crate) fn of_training(&self) -> Vec<(&'static str, String)> {
        let mut arguments = vec![
            ("--backend", format!("{:?}", self.processes.backend)),
            ("--steps", self.steps.to_string()),
            ("--batch-size", self.batch_size.to_string()),
            ("--seq-len", self.seq_len.to_string()),
            ("--total-batch-tokens", self.total_batch_tokens.to_string()),
            ("--layers", self.layers.to_string()),
            ("--heads", self.heads.to_string()),
            ("--embd", self.embd.to_string()),
            ("--lr", self.lr.to_string()),
            ("--warmup-steps", self.warmup().to_string()),
            ("--weight-decay", self.weight_decay.to_string()),
            ("--clip", self.clip.to_string()),
            ("--seed", self.seed.to_string()),
            ("--dropout", self.dropout.to_string()),
            ("--tokenizer", format!("{:?}", self.tokenizer)),
            ("--eval-every", self.eval_every.to_string()),
        ];
        if self.reproducible {
            arguments.push(("--reproducible", String::new()));
        }
        arguments
    }

    pub(crate) fn warmup(&self) -> usize {
        self.warmup_steps.unwrap_or(self.steps / 10)
    }

    /// Finds everything that is wrong with the arguments alone.
    pub(crate) fn check(&self) -> Result<()> {
        self.processes.backend.check()?;
        check_counts(&[
            ("--steps", self.steps),
            ("--batch-size", self.batch_size),
            ("--seq-len", self.seq_len),
            ("--total-batch-tokens", self.total_batch_tokens),
            ("--layers", self.layers),
            ("--heads", self.heads),
            ("--embd", self.embd),
        ])?;
        let parameters = (12 * self.layers * self.embd).saturating_mul(self.embd);
        if parameters > LARGEST_MODEL {
            return Err(Error::config(format!(
                "--layers {} of --embd {}: {parameters} parameters are too many for this example",
                self.layers, self.embd
            )));
        }
        check_not_negative(&[
            ("--lr", self.lr),
            ("--weight-decay", self.weight_decay.into()),
            ("--clip", self.clip),
        ])?;
        check_share("--dropout", self.dropout)?;
        let &Self { embd, heads, .. } = self;
        if !embd.is_multiple_of(heads) {
            let proposal = neighbours(embd, heads);
            return Err(Error::config(format!(
                "--embd {embd} is not a multiple of --heads {heads}: use {proposal}"
            )));
        }
        let Some(path) = &self.log_json else { return Ok(()) };
        check_output_file("--log-json", path)?;
        let refuse = |why| Err(Error::config(format!("--log-json {}: {why}", path.display())));
        if is_pipe(path) {
            return refuse("that is a pipe; give the path of a file");
        }
        if self.data.as_deref().is_some_and(|data| same_file(data, path)) {
            return refuse("that is the text of --data");
        }
        Ok(())
    }
}

pub(crate) fn is_pipe(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo())
}

fn same_file(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// The multiples of `unit` next to `value`, as words of a message.
pub(crate) fn neighbours(value: usize, unit: usize) -> String {
    let below = value / unit * unit;
    let above = below.saturating_add(unit);
    if below == 0 { above.to_string() } else { format!("{below} or {above}") }
}
