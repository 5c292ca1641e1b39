//! Text as tokens, and the tokens of each micro-batch.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_ddp::{Error, Result};
use clap::ValueEnum;

/// The text to train on, unless `--data` names another file; `data/README.md` has its source.
pub(crate) const DEFAULT_TEXT: &str = include_str!("../../../data/new-testament.txt");

/// The division of text into tokens.
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
    /// Entropy in nats of the frequencies of tokens: the loss of a model that ignores context.
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

/// The range of micro-batch `micro` of optimizer step `step` in the training text. It depends on the global batch
/// alone, so the order is the same for every world size. When the next global batch, with the one token behind it that
/// is its last target, does not fit, the text starts again from its beginning on all ranks.
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
