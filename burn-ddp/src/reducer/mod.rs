//! From the gradients of micro-steps to the gradient of the global batch.
//!
//! The one place that scales. A micro-step of weight `w` (its items, or 1 where all have equally many) gives the
//! mean gradient `g` of its items; the reducer sends sums of `w * g` and divides once, at the end, by the sum of
//! all weights. Weights, losses and the record of which parameters were used travel behind the last bucket, so
//! that one optimizer step costs one collective a bucket and none for the loss.
//!
//! The sum of all weights is known last, and dividing then is one more pass over all gradients. So a number of ranks
//! by which division is exact (a power of two) is divided out by the collectives ([`Reducer::op`]), and where nothing
//! is left to divide by, as without weights and accumulation, there is no such pass.
//!
//! With the feature `overlap` buckets leave while the window's last backward pass runs ([`early`]), if that is known to
//! be the last ([`ahead`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::Scalar;

use crate::bucket::{BucketPlan, ParamRole, ParamSpec};
use crate::communicator::{AnyTensor, into_data};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::ProcessGroup;

mod ahead;
mod early;
mod flight;
mod order;
#[cfg(feature = "overlap")]
pub(crate) mod sinks;
mod window;

pub use early::OverlapStats;
pub(crate) use early::TURN_OFF;
pub(crate) use order::Order;

use ahead::Ahead;
use early::Early;
use flight::Flight;
use window::Window;

/// What becomes of the gradients of all micro-steps and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradientReduction {
    /// Their mean, weighted if the micro-steps have weights: the gradient of the mean loss of the global batch.
    #[default]
    Mean,
    /// Their sum, rescaled by nothing, for losses that are already divided by the global number of items.
    Sum,
}

/// One rank's share of an optimizer step, and how to reduce it.
pub(crate) struct Reducer<B: Backend> {
    specs: Vec<ParamSpec>,
    plan: BucketPlan,
    reduction: GradientReduction,
    order: Order,
    window: Window<B>,
    ahead: Ahead,
    early: Early<B>,
    flight: Flight<B>,
    stats: OverlapStats,
}

/// A reducer that the backward pass reaches as well as the replica, never at the same time.
pub(crate) struct SharedReducer<B: Backend>(Mutex<Reducer<B>>);

