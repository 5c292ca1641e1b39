//! The state of an accumulation window, drawn in the [module documentation](super).

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_ddp_comm::{Error, ErrorKind, ReduceOp, Result};

use super::GradientReduction;
use super::buckets::GradientBuckets;
use super::forecast::ExpectedWeight;
use super::in_flight::InFlight;
use crate::process_group::{BackwardLease, ProcessGroup};

/// Advice appended to errors of overlap, for programs that cannot follow the advice before it.
pub(crate) const OVERLAP_ADVICE: &str = "turn overlap off by `ReplicaOptions::with_overlap(false)` (with a Learner by \
     `DdpStrategy::with_replica(ReplicaOptions::new().with_overlap(false))`)";

/// State of the window under way. [`has_taken`](Self::has_taken) and `sent` read it; each other method is called for
/// one event. `window_continues` and `replica_dropped` change nothing: they return the error that the event is in the
/// present state.
pub(super) enum WindowState<B: Backend> {
    /// Micro-steps are added. Gradients stay in Burn's container.
    Collecting,
    /// The window's last backward pass runs, and no gradient has been taken yet.
    Armed(ExpectedWeight),
    /// Gradients are taken out of the backward pass, and buckets that are complete are sent.
    Taking(Taking<B>),
    /// The last micro-step was added after the first buckets had been sent; `reduce` sends the others.
    Closed(InFlight<B>),
    /// An error that the hook or `discard` could not return, kept for the next call that can. The lease stays with it:
    /// if buckets were sent, ranks may be out of step.
    Failed(Error, Option<BackwardLease>),
}

/// Gradients that were taken out of a backward pass.
pub(super) struct Taking<B: Backend> {
    /// The weight of their micro-step, by which they were multiplied.
    weight: Option<f64>,
    /// By parameter index.
    taken: Vec<bool>,
    /// False once another backward pass has begun, of which nothing is taken.
    open: bool,
    in_flight: InFlight<B>,
    lease: BackwardLease,
}

impl<B: Backend> Taking<B> {
    pub(super) fn weight(&self) -> Option<f64> {
        self.weight
    }

    /// Records that the gradient of parameter `index` was taken, and sends out of `sums` the buckets, in the plan's
    /// order and without the last, whose gradients have all been taken. Returns how many were sent.
    pub(super) fn gradient_taken(
        &mut self,
        index: usize,
        sums: &mut [Option<FloatTensor<B>>],
        buckets: &GradientBuckets,
        group: &ProcessGroup<B>,
        op: ReduceOp,
    ) -> u64 {
        self.taken[index] = true;
        let mut sent = 0;
        while self.in_flight.sent() + 1 < buckets.collectives()
            && buckets.params(self.in_flight.sent()).iter().all(|index| self.taken[*index])
            && self.in_flight.has_room()
        {
            let tensors = buckets.take(self.in_flight.sent(), sums, group.device());
            self.in_flight.send_in_backward(group, tensors, op, &self.lease);
            sent += 1;
        }
        sent
    }

    /// Refuses a micro-step of another weight than the one its gradients were multiplied by.
    fn check_weight(&self, weight: Option<f64>, reduction: GradientReduction) -> Result<()> {
        let (weight, used) = (weight.unwrap_or(1.0), self.weight.unwrap_or(1.0));
        if weight == 0.0 || (reduction == GradientReduction::Mean && weight != used) {
            return Err(Error::config(format!(
                "the micro-step has weight {weight}, but its gradients were taken with weight {used} in the backward \
                 pass: call `Replica::expect_weight({weight})` before it, or {OVERLAP_ADVICE}"
            )));
        }
        Ok(())
    }
}

impl<B: Backend> WindowState<B> {
    /// True if the gradient of parameter `index` was taken out of the micro-step under way.
    pub(super) fn has_taken(&self, index: usize) -> bool {
        matches!(self, Self::Taking(taking) if taking.taken[index])
    }

    /// Number of buckets of this window that were sent.
    fn sent(&self) -> usize {
        match self {
            Self::Taking(Taking { in_flight, .. }) | Self::Closed(in_flight) => in_flight.sent(),
            Self::Collecting | Self::Armed(_) | Self::Failed(..) => 0,
        }
    }

    /// A backward pass begins. `expected` is the weight of its micro-step, if gradients may be taken out of it.
    pub(super) fn backward_begins(&mut self, expected: Option<ExpectedWeight>) {
        match self {
            Self::Collecting | Self::Armed(_) => *self = expected.map_or(Self::Collecting, Self::Armed),
            Self::Taking(taking) => taking.open = false,
            Self::Closed(_) | Self::Failed(..) => {}
        }
    }

