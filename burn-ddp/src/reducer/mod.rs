//! From the gradients of micro-steps to the gradient of the global batch.
//!
//! Weights are applied here and nowhere else. A micro-step of weight `w` (its items, or 1 where all have equally many)
//! gives the mean gradient `g` of its items. The reducer sends sums of `w * g` and divides once, at the end, by the sum
//! of all weights. Weights, losses and the record of which parameters were used travel behind the last bucket, so that
//! an optimizer step costs one collective a bucket and none for the loss.
//!
//! The sum of all weights is known last, and dividing by it is one more pass over all gradients. So the collectives
//! divide by the number of ranks where that is exact ([`collective_op`]), and nothing is left to divide by where there
//! are neither weights nor accumulation.
//!
//! # Overlap
//!
//! Burn's backward pass hands over each gradient when its last contribution is added (`backend/hook.rs`, with the
//! feature `overlap`). In the window's last pass the reducer takes it, adds it to those of earlier micro-steps, and
//! sends the next bucket of the plan when that is complete. The window is in one of five states ([`WindowState`]):
//!
//! ```text
//!              pass begins that is             gradient ready,           gradient ready:
//!              the window's last               lease acquired            complete buckets are sent
//!   Collecting ──────────────────────► Armed ──────────────────► Taking ─────┐
//!    ▲  ▲  ▲  ▲                          │                       │ │ │ ▲─────┘
//!    │  │  │  └─ micro-step added, or ───┘                       │ │ │
//!    │  │  │     another pass begins                             │ │ │
//!    │  │  └──── micro-step added or discarded, nothing sent ────┘ │ │
//!    │  └─────── reduced ──── Closed ◄── micro-step added, sent ───┘ │
//!    └────────── returned ─── Failed ◄── discarded, sent; panic ─────┘
//! ```
//!
//! Invariants:
//! - No number depends on overlap: [`Reducer::reduce`] sends all gradients that were not taken. It always sends the
//!   last bucket, because the losses travel in it.
//! - The lease of the group is held in `Taking`, and in `Failed` if it came from there. Any state can go to `Failed`.
//!   Ranks may have sent different numbers of buckets, so collectives of other callers are refused until `reduce` sends
//!   the rest.
//! - A replica that is dropped in `Taking` with buckets sent, or in `Failed`, ends its group.
//! - Events of the backward pass come from inside of Burn's autodiff, under a lock of its graph. So they never wait and
//!   never touch an autodiff tensor, and an error is kept (`Failed`) for the next call that can return one.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::Shape;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::TensorMetadata;
use burn_ddp_comm::{Error, ReduceOp, Result};

use crate::bucket::{BucketPlan, ParamSpec};
use crate::process_group::ProcessGroup;

mod buckets;
mod forecast;
mod in_flight;
mod order;
mod state;
#[cfg(test)]
mod tests;
mod totals;
mod window;

pub(crate) use order::Order;
pub(crate) use state::OVERLAP_ADVICE;

use buckets::GradientBuckets;
use forecast::Forecast;
use state::WindowState;
use totals::{Totals, check_weight, divide};
use window::Window;

/// Combination of the gradients of all micro-steps and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientReduction {
    /// Their mean, weighted if the micro-steps have weights: the gradient of the mean loss of the global batch.
    #[default]
    Mean,
    /// Their sum, not rescaled, for losses that are already divided by the global number of items.
    Sum,
}

/// Numbers of gradient buckets since a replica was made. The last bucket of an optimizer step, in which the loss
/// travels, is always sent after the backward pass.
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

/// Gradients of the global batch.
pub(crate) struct Reduction<B: Backend> {
    /// By parameter index; `None` where no rank used the parameter.
    pub(crate) gradients: Vec<Option<FloatTensor<B>>>,
    /// Mean (or sum) of the losses, if there were any.
    pub(crate) loss: Option<f64>,
    /// Indices of parameters that some ranks used and others did not.
    pub(crate) partly_used: Vec<usize>,
    /// By parameter index, whether this rank used it. A rank without items counts as having used all.
    pub(crate) used_here: Vec<bool>,
    /// No rank had an item.
    pub(crate) empty: bool,
}

