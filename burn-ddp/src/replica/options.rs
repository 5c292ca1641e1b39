//! What a replica does besides reducing.

use derive_new::new;

use crate::reducer::GradientReduction;
use crate::replica::Reproducibility;

/// Options of a [`Replica`](crate::Replica).
#[derive(Clone, Debug, PartialEq, new)]
#[non_exhaustive]
pub struct ReplicaOptions {
    /// Mean (default) or sum of the gradients of all micro-steps and ranks.
    #[new(default)]
    pub reduction: GradientReduction,
    /// Largest norm of the whole gradient; larger ones are scaled down to it after the reduction. `None`
    /// (default) leaves gradients alone and takes no norm.
    #[new(default)]
    pub clip_norm: Option<f64>,
    /// Takes the norm of the whole gradient without clipping.
    #[new(default)]
    pub report_norm: bool,
    /// Largest bucket in bytes. `None` (default): 1 MiB for the first, 25 MiB for the others.
    #[new(default)]
    pub bucket_bytes: Option<usize>,
    /// Makes a trained parameter without a gradient on some rank an error instead of a zero (off).
    #[new(default)]
    pub strict: bool,
    /// Compares the parameters of all ranks after the first optimizer step and then after every so many.
    /// `None` (default) never does.
    #[new(default)]
    pub check_every: Option<usize>,
    /// Micro-steps of one accumulation window on one rank, where the replica has to know it ahead. `None` (default):
    /// whatever the loop does.
    #[new(default)]
    pub accumulation: Option<usize>,
    /// What the bits of the training depend on.
    #[new(default)]
    pub reproducibility: Reproducibility,
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ReplicaOptions {
    /// The same with another [`reduction`](Self::reduction).
    pub fn with_reduction(self, reduction: GradientReduction) -> Self {
        Self { reduction, ..self }
    }

    /// The same with [`clip_norm`](Self::clip_norm).
    pub fn with_clip_norm(self, norm: f64) -> Self {
        Self { clip_norm: Some(norm), ..self }
    }

    /// The same with [`report_norm`](Self::report_norm) on.
    pub fn with_norm(self) -> Self {
        Self { report_norm: true, ..self }
    }

    /// The same with [`bucket_bytes`](Self::bucket_bytes).
    pub fn with_bucket_bytes(self, bytes: usize) -> Self {
        Self { bucket_bytes: Some(bytes), ..self }
    }

    /// The same with [`strict`](Self::strict) on.
    pub fn with_strict(self) -> Self {
        Self { strict: true, ..self }
    }

    /// The same with [`check_every`](Self::check_every).
    pub fn with_check_every(self, steps: usize) -> Self {
        Self { check_every: Some(steps), ..self }
    }

    /// The same with [`accumulation`](Self::accumulation).
    pub fn with_accumulation(self, micro_steps: usize) -> Self {
        Self { accumulation: Some(micro_steps), ..self }
    }

    /// The same with another [`reproducibility`](Self::reproducibility).
    pub fn with_reproducibility(self, reproducibility: Reproducibility) -> Self {
        Self { reproducibility, ..self }
    }
}
