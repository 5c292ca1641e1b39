//! Gradients that leave while the backward pass still runs.
//!
//! The window's last backward pass hands over each gradient when its last contribution is in (`backend/hook.rs`). It is
//! added to those of earlier micro-steps, and when the next bucket of the plan is complete it is sent. Nothing depends on
//! it: what was not handed over, or could not leave yet, is sent by [`Reducer::reduce`]. The last bucket always is, for the
//! losses ride in it, so its gradients stay where they are.
//!
//! The calls come from inside of Burn's autodiff, under a lock of its graph. So nothing here waits, nothing touches an
//! autodiff tensor, and an error is kept for the next call that can return one.

use burn::tensor::backend::Backend;

use super::ahead::Expected;
#[cfg(feature = "overlap")]
use super::on_wire;
use super::{GradientReduction, Reducer};
#[cfg(feature = "overlap")]
use crate::bucket::{BUCKET_BYTES, BucketPlan, FIRST_BUCKET_BYTES, ParamRole, overlapped_cap};
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::ProcessGroup;
#[cfg(feature = "overlap")]
use crate::process_group::BackwardLease;

/// What errors of gradients that were taken say, for programs that cannot do what else they say.
pub(crate) const TURN_OFF: &str = "turn overlap off by `ReplicaOptions::with_overlap(false)` (with a Learner by \
     `DdpStrategy::with_replica(ReplicaOptions::new().with_overlap(false))`)";

/// Buckets of gradients since a replica was made. The last bucket of an optimizer step, in which the loss travels, is
/// always sent after the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OverlapStats {
    /// Optimizer steps that were reduced.
    pub steps: u64,
    /// Buckets that were sent while the backward pass ran.
    pub in_backward: u64,
    /// Buckets that were sent after it.
    pub after_backward: u64,
}

/// What the backward pass has handed over.
pub(super) struct Early<B: Backend> {
    /// Where buckets are sent; `None` where nothing leaves early.
    #[cfg_attr(not(feature = "overlap"), allow(dead_code, reason = "nothing leaves early"))]
    group: Option<ProcessGroup<B>>,
    /// By parameter index, whether its bucket may leave early: whether it is not in the last one.
    #[cfg(feature = "overlap")]
    leaves: Vec<bool>,
    /// While gradients are taken: the weight of their micro-step.
    open: Option<Expected>,
    /// By parameter index, gradients of the micro-step under way that were taken.
    taken: Vec<bool>,
    /// The weight they were taken with.
    weight: Option<f64>,
    /// Parameter indices in the order in which gradients came in the last backward pass; `None` once that was asked for.
    #[cfg(feature = "overlap")]
    arrivals: Option<Vec<usize>>,
    /// Held from the first gradient that is taken until the rest is sent.
    #[cfg(feature = "overlap")]
    turn: Option<BackwardLease>,
    /// What went wrong where no error could be returned.
    failed: Option<Error>,
}

impl<B: Backend> Early<B> {
    /// For `params` parameters, of which nothing leaves early.
    pub(super) fn new(params: usize) -> Self {
        Self {
            group: None,
            #[cfg(feature = "overlap")]
            leaves: vec![false; params],
            open: None,
            taken: vec![false; params],
            weight: None,
            #[cfg(feature = "overlap")]
            arrivals: Some(Vec::new()),
            #[cfg(feature = "overlap")]
            turn: None,
            failed: None,
        }
    }

    /// For the buckets of `plan`, which leave over `group`.
    #[cfg(feature = "overlap")]
    pub(super) fn over(group: ProcessGroup<B>, params: usize, plan: &BucketPlan) -> Self {
        let mut early = Self { group: Some(group), ..Self::new(params) };
        if let Some((_, buckets)) = plan.buckets.split_last() {
            buckets.iter().flat_map(|bucket| &bucket.params).for_each(|index| early.leaves[*index] = true);
        }
        early
    }