/// Default number of buckets that are sent and unfinished: while one is reduced, the next is queued. More would only
/// hold memory on devices, where a bucket is a copy.
pub(crate) const BUCKETS_IN_FLIGHT: usize = 2;

/// Options of a [`Reducer`].
pub(crate) struct ReducerOptions {
    pub(crate) reduction: GradientReduction,
    pub(crate) order: Order,
    /// Largest bucket; `None` for the default sizes.
    pub(crate) bucket_bytes: Option<usize>,
    /// Maximum number of buckets that are sent and unfinished.
    pub(crate) buckets_in_flight: usize,
    /// Micro-steps of a window, where that is known.
    pub(crate) accumulation: Option<usize>,
    /// Sends buckets while the backward pass runs.
    pub(crate) overlap: bool,
}

/// One rank's side of the reduction of gradients.
pub(crate) struct Reducer<B: Backend> {
    group: ProcessGroup<B>,
    options: ReducerOptions,
    buckets: GradientBuckets,
    op: ReduceOp,
    forecast: Forecast,
    window: Window<B>,
    state: WindowState<B>,
    /// Parameter indices in the order in which their gradients came in the last backward pass; `None` once read.
    arrivals: Option<Vec<usize>>,
    stats: OverlapStats,
}

impl<B: Backend> Reducer<B> {
    pub(crate) fn new(group: ProcessGroup<B>, specs: Vec<ParamSpec>, options: ReducerOptions) -> Self {
        Self {
            op: collective_op(&group, &options),
            forecast: Forecast::new(options.accumulation),
            window: Window::new(specs.len(), options.order),
            state: WindowState::Collecting,
            arrivals: Some(Vec::new()),
            stats: OverlapStats::default(),
            buckets: GradientBuckets::new(specs, options.bucket_bytes),
            group,
            options,
        }
    }

    /// Specifications of all parameters, in visit order.
    pub(crate) fn specs(&self) -> &[ParamSpec] {
        self.buckets.specs()
    }

    pub(crate) fn plan(&self) -> &BucketPlan {
        self.buckets.plan()
    }

    pub(crate) fn stats(&self) -> OverlapStats {
        self.stats
    }

    /// Micro-steps since the last reduction.
    pub(crate) fn micro_steps(&self) -> usize {
        self.window.micro_steps()
    }

    /// Announces whether the next micro-step is the window's last.
    #[cfg(feature = "train")]
    pub(crate) fn expect_last(&mut self, last: bool) {
        self.forecast.expect_last(last);
    }

    /// Announces the weight of the next micro-step.
    ///
    /// # Errors
    /// A weight that no micro-step may have.
    pub(crate) fn expect_weight(&mut self, weight: f64) -> Result<()> {
        check_weight(weight, self.buckets.totals_dtype()).map(|weight| self.forecast.expect_weight(weight))
    }

    /// True if the gradient of parameter `index` was taken out of the micro-step under way, and an empty tensor left.
    pub(crate) fn has_taken(&self, index: usize) -> bool {
        self.state.has_taken(index)
    }

    /// # Errors
    /// The error that could not be returned where it occurred, if there is one.
    pub(crate) fn take_error(&mut self) -> Result<()> {
        self.state.take_error()
    }

    /// Announces that the micro-step at hand is not the window's last.
    ///
    /// # Errors
    /// Buckets of the window were sent.
    pub(crate) fn continue_window(&self) -> Result<()> {
        self.state.window_continues(self.forecast.next_number())
    }

