//! The sums of one rank's gradients since the last reduction.
//!
//! Gradients are added as they come, so that a window costs the memory of the few sums that its order keeps pending.
//! Losses and weights are small and kept until the end, when reading a loss no longer stalls a device.

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::{Scalar, TensorMetadata};

use burn_ddp_comm::{Error, Result};

use super::{GradientReduction, Order};
use crate::communicator::{AnyTensor, into_data};

/// Sums over the micro-steps since the last reduction.
pub(super) struct Window<B: Backend> {
    order: Order,
    /// Sums over neighbouring micro-steps, by parameter index, to which later ones will be added. One is left when the
    /// window is complete.
    sums: Vec<Vec<Option<FloatTensor<B>>>>,
    /// Element types in which gradients came, and in which they are returned.
    pub(super) dtypes: Vec<Option<burn::tensor::DType>>,
    steps: Vec<StepNumbers<B>>,
    /// By parameter index, sums over the whole window whose last gradient was taken during the backward pass.
    pub(super) complete: Vec<Option<FloatTensor<B>>>,
}

/// Loss and weight of a micro-step.
struct StepNumbers<B: Backend> {
    loss: Option<FloatTensor<B>>,
    weight: Option<f64>,
}

impl<B: Backend> Window<B> {
    pub(super) fn new(params: usize, order: Order) -> Self {
        let complete = (0..params).map(|_| None).collect();
        Self { order, sums: Vec::new(), dtypes: vec![None; params], steps: Vec::new(), complete }
    }

    /// Micro-steps so far, those without items among them.
    pub(super) fn micro_steps(&self) -> usize {
        self.steps.len()
    }

    /// Adds a micro-step. One of weight 0 has a place in the order and contributes nothing.
    pub(super) fn add(
        &mut self,
        gradients: Vec<(usize, FloatTensor<B>)>,
        loss: Option<FloatTensor<B>>,
        weight: Option<f64>,
        reduction: GradientReduction,
    ) {
        let joins = self.order.joins(self.steps.len());
        let mut sum: Vec<_> = self.dtypes.iter().map(|_| None).collect();
        if weight != Some(0.0) {
            for (index, gradient) in gradients {
                self.dtypes[index].get_or_insert(gradient.dtype());
                sum[index] = Some(multiply::<B>(gradient, weight, reduction));
            }
        }
        for (index, sum) in sum.iter_mut().enumerate() {
            *sum = self.join(joins, index, sum.take()).or_else(|| self.complete[index].take());
        }
        self.sums.truncate(self.sums.len() - joins);
        self.sums.push(sum);
        self.steps.push(StepNumbers { loss: loss.filter(|_| weight != Some(0.0)), weight });
    }

    /// Completes the sum of parameter `index` by its gradient in the window's last micro-step, which is of positive
    /// weight and not yet added.
    pub(super) fn complete(
        &mut self,
        index: usize,
        gradient: FloatTensor<B>,
        weight: Option<f64>,
        reduction: GradientReduction,
    ) {
        self.dtypes[index].get_or_insert(gradient.dtype());
        let gradient = multiply::<B>(gradient, weight, reduction);
        // The last micro-step completes all pending sums.
        self.complete[index] = self.join(self.sums.len(), index, Some(gradient));
    }

    /// The sum of `gradient` and the last `count` pending sums of parameter `index`.
    fn join(
        &mut self,
        count: usize,
        index: usize,
        gradient: Option<FloatTensor<B>>,
    ) -> Option<FloatTensor<B>> {
        let order = self.order;
        let latest_first = self.sums.iter_mut().rev().take(count);
        latest_first.fold(gradient, |right, left| order.join::<B>(left[index].take(), right))
    }

    /// Takes the sums of gradients by parameter index.
    pub(super) fn gradients(&mut self) -> Vec<Option<FloatTensor<B>>> {
        let none = || self.dtypes.iter().map(|_| None).collect();
        self.sums.pop().unwrap_or_else(none)
    }

    /// Takes five numbers of each micro-step: weight, loss times weight, weight if there is a loss, 1, and 1 if a
    /// weight was given; zeros if it had no items.
    ///
    /// # Errors
    /// A loss of more than one element.
    pub(super) fn numbers(&mut self, reduction: GradientReduction) -> Result<Vec<[f64; 5]>> {
        let numbers = |StepNumbers { loss, weight }: StepNumbers<B>| {
            let (factor, weighted) = (weight.unwrap_or(1.0), f64::from(u8::from(weight.is_some())));
            if factor == 0.0 {
                return Ok([0.0; 5]);
            }
            let Some(loss) = loss else { return Ok([factor, 0.0, 0.0, 1.0, weighted]) };
            let loss_factor = if reduction == GradientReduction::Sum { 1.0 } else { factor };
            Ok([factor, loss_factor * scalar::<B>(loss)?, factor, 1.0, weighted])
        };
        self.steps.drain(..).map(numbers).collect()
    }
}