    /// Keeps the first error for the next call that can return one.
    pub(super) fn fail(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    pub(super) fn has_taken(&self, index: usize) -> bool {
        self.taken[index]
    }

    fn has_taken_any(&self) -> bool {
        self.taken.contains(&true)
    }

    /// Ends the micro-step, which came with `weight`.
    pub(super) fn close(&mut self, weight: Option<f64>, reduction: GradientReduction) -> Result<()> {
        self.open = None;
        if !self.has_taken_any() {
            return Ok(());
        }
        self.taken.fill(false);
        let (weight, weighed) = (weight.unwrap_or(1.0), self.weight.unwrap_or(1.0));
        if weight == 0.0 || (reduction == GradientReduction::Mean && weight != weighed) {
            return Err(Error::config(format!(
                "the micro-step has weight {weight}, but its gradients were taken with weight {weighed} in the backward \
                 pass: call `Replica::expect_weight({weight})` before it, or {TURN_OFF}"
            )));
        }
        Ok(())
    }

    /// Forgets what was taken, and no error. Until that is returned nobody else can send: ranks may be out of step.
    pub(super) fn reset(&mut self) {
        self.open = None;
        self.taken.fill(false);
        if self.failed.is_none() {
            self.end_turn();
        }
    }

    /// Lets others send: the rest of the buckets is sent now, or nothing is any more.
    pub(super) fn end_turn(&mut self) {
        #[cfg(feature = "overlap")]
        drop(self.turn.take());
    }
}

impl<B: Backend> Reducer<B> {
    /// The error that could not be returned where it happened, if there is one.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.early.failed.take().map_or(Ok(()), Err)
    }

    /// Whether the gradient of parameter `index` was taken out of the micro-step under way, and an empty tensor left.
    pub(crate) fn has_taken(&self, index: usize) -> bool {
        self.early.has_taken(index)
    }

    /// The micro-step at hand is not the window's last: an error if buckets of the window were sent, and else the turn of
    /// others.
    pub(crate) fn continue_window(&mut self) -> Result<()> {
        match self.flight.sent() {
            0 => {
                self.early.end_turn();
                Ok(())
            }
            sent => Err(Error::config(format!(
                "no_sync after {sent} gradient buckets were sent in the backward pass of micro-step {}, which was expected to \
                 be the window's last: say how many a window has, empty ones included, by `ReplicaOptions::with_accumulation`, or, if windows grow, \
                 {TURN_OFF}",
                self.ahead.number()
            ))),
        }
    }

    /// Buckets sent so far.
    pub(crate) fn overlap(&self) -> OverlapStats {
        self.stats
    }

    /// What is wrong with leaving the group now: buckets that were sent and not reduced, of which other ranks may have sent
    /// more or fewer.
    #[cfg(feature = "overlap")]
    pub(crate) fn left_behind(&mut self) -> Option<Error> {
        let sent = self.flight.sent();
        let dropped = (sent > 0).then(|| {
            Error::new(
                ErrorKind::Mismatch,
                format!(
                    "a replica was dropped after {sent} of its gradient buckets were sent in the backward pass: call \
                     `reduce` first, or {TURN_OFF}"
                ),
            )
        });
        self.early.failed.take().or(dropped)
    }

    /// Forgets the window. What has been sent of it cannot be taken back: then the next call is an error.
    pub(crate) fn discard(&mut self) {
        let sent = self.flight.sent();
        if sent > 0 {
            self.early.fail(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "a window was discarded after {sent} of its gradient buckets were sent in the backward pass: call `reduce` \
                     and leave the optimizer step out, or {TURN_OFF}"
                ),
            ));
        }
        self.reset();
    }
}

#[cfg(feature = "overlap")]
impl<B: Backend> Early<B> {
    /// Whether it is this one's turn to send over its group; takes it where it is nobody's.
    fn has_turn(&mut self) -> bool {
        if self.turn.is_none() {
            self.turn = self.group.as_ref().and_then(|group| group.ranks().acquire_backward_lease());
        }
        self.turn.is_some()
    }
}