    /// Adds a micro-step. One of weight zero contributes nothing: its gradients and loss, means over no items, are
    /// ignored.
    ///
    /// # Errors
    /// A weight that cannot travel, or another than gradients were taken with; more micro-steps than the order allows.
    pub(crate) fn add(
        &mut self,
        gradients: Vec<(usize, FloatTensor<B>)>,
        loss: Option<FloatTensor<B>>,
        weight: Option<f64>,
    ) -> Result<()> {
        let ReducerOptions { reduction, order, .. } = self.options;
        order.check(self.window.micro_steps() + 1, |given, expected| given <= expected)?;
        check_weight(weight.unwrap_or(1.0), self.buckets.totals_dtype())?;
        self.state.micro_step_added(weight, reduction)?;
        self.forecast.micro_step_added(weight);
        self.window.add(gradients, loss, weight, reduction);
        Ok(())
    }

    /// Reduces the window over all ranks and begins a new one.
    ///
    /// # Errors
    /// Any error of the group; fewer micro-steps than the order needs; a loss of several elements.
    pub(crate) fn reduce(&mut self) -> Result<Reduction<B>> {
        let ReducerOptions { reduction, order, buckets_in_flight, .. } = self.options;
        order.check(self.window.micro_steps(), |given, expected| given == expected)?;
        let next = Window::new(self.specs().len(), order);
        let mut window = std::mem::replace(&mut self.window, next);
        let in_flight = self.state.window_reduced(buckets_in_flight);
        self.forecast.window_reduced();
        self.stats.steps += 1;

        let sums = order.total(&window.numbers(reduction)?, self.buckets.totals_dtype());
        let mut gradients = window.gradients();
        let mut used_here: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        // A bucket is sent during the backward pass when it has a gradient of each of its parameters.
        for number in 0..in_flight.sent() {
            self.buckets.params(number).iter().for_each(|index| used_here[*index] = true);
        }
        let mut totals = Totals::new(sums, &used_here);
        if totals.micro_steps == 0.0 {
            used_here.fill(true);
        }
        let ranks = if self.op == ReduceOp::Mean { self.group.world_size() as f64 } else { 1.0 };
        if self.group.is_connected() {
            self.stats.after_backward += (self.buckets.collectives() - in_flight.sent()) as u64;
            let mine = totals.to_wire();
            let all = in_flight.finish(&self.group, self.op, &self.buckets, &mut gradients, &mine)?;
            totals = Totals::from_wire(&all, ranks).map_err(|error| self.group.barrier_then(error))?;
        }
        totals.check_weights().map_err(|error| self.group.barrier_then(error))?;
        let partly_used = totals.drop_unused(self.specs(), &mut gradients);
        self.divide(&mut gradients, &window.dtypes, totals.weight / ranks);
        let (loss, empty) = (totals.mean_loss(reduction), totals.weight == 0.0);
        Ok(Reduction { gradients, loss, partly_used, used_here, empty })
    }

    fn divide(
        &self,
        gradients: &mut [Option<FloatTensor<B>>],
        dtypes: &[Option<burn::tensor::DType>],
        weight: f64,
    ) {
        let divisor = if self.options.reduction == GradientReduction::Mean { weight } else { 1.0 };
        for ((gradient, spec), dtype) in gradients.iter_mut().zip(self.specs()).zip(dtypes) {
            *gradient = gradient.take().map(|gradient| divide::<B>(gradient, divisor, *dtype, spec));
        }
    }

    /// Discards the window. If buckets of it were sent, the next call fails.
    pub(crate) fn discard(&mut self) {
        self.state.window_discarded();
        self.drop_window();
    }

    /// Discards the window together with the group, so that nothing of it gets into the next one.
    pub(crate) fn drop_window(&mut self) {
        self.state.window_dropped();
        self.forecast.window_discarded();
        self.window = Window::new(self.specs().len(), self.options.order);
    }

    /// The error with which the group has to end when the replica is dropped now, if there is one.
    pub(crate) fn replica_dropped(&self) -> Option<Error> {
        self.state.replica_dropped()
    }