/// `gradient` times its weight, in f32 if it is in half precision.
fn multiply<B: Backend>(
    gradient: FloatTensor<B>,
    weight: Option<f64>,
    reduction: GradientReduction,
) -> FloatTensor<B> {
    let gradient = match gradient.dtype() {
        burn::tensor::DType::F16 | burn::tensor::DType::BF16 => B::float_cast(gradient, FloatDType::F32),
        _ => gradient,
    };
    match (weight, reduction) {
        (Some(weight), GradientReduction::Mean) if weight != 1.0 => {
            B::float_mul_scalar(gradient, Scalar::from(weight))
        }
        _ => gradient,
    }
}

/// The one element of `tensor`.
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

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use burn::tensor::ops::FloatTensorOps;
    use burn_ddp_comm::reduction::pairwise;
    use burn_flex::Flex;

    use super::*;

    fn tensor(value: f32) -> FloatTensor<Flex> {
        Flex::float_from_data(TensorData::new(vec![value], [1]), &Default::default())
    }

    fn bits(tensor: FloatTensor<Flex>) -> u32 {
        let data = into_data::<Flex>(AnyTensor::Float(tensor)).unwrap();
        data.as_slice::<f32>().unwrap()[0].to_bits()
    }

    /// Gradients of one parameter added in the tree, and the most gradients alive at once.
    fn added(gradients: &[Option<f32>]) -> (Option<u32>, usize) {
        let mut window = Window::<Flex>::new(1, Order::Tree(gradients.len()));
        let mut alive = 0;
        for gradient in gradients {
            let pending = window.sums.iter().flatten().flatten().count();
            alive = alive.max(pending + usize::from(gradient.is_some()));
            let list = gradient.map(|value| (0, tensor(value))).into_iter().collect();
            window.add(list, None, None, GradientReduction::Mean);
        }
        assert_eq!((window.sums.len(), window.micro_steps()), (1, gradients.len()));
        (window.gradients().remove(0).map(bits), alive)
    }

    #[test]
    fn the_bits_are_those_of_the_pairwise_sum_and_few_sets_are_alive() {
        for count in 1..=33_usize {
            let values: Vec<f32> = (0..count).map(|i| 0.1 + 1e3 / (1 + i * i) as f32).collect();
            let expected = pairwise(&values, &|left, right| left + right).map(f32::to_bits);
            let (sum, alive) = added(&values.iter().copied().map(Some).collect::<Vec<_>>());
            assert_eq!(sum, expected, "{count} micro-steps");
            assert_eq!(alive, count.ilog2() as usize + 1, "{count} micro-steps");
        }
    }

    /// The bits of four parameters' sums over micro-steps with `gradients`. Those of the last one that `early` selects
    /// are taken during its backward pass, in reverse order.
    fn summed(
        order: Order,
        gradients: &[[Option<f32>; 4]],
        early: impl Fn(usize) -> bool,
    ) -> Vec<Option<u32>> {
        let mut window = Window::<Flex>::new(4, order);
        for (number, values) in gradients.iter().enumerate() {
            let weight = Some(1.0 + number as f64);
            let is_last = number + 1 == gradients.len();
            let mut rest = Vec::new();
            for (index, value) in values.iter().enumerate().rev() {
                let Some(value) = value.map(tensor) else { continue };
                if is_last && early(index) {
                    window.complete(index, value, weight, GradientReduction::Mean);
                } else {
                    rest.push((index, value));
                }
            }
            window.add(rest, None, weight, GradientReduction::Mean);
        }
        window.gradients().into_iter().map(|sum| sum.map(bits)).collect()
    }

    #[test]
    fn gradients_that_come_before_the_end_have_the_bits_of_those_that_do_not() {
        for count in 1..=9_usize {
            for order in [Order::AsTheyCome, Order::Tree(count)] {
                for absent in 0..1 << count.min(6) {
                    let there = |step: usize, value: f32| (absent >> (step % 6) & 1 == 0).then_some(value);
                    let values = |step| {
                        let value = 0.1 + 1e3 / (1 + step * step) as f32;
                        [Some(value), there(step, value), Some(-0.0), there(step + 1, -0.0)]
                    };
                    let gradients: Vec<_> = (0..count).map(values).collect();
                    let plain = summed(order, &gradients, |_| false);
                    for subset in 1..1 << 4 {
                        let early = summed(order, &gradients, |index| subset >> index & 1 == 1);
                        assert_eq!(early, plain, "{order:?}, {gradients:?}, early {subset:04b}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_absent_gradient_counts_as_zeros_if_there_is_any() {
        let negative = (-0.0_f32).to_bits();
        assert_eq!(added(&[Some(-0.0), Some(-0.0)]).0, Some(negative));
        assert_eq!(added(&[Some(-0.0)]).0, Some(negative));
        for gradients in [[Some(-0.0), None], [None, Some(-0.0)]] {
            assert_eq!(added(&gradients).0, Some(0));
        }
        assert_eq!(added(&[None, None, Some(-0.0), Some(-0.0)]).0, Some(0));
        assert_eq!(added(&[None, None, None]).0, None);
    }
}
