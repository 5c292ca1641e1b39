//! Options of a replica, and the checks of their values.

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn_ddp_comm::net::host::memory;
use burn_ddp_comm::{Error, Result};
use derive_new::new;

use crate::bucket::check_bucket_bytes;
use crate::parameters;
use crate::process_group::ProcessGroup;
use crate::reducer::{BUCKETS_IN_FLIGHT, GradientReduction, Reducer, ReducerOptions};
use crate::replica::Reproducibility;

/// Options of a [`Replica`](crate::Replica). All ranks give the same.
///
/// ```
/// use burn_ddp::ReplicaOptions;
///
/// let options = ReplicaOptions::new().with_accumulation(4).with_clip_norm(1.0);
/// assert_eq!((options.accumulation, options.clip_norm), (Some(4), Some(1.0)));
/// ```
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
    /// Largest bucket in bytes, at least 1 and at most this machine's memory. `None` (default): 1 MiB for the first,
    /// 25 MiB for the others; with the feature `overlap`, after the first optimizer step, a 32nd of all gradients for
    /// the others, but not less than 1 MiB and not more than 25.
    #[new(default)]
    pub bucket_bytes: Option<usize>,
    /// Makes a trained parameter without a gradient on some rank an error instead of a zero (off).
    #[new(default)]
    pub strict: bool,
    /// Compares the parameters of all ranks after the first optimizer step and then after every so many.
    /// `None` (default) never does.
    #[new(default)]
    pub check_every: Option<usize>,
    /// Micro-steps of one accumulation window on one rank. [`Reproducibility::AnyWorldSize`] needs it, and with it
    /// gradients overlap from the first window on. `None` (default) leaves the number to the loop.
    #[new(default)]
    pub accumulation: Option<usize>,
    /// The conditions under which a training gives the same bits again.
    #[new(default)]
    pub reproducibility: Reproducibility,
    /// Maximum number of gradient buckets in flight, at least 1; default 2. Without
    /// [`bucket_bytes`](Self::bucket_bytes) it counts buckets of 25 MiB, and of smaller ones, as the feature `overlap`
    /// makes them, proportionally more may be in flight. It bounds memory where a bucket is a copy (on devices) and
    /// changes no numbers.
    #[new(value = "BUCKETS_IN_FLIGHT")]
    pub buckets_in_flight: usize,
    /// Sends gradients while the window's last backward pass runs (default), in builds with the feature `overlap`.
    /// Gradients of all but the last bucket are moved out of the result of `backward()`: an **empty tensor** stands for
    /// each until [`Replica::reduce`] returns them reduced. So a micro-step has to be one backward pass, handed over
    /// unchanged; turn this off for programs that read gradients before `reduce` or add up those of several passes.
    /// Parameters are marked for Burn's backward pass either way, in a connected group.
    ///
    /// [`Replica::reduce`]: crate::Replica::reduce
    #[new(value = "true")]
    pub overlap: bool,
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

    /// The same with [`buckets_in_flight`](Self::buckets_in_flight).
    pub fn with_buckets_in_flight(self, buckets: usize) -> Self {
        Self { buckets_in_flight: buckets, ..self }
    }

    /// The same with [`overlap`](Self::overlap) on or off.
    pub fn with_overlap(self, overlap: bool) -> Self {
        Self { overlap, ..self }
    }

    /// Refuses values that cannot be meant, before anything is sent.
    pub(super) fn check(&self) -> Result<()> {
        if self.check_every == Some(0) {
            return Err(Error::config("check_every is 0: give a number of optimizer steps, or leave it out"));
        }
        if self.accumulation == Some(0) {
            return Err(Error::config("accumulation is 0: give the number of micro-steps of a window"));
        }
        if let Some(norm) = self.clip_norm.filter(|norm| norm.is_nan() || *norm <= 0.0) {
            return Err(Error::config(format!("clip_norm is {norm}: give a positive number")));
        }
        if self.buckets_in_flight == 0 {
            return Err(Error::config("buckets_in_flight is 0: give 1 or more, or leave it out"));
        }
        self.bucket_bytes.map_or(Ok(()), |bytes| check_bucket_bytes(bytes, memory().total))
    }
}

/// The ids of all parameters of `model`, and a reducer for them.
pub(super) fn build_reducer<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    group: &ProcessGroup<B::InnerBackend>,
    options: &ReplicaOptions,
) -> (Vec<ParamId>, Reducer<B::InnerBackend>) {
    let params = parameters::describe::<B, M>(model);
    let (ids, specs) = params.into_iter().map(|param| (param.id, param.spec)).unzip();
    let options = ReducerOptions {
        reduction: options.reduction,
        order: options.reproducibility.order(options),
        bucket_bytes: options.bucket_bytes,
        buckets_in_flight: options.buckets_in_flight,
        accumulation: options.accumulation,
        overlap: options.overlap && group.is_connected(),
    };
    (ids, Reducer::new(group.clone(), specs, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_be_meant_are_named() {
        let text = |options: ReplicaOptions| options.check().expect_err("refused").to_string();
        assert!(text(ReplicaOptions::new().with_bucket_bytes(0)).contains("bucket_bytes is 0"));
        assert!(text(ReplicaOptions::new().with_buckets_in_flight(0)).contains("buckets_in_flight is 0"));
        if let Some(memory) = memory().total {
            let above = usize::try_from(memory).expect("a size") + 1;
            assert!(text(ReplicaOptions::new().with_bucket_bytes(above)).contains(&above.to_string()));
        }
        ReplicaOptions::new().check().expect("defaults");
        ReplicaOptions::new().with_bucket_bytes(1).check().expect("small");
    }
}
