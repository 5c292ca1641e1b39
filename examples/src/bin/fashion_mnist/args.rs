//! What the program is told, and what of it is refused.

use std::path::PathBuf;

use burn_ddp::{Error, Result};
use burn_ddp_examples::{BackendName, check_counts, parent};
use clap::Parser;

use crate::model::Norm;

/// Train a small convolutional network on Fashion-MNIST with Burn's `SupervisedTraining`, in one process or several
/// that act as one.
#[derive(Parser, Debug)]
#[command(version, allow_negative_numbers = true)]
pub(crate) struct Args {
    /// Start this many processes on this machine; without it, be the one process that trains, or the rank that a
    /// launcher's environment names
    #[arg(long)]
    pub(crate) nproc: Option<usize>,
    /// Who computes
    #[arg(long, value_enum, default_value = "flex")]
    pub(crate) backend: BackendName,
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
    /// What stands between a convolution and its activation
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

    /// The arguments that make a difference to what is trained.
    pub(crate) fn essence(&self) -> String {
        let Self { backend, epochs, batch_size, accumulate, lr, norm, dropout, limit, seed, resume, .. } =
            self;
        format!(
            "--backend {backend:?} --epochs {epochs} --batch-size {batch_size} --accumulate {accumulate} --lr {lr} --norm {norm:?} \
             --dropout {dropout} --limit {limit:?} --seed {seed} --resume {resume:?}"
        )
    }

    /// Finds everything that is wrong with the arguments alone.
    pub(crate) fn check(&self) -> Result<()> {
        self.backend.check()?;
        check_counts(&[
            ("--epochs", self.epochs),
            ("--batch-size", self.batch_size),
            ("--accumulate", self.accumulate),
            ("--limit", self.limit.unwrap_or(1)),
            ("--resume", self.resume.unwrap_or(1)),
            // Without threads each batch is made when it is needed.
            ("--workers", self.workers.max(1)),
        ])?;
        let Self { lr, dropout, epochs, .. } = self;
        if !lr.is_finite() || *lr < 0.0 {
            return Err(Error::config(format!("--lr {lr}: give a number that is not negative")));
        }
        if !(0.0..1.0).contains(dropout) {
            return Err(Error::config(format!("--dropout {dropout}: give a share from 0 to below 1")));
        }
        if let Some(epoch) = self.resume.filter(|epoch| epoch >= epochs) {
            return Err(Error::config(format!(
                "--resume {epoch} of --epochs {epochs}: nothing is left to train; give more epochs"
            )));
        }
        match &self.log_batches {
            Some(path) if path.is_dir() || !parent(path).is_dir() => Err(Error::config(format!(
                "--log-batches {}: give the path of a file in a directory that exists",
                path.display()
            ))),
            _ => Ok(()),
        }
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
