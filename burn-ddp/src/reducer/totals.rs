//! The numbers that travel behind the last bucket, from which the reducer knows by what to divide.

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::Scalar;
use burn_ddp_comm::{DType, Error, ErrorKind, Result};

use super::GradientReduction;
use crate::bucket::{ParamRole, ParamSpec};

/// Sums over the micro-steps of a window: of one rank, and after the reduction of all ranks.
pub(super) struct Totals {
    /// Weights.
    pub(super) weight: f64,
    /// Losses times their weights.
    loss: f64,
    /// Weights of micro-steps that have a loss.
    weight_with_loss: f64,
    /// Micro-steps with items.
    pub(super) micro_steps: f64,
    /// Micro-steps for which a weight was given.
    weighted: f64,
    /// Ranks that had a micro-step with items.
    ranks: f64,
    /// By parameter index, ranks that used it.
    users: Vec<f64>,
}

impl Totals {
    /// Of one rank, from the sums of [`Window::numbers`](super::window::Window::numbers).
    pub(super) fn new(sums: [f64; 5], used: &[bool]) -> Self {
        let [weight, loss, weight_with_loss, micro_steps, weighted] = sums;
        let ranks = f64::from(u8::from(micro_steps > 0.0));
        let users = used.iter().map(|used| f64::from(u8::from(*used))).collect();
        Self { weight, loss, weight_with_loss, micro_steps, weighted, ranks, users }
    }

    pub(super) fn to_wire(&self) -> Vec<f64> {
        let Self { weight, loss, weight_with_loss, micro_steps, weighted, ranks, users } = self;
        let mut numbers = vec![*weight, *loss, *weight_with_loss, *micro_steps, *weighted, *ranks];
        numbers.extend(users);
        numbers
    }

    /// Of all ranks, from their reduction times `factor`.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] for too few numbers.
    pub(super) fn from_wire(numbers: &[f64], factor: f64) -> Result<Self> {
        let Some((head, users)) = numbers.split_first_chunk() else {
            return Err(Error::new(ErrorKind::Mismatch, "a reduction came back without its weights"));
        };
        let [weight, loss, weight_with_loss, micro_steps, weighted, ranks] =
            head.map(|number| number * factor);
        let users = users.iter().map(|number| number * factor).collect();
        Ok(Self { weight, loss, weight_with_loss, micro_steps, weighted, ranks, users })
    }

    /// Refuses an optimizer step of which some micro-steps have a weight and others have none.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`], on all ranks alike.
    pub(super) fn check_weights(&self) -> Result<()> {
        let Self { micro_steps, weighted, .. } = self;
        if *weighted == 0.0 || weighted == micro_steps {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{weighted} of {micro_steps} micro-steps of this optimizer step have a weight: \
                 give one to all of them, on all ranks, or to none"
            ),
        ))
    }

    /// Mean (or sum) of the losses, if there were any.
    pub(super) fn mean_loss(&self, reduction: GradientReduction) -> Option<f64> {
        (self.weight_with_loss > 0.0).then(|| match reduction {
            GradientReduction::Mean => self.loss / self.weight_with_loss,
            GradientReduction::Sum => self.loss,
        })
    }

    /// Drops the gradients of parameters that no rank used, and returns the parameters that only some used.
    pub(super) fn drop_unused<T>(&self, specs: &[ParamSpec], gradients: &mut [Option<T>]) -> Vec<usize> {
        let mut partly_used = Vec::new();
        for (index, users) in self.users.iter().enumerate() {
            if specs[index].role != ParamRole::Trained {
                continue;
            }
            if *users == 0.0 || self.weight == 0.0 {
                gradients[index] = None;
            } else if *users != self.ranks {
                partly_used.push(index);
            }
        }
        partly_used
    }
}

/// `gradient` divided by `divisor`, in the precision `own` in which it came, or else in its parameter's.
pub(super) fn divide<B: Backend>(
    gradient: FloatTensor<B>,
    divisor: f64,
    own: Option<burn::tensor::DType>,
    spec: &ParamSpec,
) -> FloatTensor<B> {
    let gradient =
        if divisor == 1.0 { gradient } else { B::float_div_scalar(gradient, Scalar::from(divisor)) };
    match (own, spec.dtype) {
        (Some(burn::tensor::DType::F16), _) | (None, DType::F16) => B::float_cast(gradient, FloatDType::F16),
        (Some(burn::tensor::DType::BF16), _) | (None, DType::BF16) => {
            B::float_cast(gradient, FloatDType::BF16)
        }
        _ => gradient,
    }
}

/// The weight of a micro-step as a factor.
///
/// # Errors
/// A weight that is negative, not finite, or cannot travel as `dtype`.
pub(super) fn check_weight(weight: f64, dtype: DType) -> Result<f64> {
    if !weight.is_finite() || weight < 0.0 {
        return Err(Error::config(format!(
            "weight {weight} of a micro-step: give its number of items, zero or more"
        )));
    }
    if weight != 0.0 && dtype == DType::F32 && !(weight as f32).is_normal() {
        return Err(Error::config(format!(
            "weight {weight} of a micro-step: f32, in which it travels, cannot hold it"
        )));
    }
    Ok(weight)
}
