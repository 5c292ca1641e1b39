//! What a replica knows, says and does for gradients to leave during the backward pass.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;

use super::Replica;
#[cfg(feature = "overlap")]
use super::marks;
use crate::bucket::ParamSpec;
use crate::error::{Error, Result};
#[cfg(feature = "overlap")]
use crate::rank::Rank;
use crate::reducer::{OverlapStats, TURN_OFF};

impl<B: AutodiffBackend> Replica<B> {
    /// How many buckets were sent during backward passes, and how many after them.
    pub fn overlap(&self) -> OverlapStats {
        self.reducer.lock().overlap()
    }

    /// Says, before the forward pass of a window's last micro-step, that it will have `weight` in
    /// [`MicroStep::with_weight`](crate::MicroStep::with_weight): gradients can leave during the backward pass only weighed. Without this call a program
    /// that uses weights trains the same, and nothing of it overlaps, unless gradients are summed
    /// ([`GradientReduction::Sum`](crate::GradientReduction::Sum)), where weights do not count; without the feature `overlap` it has no effect.
    ///
    /// # Errors
    /// A weight that no micro-step may have. A micro-step that then comes with another weight is an error in its call.
    pub fn expect_weight(&mut self, weight: impl Into<f64>) -> Result<()> {
        let expected = self.reducer.lock().expect_weight(weight.into());
        expected.map_err(|error| self.give_up(error))
    }

    /// Lets the next backward pass hand over gradients of `model` as they become ready (feature `overlap`; else nothing is
    /// done). Called before a forward pass. [`Replica::new`], [`Replica::no_sync`] and [`Replica::reduce`] do it by
    /// themselves; a loop needs it only where the mark gets lost after them: a model that was moved, forked or loaded
    /// from a record, an optimizer that is none of Burn's, or another backward pass through the same parameters.
    pub fn mark<M: AutodiffModule<B>>(&self, model: &M) {
        #[cfg(feature = "overlap")]
        if self.group.is_connected() {
            marks::visit::<B, M>(model);
        }
        let _ = model;
    }

    /// Says what the next micro-step will be, where the caller knows: whether it is the window's last, and its weight.
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

    /// Whether buckets may leave during backward passes: where that is wanted, where anything is sent at all, and where
    /// there is another bucket than the last.
    #[cfg(feature = "overlap")]
    pub(super) fn overlaps(&self) -> bool {
        self.options.overlap && self.group.is_connected() && self.plan.buckets.len() > 1
    }

    /// After the first optimizer step: plans buckets in the order in which rank 0's gradients came, as PyTorch DDP does.
    /// Visit order does not tell it: Burn runs a backward pass by the depth of its nodes, and a parameter that is
    /// reshaped before it is used (gamma and beta of a `LayerNorm` are) gets its gradient at the very end, up to which a
    /// bucket would wait for it.
    #[cfg(feature = "overlap")]
    pub(super) fn follow_arrivals(&mut self) -> Result<()> {
        let mixed = self.plan.buckets.windows(2).any(|pair| pair[0].dtype != pair[1].dtype);
        if self.steps > 0 || !self.group.is_connected() || self.plan.buckets.len() < 2 || mixed {
            return Ok(());
        }
        let mine: Vec<u8> = self
            .reducer
            .lock()
            .take_arrivals()
            .iter()
            .flat_map(|index| (*index as u64).to_le_bytes())
            .collect();
        let of_rank_0 = self.group.broadcast_bytes(&mine, Rank(0))?;
        let arrivals: Vec<usize> =
            of_rank_0.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize).collect();
        let mut reducer = self.reducer.lock();
        reducer.reorder(&arrivals, self.options.bucket_bytes);
        self.plan = reducer.plan().clone();
        tracing::debug!("{} reduces from now on\n{}", self.group.rank(), self.plan);
        Ok(())
    }

    /// Claims the parameters of `model`, and returns it with them marked. Without buckets that leave early too: a backward
    /// pass through this model and another is no pass of the other alone.
    #[cfg(feature = "overlap")]
    pub(super) fn begin_overlap<M: AutodiffModule<B>>(&self, model: M) -> M {
        if !self.group.is_connected() {
            return model;
        }
        crate::reducer::sinks::claim(self.ids.iter().map(burn::module::ParamId::val), &self.reducer);
        marks::map::<B, M>(model)
    }
}

#[cfg(feature = "overlap")]
impl<B: AutodiffBackend> Drop for Replica<B> {
    fn drop(&mut self) {
        if let Some(error) = self.reducer.lock().left_behind() {
            self.group.ranks().break_off(error);
        }
    }
}

/// Gradients that were taken belong to one backward pass, and what came to the replica is not of that one alone.
pub(super) fn other_backward(spec: &ParamSpec, is_there: bool) -> Error {
    let what = if is_there { "is not empty" } else { "is missing" };
    Error::config(format!(
        "the gradient of {spec} was taken in a backward pass, and in the micro-step that was handed over it {what}: a \
         micro-step is one backward pass, with all gradients of the model and of no copy of it (`no_grad` a copy that is \
         not trained); for others {TURN_OFF}"
    ))
}
