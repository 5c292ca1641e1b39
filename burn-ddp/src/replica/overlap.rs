//! The replica's overlap API: announcements of the program, marks for the backward pass, and the order of buckets.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_ddp_comm::{Rank, Result};

use super::Replica;
#[cfg(feature = "overlap")]
use super::{marks, registry};
use crate::reducer::OverlapStats;

impl<B: AutodiffBackend> Replica<B> {
    /// Numbers of buckets that were sent during backward passes and after them.
    pub fn overlap(&self) -> OverlapStats {
        self.reducer.lock().stats()
    }

    /// Announces, before the forward pass of a window's last micro-step, that it will have `weight` in
    /// [`MicroStep::with_weight`](crate::MicroStep::with_weight). Gradients can be sent during the backward pass only
    /// multiplied by it, so without this call a program that uses weights trains the same, and nothing of it overlaps,
    /// unless gradients are summed ([`GradientReduction::Sum`](crate::GradientReduction::Sum)), where weights do not
    /// count. Without the feature `overlap` the call has no effect.
    ///
    /// # Errors
    /// A weight that no micro-step may have. A micro-step that then comes with another weight is an error in its call.
    pub fn expect_weight(&mut self, weight: impl Into<f64>) -> Result<()> {
        let expected = self.reducer.lock().expect_weight(weight.into());
        expected.map_err(|error| self.give_up(error))
    }

    /// Marks the parameters of `model`, so that the next backward pass hands over their gradients as they become ready
    /// (feature `overlap`; else the call does nothing). Called before a forward pass. [`Replica::new`],
    /// [`Replica::no_sync`] and [`Replica::reduce`] do it themselves. A loop needs it only where the marks get lost
    /// after them: a model that was moved, forked or loaded from a record, an optimizer that is none of Burn's, or
    /// another backward pass through the same parameters.
    pub fn mark<M: AutodiffModule<B>>(&self, model: &M) {
        #[cfg(feature = "overlap")]
        if self.group.is_connected() {
            marks::mark_for_next_backward::<B, M>(model);
        }
        let _ = model;
    }

    /// Announces the next micro-step: whether it is the window's last, and its weight.
    #[cfg(feature = "train")]
    pub(crate) fn expect<M: AutodiffModule<B>>(
        &mut self,
        model: &M,
        last: bool,
        weight: Option<f64>,
    ) -> Result<()> {
        self.reducer.lock().expect_last(last);
        weight.map_or(Ok(()), |weight| self.expect_weight(weight))?;
        self.mark(model);
        Ok(())
    }

    /// Registers the parameters of `model` for the backward pass and returns it with them marked, also if this replica
    /// does not overlap: a pass through this model and another must not be taken for the other's alone.
    pub(super) fn register<M: AutodiffModule<B>>(&self, model: M) -> M {
        #[cfg(feature = "overlap")]
        if self.group.is_connected() {
            registry::register(self.ids.iter().map(burn::module::ParamId::val), &self.reducer);
            return marks::mark_for_all_steps::<B, M>(model);
        }
        model
    }

    /// After the first optimizer step, plans buckets in the order in which rank 0's gradients became ready, as PyTorch
    /// DDP does. Visit order differs from it: Burn runs a backward pass by the depth of its nodes, and a parameter that
    /// is reshaped before it is used (gamma and beta of a `LayerNorm` are) gets its gradient at the very end, up to
    /// which its bucket would wait.
    pub(super) fn follow_arrivals(&mut self) -> Result<()> {
        if !cfg!(feature = "overlap") || self.steps > 0 || !self.group.is_connected() {
            return Ok(());
        }
        let mut reducer = self.reducer.lock();
        let buckets = &reducer.plan().buckets;
        let mixed = buckets.windows(2).any(|pair| pair[0].dtype != pair[1].dtype);
        if buckets.len() < 2 || mixed {
            return Ok(());
        }
        let arrivals = reducer.take_arrivals();
        let mine: Vec<u8> = arrivals.iter().flat_map(|index| (*index as u64).to_le_bytes()).collect();
        let rank_0 = self.group.broadcast_bytes(&mine, Rank(0))?;
        let arrivals = rank_0.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize);
        reducer.reorder(&arrivals.collect::<Vec<_>>());
        tracing::debug!("{} reduces from now on\n{}", self.group.rank(), reducer.plan());
        Ok(())
    }
}

/// Ends the group at its next use if buckets were sent and the others never will be.
impl<B: AutodiffBackend> Drop for Replica<B> {
    fn drop(&mut self) {
        if let Some(error) = self.reducer.lock().replica_dropped() {
            self.group.ranks().mark_broken(error);
        }
    }
}