#[cfg(feature = "overlap")]
impl<B: Backend> Reducer<B> {
    /// A backward pass begins that reaches marked parameters. `alone`: of no other replica.
    pub(super) fn begin(&mut self, alone: bool) {
        let early = &mut self.early;
        if let Some(arrivals) = &mut early.arrivals {
            arrivals.clear();
        }
        // A layer that communicates in the backward pass takes turns with the buckets, which may leave at other times on
        // other ranks: the order of operations would differ.
        let free = early.group.as_ref().is_some_and(|group| !group.ranks().is_used_in_backward());
        let fresh = early.failed.is_none() && !early.has_taken_any() && self.flight.sent() == 0;
        early.open = if alone && free && fresh { self.ahead.next(self.reduction) } else { None };
    }

    /// The order in which gradients came in the last backward pass; from then on nobody looks.
    pub(crate) fn take_arrivals(&mut self) -> Vec<usize> {
        self.early.arrivals.take().unwrap_or_default()
    }

    /// Plans the buckets anew, of at most `cap` bytes or of a size that suits the model, in the order `arrivals`, and
    /// behind it, in reverse visit order, what is not in it. Between two windows, on all ranks alike. The bits of a sum do
    /// not depend on its bucket.
    pub(crate) fn reorder(&mut self, arrivals: &[usize], cap: Option<usize>) {
        let trained =
            |index: &usize| self.specs.get(*index).is_some_and(|spec| spec.role == ParamRole::Trained);
        let mut order = Vec::new();
        for index in arrivals.iter().copied().chain((0..self.specs.len()).rev()).filter(trained) {
            if !order.contains(&index) {
                order.push(index);
            }
        }
        let specs = on_wire(&self.specs);
        let usual = overlapped_cap(order.iter().map(|index| specs[*index].bytes()).sum());
        let (first, others) = (cap.unwrap_or(FIRST_BUCKET_BYTES), cap.unwrap_or(usual));
        self.plan = BucketPlan::new(&specs, order, first, others);
        if cap.is_none() {
            // As many bytes on their way as in buckets of the usual size.
            self.flight.multiply(BUCKET_BYTES / usual);
        }
        if let Some(group) = self.early.group.take() {
            self.early = Early { arrivals: None, ..Early::over(group, self.specs.len(), &self.plan) };
        }
    }

    /// Takes `gradient` of parameter `index`, for good, and leaves an empty tensor of as many dimensions; or leaves it.
    pub(super) fn offer(&mut self, index: usize, gradient: &mut burn::tensor::ops::FloatTensor<B>) {
        use burn_backend::TensorMetadata;
        if let Some(arrivals) = &mut self.early.arrivals
            && !arrivals.contains(&index)
        {
            arrivals.push(index);
        }
        let Some(Expected(weight)) = self.early.open else { return };
        let (shape, spec) = (gradient.shape(), &self.specs[index]);
        let fits = shape.to_vec() == spec.shape && shape.num_elements() > 0;
        if !fits || !self.early.leaves[index] || self.early.taken[index] || !self.early.has_turn() {
            return;
        }
        let empty = burn::tensor::Shape::from(vec![0; spec.shape.len()]);
        let empty = B::float_empty(empty, &B::float_device(gradient), gradient.dtype().into());
        let gradient = std::mem::replace(gradient, empty);
        self.early.taken[index] = true;
        self.early.weight = weight;
        self.window.close(index, gradient, weight, self.reduction);
        self.send_complete();
    }

    /// Sends the buckets, in the plan's order and but the last, whose gradients have all been taken.
    fn send_complete(&mut self) {
        let Some(group) = self.early.group.clone() else { return };
        let op = self.op(&group);
        let mut gradients = std::mem::take(&mut self.window.closed);
        while let Some(bucket) = self.plan.buckets.get(self.flight.sent())
            && self.flight.sent() + 1 < self.plan.buckets.len()
            && bucket.params.iter().all(|index| self.early.taken[*index])
            && self.flight.has_room()
            && let Some(turn) = &self.early.turn
        {
            let list = self.list(self.flight.sent(), &mut gradients, &group);
            self.flight.push(group.reduce_gradients_in_backward(list, op, turn));
            self.stats.in_backward += 1;
        }
        self.window.closed = gradients;
    }
}
