//! Parameters that the loss does not depend on, on some ranks or on all.

use burn::tensor::backend::Backend;
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};

use crate::bucket::{ParamRole, ParamSpec};
use crate::process_group::ProcessGroup;
use crate::reducer::Reduction;

/// The check for unused parameters: an error in strict mode, else one warning.
pub(super) struct UnusedCheck {
    strict: bool,
    warned: bool,
}

impl UnusedCheck {
    pub(super) fn new(strict: bool) -> Self {
        Self { strict, warned: false }
    }

    /// Checks the `reduction` of optimizer step `step`. All ranks see the same counts, so all of them come to the same
    /// collective, which tells them the ranks that lack a gradient.
    ///
    /// # Errors
    /// In strict mode, the unused parameters and the ranks; any error of the group.
    pub(super) fn check<B: Backend>(
        &mut self,
        reduction: &Reduction<B>,
        specs: &[ParamSpec],
        group: &ProcessGroup<B>,
        step: usize,
    ) -> Result<()> {
        let unused = self.unused(reduction, specs);
        if unused.is_empty() || (self.warned && !self.strict) {
            return Ok(());
        }
        let flags = reduction.used_here.iter().map(|used| u8::from(*used)).collect();
        let all = group.all_gather_bytes(flags)?;
        let line = |index: usize| {
            let lacks = |rank: &usize| all[*rank].get(index) != Some(&1);
            let ranks: Vec<_> = (0..all.len()).filter(lacks).map(|rank| Rank(rank).to_string()).collect();
            format!("{} on {}", specs[index], ranks.join(", "))
        };
        let lines: Vec<_> = unused.into_iter().map(line).collect();
        let text = format!("no gradient in optimizer step {step} for {}", lines.join("; "));
        if self.strict {
            return Err(group.barrier_then(Error::new(ErrorKind::Mismatch, text)));
        }
        self.warned = true;
        if group.rank().is_root() {
            tracing::warn!("{text}: taken as zero there (said once)");
        }
        Ok(())
    }

    /// Indices of the parameters to report: those that some ranks did not use, and in strict mode those of no rank too.
    fn unused<B: Backend>(&self, reduction: &Reduction<B>, specs: &[ParamSpec]) -> Vec<usize> {
        let mut unused = reduction.partly_used.clone();
        if self.strict && !reduction.empty {
            let nowhere = |index: &usize| {
                specs[*index].role == ParamRole::Trained && reduction.gradients[*index].is_none()
            };
            unused.extend((0..specs.len()).filter(nowhere));
            unused.sort_unstable();
        }
        unused
    }
}