    /// A gradient is ready, that of parameter `index` of `params`. Returns where to record it, if it may be taken: the
    /// first one in a pass also needs the lease, which another replica may hold.
    pub(super) fn gradient_ready(
        &mut self,
        index: usize,
        params: usize,
        limit: usize,
        acquire_lease: impl FnOnce() -> Option<BackwardLease>,
    ) -> Option<&mut Taking<B>> {
        if let Self::Armed(ExpectedWeight(weight)) = *self {
            let lease = acquire_lease()?;
            let in_flight = InFlight::new(limit);
            *self = Self::Taking(Taking { weight, taken: vec![false; params], open: true, in_flight, lease });
        }
        match self {
            Self::Taking(taking) if taking.open && !taking.taken[index] => Some(taking),
            _ => None,
        }
    }

    /// The caller says that the window continues after its micro-step `number`.
    ///
    /// # Errors
    /// Buckets of the window were sent.
    pub(super) fn window_continues(&self, number: usize) -> Result<()> {
        match self.sent() {
            0 => Ok(()),
            sent => Err(Error::config(format!(
                "no_sync after {sent} gradient buckets were sent in the backward pass of micro-step {number}, which \
                 was expected to be the window's last: say how many a window has, empty ones included, by \
                 `ReplicaOptions::with_accumulation`, or, if windows grow, {OVERLAP_ADVICE}"
            ))),
        }
    }

    /// A micro-step of `weight` was added. Drops the lease: its owner sends the other buckets now, or has sent none.
    ///
    /// # Errors
    /// Its gradients were taken with another weight.
    pub(super) fn micro_step_added(
        &mut self,
        weight: Option<f64>,
        reduction: GradientReduction,
    ) -> Result<()> {
        *self = match std::mem::replace(self, Self::Collecting) {
            Self::Taking(taking) => {
                taking.check_weight(weight, reduction)?;
                if taking.in_flight.sent() > 0 { Self::Closed(taking.in_flight) } else { Self::Collecting }
            }
            Self::Armed(_) => Self::Collecting,
            state => state,
        };
        Ok(())
    }

    /// The window is reduced. Returns the buckets that were sent before.
    pub(super) fn window_reduced(&mut self, limit: usize) -> InFlight<B> {
        match std::mem::replace(self, Self::Collecting) {
            Self::Closed(in_flight) => in_flight,
            _ => InFlight::new(limit),
        }
    }

    /// Something failed where no error can be returned. The first error is kept.
    pub(super) fn failed(&mut self, error: Error) {
        *self = match std::mem::replace(self, Self::Collecting) {
            Self::Failed(first, lease) => Self::Failed(first, lease),
            Self::Taking(taking) => Self::Failed(error, Some(taking.lease)),
            Self::Collecting | Self::Armed(_) | Self::Closed(_) => Self::Failed(error, None),
        };
    }

    /// The window is discarded. Buckets that were sent cannot be taken back, so the next call then fails.
    pub(super) fn window_discarded(&mut self) {
        match self.sent() {
            0 => self.window_dropped(),
            sent => self.failed(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "a window was discarded after {sent} of its gradient buckets were sent in the backward pass: call \
                     `reduce` and leave the optimizer step out, or {OVERLAP_ADVICE}"
                ),
            )),
        }
    }

    /// The window is given up together with the group, or nothing of it was sent. An error that was not returned yet
    /// stays.
    pub(super) fn window_dropped(&mut self) {
        if !matches!(self, Self::Failed(..)) {
            *self = Self::Collecting;
        }
    }

    /// A call that can return an error begins.
    ///
    /// # Errors
    /// The error that was kept.
    pub(super) fn take_error(&mut self) -> Result<()> {
        match std::mem::replace(self, Self::Collecting) {
            Self::Failed(error, _) => Err(error),
            state => {
                *self = state;
                Ok(())
            }
        }
    }

    /// The replica is dropped. Returns the error with which its group has to end: one that was kept, or that buckets
    /// are in flight, of which other ranks may have sent more or fewer.
    pub(super) fn replica_dropped(&self) -> Option<Error> {
        match (self, self.sent()) {
            (Self::Failed(error, _), _) => Some(error.clone()),
            (_, 0) => None,
            (_, sent) => Some(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "a replica was dropped after {sent} of its gradient buckets were sent in the backward pass: call \
                     `reduce` first, or {OVERLAP_ADVICE}"
                ),
            )),
        }
    }
}
