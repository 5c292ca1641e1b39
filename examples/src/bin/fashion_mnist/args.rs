//! The arguments, and their checks.

use std::path::PathBuf;

use burn_ddp::{Error, Result};
use burn_ddp_examples::{Processes, check_counts, check_not_negative, check_output_file, check_share};
use clap::Parser;

use crate::model::Norm;

/// Train a small convolutional network on Fashion-MNIST with Burn's `SupervisedTraining`, in one process or several
/// that act as one.
#[derive(Parser, Debug)]
#[command(version, allow_negative_numbers = true)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// The directory of the four files of Fashion-MNIST
    #[arg(long, value_name = "DIR", default_value = "/usr/share/datasets/fashion-mnist")]
    pub(crate) data: PathBuf,
    /// Where metrics, checkpoints and experiment.log go; those of an earlier run are replaced, unless it is resumed
    /// [default: burn-ddp-fashion-mnist in the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    artifacts: Option<PathBuf>,
    /// Times through the training items
    #[arg(long, default_value_t = 2)]
    pub(crate) epochs: usize,
    /// Items of a micro-step over all processes
    #[arg(long, default_value_t = 64)]
    pub(crate) batch_size: usize,
    /// Micro-steps of an optimizer step
    #[arg(long, default_value_t = 1)]
    pub(crate) accumulate: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 4e-3)]
    pub(crate) lr: f64,
    /// Normalization between a convolution and its activation
    #[arg(long, value_enum, default_value = "sync")]
    pub(crate) norm: Norm,
    /// Share of the activations that each training step leaves out
    #[arg(long, default_value_t = 0.25)]
    pub(crate) dropout: f64,
    /// Threads of a process that prepare batches; 0 prepares each when it is needed
    #[arg(long, default_value_t = 1)]
    pub(crate) workers: usize,
    /// Use only the first N training items and the first N/6 test items
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Seed of the initial weights, the order of the items and dropout
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Go on after this epoch, from its checkpoint in --artifacts
    #[arg(long, value_name = "EPOCH")]
    pub(crate) resume: Option<usize>,
    /// Write the ids of each rank's items to FILE.rank0, FILE.rank1 and so on, one line a micro-step
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) log_batches: Option<PathBuf>,
}

impl Args {
    pub(crate) fn artifacts(&self) -> PathBuf {
        self.artifacts.clone().unwrap_or_else(|| std::env::temp_dir().join("burn-ddp-fashion-mnist"))
    }

    /// The arguments that determine the training, with their flags.
    pub(crate) fn of_training(&self) -> Vec<(&'static str, String)> {
        vec![
            ("--backend", format!("{:?}", self.processes.backend)),
            ("--epochs", self.epochs.to_string()),
            ("--batch-size", self.batch_size.to_string()),
            ("--accumulate", self.accumulate.to_string()),
            ("--lr", self.lr.to_string()),
            ("--norm", format!("{:?}", self.norm)),
            ("--dropout", self.dropout.to_string()),
            ("--limit", format!("{:?}", self.limit)),
            ("--seed", self.seed.to_string()),
            ("--resume", format!("{:?}", self.resume)),
        ]
    }

    /// Finds everything that is wrong with the arguments alone.
    pub(crate) fn check(&self) -> Result<()> {
        self.processes.backend.check()?;
        check_counts(&[
            ("--epochs", self.epochs),
            ("--batch-size", self.batch_size),
            ("--accumulate", self.accumulate),
            ("--limit", self.limit.unwrap_or(1)),
            ("--resume", self.resume.unwrap_or(1)),
            // Without threads each batch is made when it is needed.
            ("--workers", self.workers.max(1)),
        ])?;
        check_not_negative(&[("--lr", self.lr)])?;
        check_share("--dropout", self.dropout)?;
        if let Some(epoch) = self.resume.filter(|epoch| *epoch >= self.epochs) {
            return Err(Error::config(format!(
                "--resume {epoch} of --epochs {}: nothing is left to train; give more epochs",
                self.epochs
            )));
        }
        self.log_batches.as_ref().map_or(Ok(()), |path| check_output_file("--log-batches", path))
    }

    /// Finds what is wrong with the directory of artifacts; only rank 0 uses it.
    pub(crate) fn check_artifacts(&self) -> Result<()> {
        let artifacts = self.artifacts();
        if artifacts.exists() && !artifacts.is_dir() {
            return Err(Error::config(format!("--artifacts {}: not a directory", artifacts.display())));
        }
        let Some(epoch) = self.resume else { return Ok(()) };
        let checkpoint = artifacts.join("checkpoint").join(format!("model-{epoch}.mpk"));
        if checkpoint.exists() {
            return Ok(());
        }
        Err(Error::config(format!(
            "--resume {epoch}: there is no {}; name the --artifacts of the run and an epoch whose checkpoint is kept",
            checkpoint.display()
        )))
    }
}