    /// The order in which gradients came in the last backward pass. It is not recorded any more afterwards.
    pub(crate) fn take_arrivals(&mut self) -> Vec<usize> {
        self.arrivals.take().unwrap_or_default()
    }

    /// Plans the buckets anew in the order `arrivals`. Called between two windows, on all ranks alike. The bits of a
    /// sum do not depend on its bucket.
    pub(crate) fn reorder(&mut self, arrivals: &[usize]) {
        let smaller = self.buckets.reorder(arrivals, self.options.bucket_bytes);
        // As many bytes in flight as with buckets of the default size.
        self.options.buckets_in_flight = self.options.buckets_in_flight.saturating_mul(smaller.max(1));
    }
}

/// The events of a backward pass.
#[cfg_attr(
    not(any(test, feature = "overlap")),
    expect(dead_code, reason = "called by Burn's hook, which exists with the feature `overlap`")
)]
impl<B: Backend> Reducer<B> {
    /// A backward pass begins that reaches marked parameters; `alone` if of no other replica.
    pub(crate) fn backward_begins(&mut self, alone: bool) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.clear();
        }
        // A layer that communicates in the backward pass shares the queue with the buckets, which may leave at other
        // times on other ranks: the order of operations would differ.
        let may_send = alone && self.options.overlap && !self.group.ranks().is_used_in_backward();
        let expected = self.forecast.next_if_last(self.options.reduction);
        self.state.backward_begins(expected.filter(|_| may_send));
    }

    /// The gradient of parameter `index` is complete. It is either moved out, and an empty tensor of as many dimensions
    /// left, or stays.
    pub(crate) fn gradient_ready(&mut self, index: usize, gradient: &mut FloatTensor<B>) {
        if let Some(arrivals) = &mut self.arrivals
            && !arrivals.contains(&index)
        {
            arrivals.push(index);
        }
        if !self.buckets.may_leave_early(index, &gradient.shape()) {
            return;
        }
        let ReducerOptions { reduction, buckets_in_flight, .. } = self.options;
        let (params, lease) = (self.buckets.specs().len(), || self.group.ranks().acquire_backward_lease());
        let taking = self.state.gradient_ready(index, params, buckets_in_flight, lease);
        let Some(taking) = taking else { return };
        let empty = Shape::from(vec![0; gradient.shape().num_dims()]);
        let empty = B::float_empty(empty, &B::float_device(gradient), gradient.dtype().into());
        let gradient = std::mem::replace(gradient, empty);
        self.window.complete(index, gradient, taking.weight(), reduction);
        let sums = &mut self.window.complete;
        self.stats.in_backward += taking.gradient_taken(index, sums, &self.buckets, &self.group, self.op);
    }

    /// The hook failed, which cannot return an error: the next call returns it.
    pub(crate) fn hook_failed(&mut self, error: Error) {
        self.state.failed(error);
    }
}

/// The operation of collectives: the mean over the ranks where dividing by their number only changes exponents, else
/// the sum. Division could underflow to subnormals, so bits that must not depend on the number of ranks get the sum.
fn collective_op<B: Backend>(group: &ProcessGroup<B>, options: &ReducerOptions) -> ReduceOp {
    let exact = group.is_connected() && group.world_size().is_power_of_two();
    match (options.reduction, options.order) {
        (GradientReduction::Mean, Order::AsTheyCome) if exact => ReduceOp::Mean,
        _ => ReduceOp::Sum,
    }
}

/// A reducer that the replica and Burn's backward pass call, never at the same time.
pub(crate) struct SharedReducer<B: Backend>(Mutex<Reducer<B>>);

impl<B: Backend> SharedReducer<B> {
    pub(crate) fn new(reducer: Reducer<B>) -> Self {
        Self(Mutex::new(reducer))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Reducer<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