impl<B: Backend> SharedReducer<B> {
    pub(crate) fn new(reducer: Reducer<B>) -> Self {
        Self(Mutex::new(reducer))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Reducer<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gradients of the global batch.
pub(crate) struct Reduction<B: Backend> {
    /// By parameter index; `None` where no rank used the parameter.
    pub(crate) gradients: Vec<Option<FloatTensor<B>>>,
    /// Mean (or sum) of the losses, if there were any.
    pub(crate) loss: Option<f64>,
    /// Indices of parameters that some ranks used and others did not.
    pub(crate) partly_used: Vec<usize>,
    /// By parameter index, whether this rank used it.
    pub(crate) used_here: Vec<bool>,
    /// No rank had an item.
    pub(crate) empty: bool,
}

/// Default of buckets that are sent and unfinished: one is reduced, and the next is there when it is done. More would
/// only hold memory on devices, where a bucket is a copy.
pub(crate) const BUCKETS_IN_FLIGHT: usize = 2;

/// What travels behind the last bucket, summed over ranks: weight, loss times weight, weight that has a loss,
/// micro-steps, micro-steps with a weight, ranks that had any, and one use count a parameter.
const TAIL: usize = 6;

impl<B: Backend> Reducer<B> {
    pub(crate) fn new(
        specs: Vec<ParamSpec>,
        cap: Option<usize>,
        reduction: GradientReduction,
        order: Order,
    ) -> Self {
        let plan = BucketPlan::for_gradients(&on_wire(&specs), cap);
        let params = specs.len();
        Self {
            specs,
            plan,
            reduction,
            order,
            window: Window::new(params, order),
            ahead: Ahead::new(None),
            early: Early::new(params),
            flight: Flight::new(BUCKETS_IN_FLIGHT),
            stats: OverlapStats::default(),
        }
    }

    /// The same with at most `buckets` of them sent and unfinished.
    pub(crate) fn with_buckets_in_flight(self, buckets: usize) -> Self {
        Self { flight: Flight::new(buckets), ..self }
    }

    /// The same for windows of `accumulation` micro-steps, where that is known.
    pub(crate) fn with_accumulation(self, accumulation: Option<usize>) -> Self {
        Self { ahead: Ahead::new(accumulation), ..self }
    }

    /// The same that sends buckets over `group` while the backward pass runs.
    #[cfg(feature = "overlap")]
    pub(crate) fn with_overlap(self, group: ProcessGroup<B>) -> Self {
        Self { early: Early::over(group, self.specs.len(), &self.plan), ..self }
    }

    /// Forgets the window, so that nothing of it leaks into the next one.
    pub(crate) fn reset(&mut self) {
        self.window = Window::new(self.specs.len(), self.order);
        self.ahead.forget();
        self.early.reset();
        self.flight.take();
    }

    /// Micro-steps since the last reduction.
    pub(crate) fn micro_steps(&self) -> usize {
        self.window.micro_steps()
    }

    /// Says whether the next micro-step is the window's last.
    #[cfg(feature = "train")]
    pub(crate) fn expect_last(&mut self, last: bool) {
        self.ahead.expect_last(last);
    }

    /// Says what the weight of the next micro-step will be.
    pub(crate) fn expect_weight(&mut self, weight: f64) -> Result<()> {
        self.checked(Some(weight)).map(|weight| self.ahead.expect_weight(weight))
    }

    pub(crate) fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// Adds a micro-step. A weight of zero joins without contributing: its gradients and loss, means over no
    /// items, are not looked at.
    pub(crate) fn add(
        &mut self,
        gradients: Vec<(usize, FloatTensor<B>)>,
        loss: Option<FloatTensor<B>>,
        weight: Option<f64>,
    ) -> Result<()> {
        self.expect_micro_steps(self.window.micro_steps() + 1, |given, expected| given <= expected)?;
        self.checked(weight)?;
        self.early.close(weight, self.reduction)?;
        self.ahead.passed(weight);
        self.window.add(gradients, loss, weight, self.reduction);
        Ok(())
    }

    /// The weight as a factor, if it is one.
    fn checked(&self, weight: Option<f64>) -> Result<f64> {
        let factor = weight.unwrap_or(1.0);
        if !factor.is_finite() || factor < 0.0 {
            return Err(Error::config(format!(
                "weight {factor} of a micro-step: give its number of items, zero or more"
            )));
        }
        if factor != 0.0 && self.tail_dtype() == DType::F32 && !(factor as f32).is_normal() {
            return Err(Error::config(format!(
                "weight {factor} of a micro-step: f32, in which it travels, cannot hold it"
            )));
        }
        Ok(factor)
    }

    /// Reduces the window over all ranks and begins a new one.
    pub(crate) fn reduce(&mut self, group: &ProcessGroup<B>) -> Result<Reduction<B>> {
        self.expect_micro_steps(self.window.micro_steps(), |given, expected| given == expected)?;
        let mut window = std::mem::replace(&mut self.window, Window::new(self.specs.len(), self.order));
        let flight = self.flight.take();
        self.early.end_turn();
        self.ahead.ended();
        self.stats.steps += 1;
        let numbers = self.order.total(&window.numbers(self.reduction)?, self.tail_dtype());
        let [.., micro_steps, _] = numbers;
        let mut tail = numbers.to_vec();
        tail.push(f64::from(u8::from(micro_steps > 0.0)));
        let mut gradients = window.gradients();
        let mut used_here: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        // A bucket leaves during the backward pass when it has a gradient of each of its parameters.
        for bucket in &self.plan.buckets[..flight.sent()] {
            bucket.params.iter().for_each(|index| used_here[*index] = true);
        }
        tail.extend(used_here.iter().map(|used| f64::from(u8::from(*used))));
        // A rank without items lacks nothing.
        let used_here = used_here.into_iter().map(|used| used || micro_steps == 0.0).collect();
        let op = self.op(group);
        let divided_by = if op == ReduceOp::Mean { group.world_size() as f64 } else { 1.0 };
        let mut sum_of_tails =
            if group.is_connected() { self.all_reduce(flight, group, &mut gradients, &tail)? } else { tail };
        sum_of_tails.iter_mut().for_each(|number| *number *= divided_by);
        self.scale(gradients, divided_by, &window.dtypes, &sum_of_tails, used_here)
            .map_err(|error| group.barrier_then(error))
    }

    /// What collectives make of the gradients: their mean over the ranks, where that is the sum but for the exponent,
    /// else their sum. Exponents have an end: a bit may go below the smallest normal number, so not where bits count.
    fn op(&self, group: &ProcessGroup<B>) -> ReduceOp {
        let exact = group.is_connected() && group.world_size().is_power_of_two();
        match (self.reduction, self.order) {
            (GradientReduction::Mean, Order::AsTheyCome) if exact => ReduceOp::Mean,
            _ => ReduceOp::Sum,
        }
    }

    /// An error unless a window of `given` micro-steps `fits` the number that the order asks for, if it does.
    fn expect_micro_steps(&self, given: usize, fits: impl Fn(usize, usize) -> bool) -> Result<()> {
        match self.order {
            Order::Tree(expected) if !fits(given, expected) => Err(Error::config(format!(
                "a window of {given} micro-steps{}, but accumulation is {expected}: with \
                 Reproducibility::AnyWorldSize every window has exactly that many, on all ranks",
                if given < expected { "" } else { " or more" }
            ))),
            _ => Ok(()),
        }
    }

    fn tail_dtype(&self) -> DType {
        self.plan.buckets.last().map_or(DType::F32, |bucket| bucket.dtype)
    }

    /// Divides the sums, of which `divided_by` is divided out already, and leaves out what no rank used.
    fn scale(
        &self,
        mut gradients: Vec<Option<FloatTensor<B>>>,
        divided_by: f64,
        dtypes: &[Option<burn::tensor::DType>],
        tail: &[f64],
        used_here: Vec<bool>,
    ) -> Result<Reduction<B>> {
        let [weight, loss, weight_with_loss, micro_steps, weighted, ranks] = *tail
            .first_chunk::<TAIL>()
            .ok_or_else(|| Error::new(ErrorKind::Mismatch, "a reduction came back without its weights"))?;
        if weighted != 0.0 && weighted != micro_steps {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "{weighted} of {micro_steps} micro-steps of this optimizer step have a weight: \
                     give one to all of them, on all ranks, or to none"
                ),
            ));
        }
        let mut partly_used = Vec::new();
        for (index, used) in tail[TAIL..].iter().enumerate() {
            if self.specs[index].role != ParamRole::Trained {
                continue;
            }
            if *used == 0.0 || weight == 0.0 {
                gradients[index] = None;
            } else if *used != ranks {
                partly_used.push(index);
            }
        }
        let divisor = weight / divided_by;
        for ((gradient, spec), dtype) in gradients.iter_mut().zip(&self.specs).zip(dtypes) {
            *gradient = gradient.take().map(|gradient| {
                let gradient = match self.reduction {
                    GradientReduction::Mean if divisor != 1.0 => {
                        B::float_div_scalar(gradient, Scalar::from(divisor))
                    }
                    _ => gradient,
                };
                let half = match (dtype, spec.dtype) {
                    (Some(burn::tensor::DType::F16), _) | (None, DType::F16) => FloatDType::F16,
                    (Some(burn::tensor::DType::BF16), _) | (None, DType::BF16) => FloatDType::BF16,
                    _ => return gradient,
                };
                B::float_cast(gradient, half)
            });
        }
        let loss = (weight_with_loss > 0.0).then(|| match self.reduction {
            GradientReduction::Mean => loss / weight_with_loss,
            GradientReduction::Sum => loss,
        });
        Ok(Reduction { gradients, loss, partly_used, used_here, empty: weight == 0.0 })
    }
}

/// What travels for gradients of `specs`: half precision as f32, because sums of weighted halves would overflow or vanish.
fn on_wire(specs: &[ParamSpec]) -> Vec<ParamSpec> {
    let wire = |spec: &ParamSpec| match spec.dtype {
        DType::F16 | DType::BF16 => ParamSpec { dtype: DType::F32, ..spec.clone() },
        _ => spec.clone(),
    };
    specs.iter().map(wire).collect()
}

fn scalar<B: Backend>(tensor: FloatTensor<B>) -> Result<f64> {
    let values: Vec<f64> = into_data::<B>(AnyTensor::Float(tensor))?.iter::<f64>().collect();
    match values[..] {
        [value] => Ok(value),
        _ => Err(Error::config(format!(
            "a loss of {} elements: give the mean loss of the micro-step as one element",
            values.len()
        ))),
    }
}

fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}
