//! The plan that follows from the arguments: text, model, and the micro-batches of each rank.

use std::path::Path;

use burn_ddp::{Error, Result};

use super::args::{Args, is_pipe, neighbours};
use super::model::GptConfig;
use super::text::{DEFAULT_TEXT, Text};

/// The plan for arguments, text and number of processes. Its constructor checks all of them, before a process is
/// started or a file is written.
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
        args.check()?;
        if args.reproducible && !world_size.is_power_of_two() {
            let above = world_size.next_power_of_two();
            return Err(Error::config(format!(
                "--reproducible with {world_size} processes: use a power of two, {} or {above}",
                above / 2
            )));
        }
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
        let &Args { seq_len, layers, heads, embd, dropout, .. } = args;
        let model = GptConfig { vocab: text.vocab, seq_len, layers, heads, embd, dropout };
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

    pub(crate) fn held_out_windows(&self) -> usize {
        self.text.held_out.len().saturating_sub(1) / self.micro_batch
    }
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
