//! What one rank has added up since the last reduction.
//!
//! Gradients are added as they come, so that a window costs the memory of the few sums that its order keeps waiting.
//! The numbers beside them are small and kept until the end, when reading a loss no longer holds up a device.

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::{Scalar, TensorMetadata};

use super::{GradientReduction, Order, scalar};
use crate::error::Result;

/// Sums over the micro-steps since the last reduction.
pub(super) struct Window<B: Backend> {
    order: Order,
    /// Sums over neighbouring micro-steps, by parameter index, that wait for what comes after them. The window is
    /// complete when one is left.
    sums: Vec<Vec<Option<FloatTensor<B>>>>,
    /// The types in which gradients came and have to go.
    pub(super) dtypes: Vec<Option<burn::tensor::DType>>,
    steps: Vec<Numbers<B>>,
    /// By parameter index, the whole window's sums of which the last micro-step's gradient came before its end.
    pub(super) closed: Vec<Option<FloatTensor<B>>>,
}

/// What a micro-step has beside its gradients.
struct Numbers<B: Backend> {
    loss: Option<FloatTensor<B>>,
    weight: Option<f64>,
}

impl<B: Backend> Window<B> {
    pub(super) fn new(params: usize, order: Order) -> Self {
        let closed = (0..params).map(|_| None).collect();
        Self { order, sums: Vec::new(), dtypes: vec![None; params], steps: Vec::new(), closed }
    }

    /// Micro-steps so far, those without items among them.
    pub(super) fn micro_steps(&self) -> usize {
        self.steps.len()
    }

    /// Adds a micro-step. One of weight 0 takes its place in the order and nothing else.
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
                sum[index] = Some(weigh::<B>(gradient, weight, reduction));
            }
        }
        for (index, sum) in sum.iter_mut().enumerate() {
            *sum = self.join(joins, index, sum.take()).or_else(|| self.closed[index].take());
        }
        self.sums.truncate(self.sums.len() - joins);
        self.sums.push(sum);
        self.steps.push(Numbers { loss: loss.filter(|_| weight != Some(0.0)), weight });
    }

    /// Takes the gradient of parameter `index` of the window's last micro-step, of positive weight, before its end.
    #[cfg(any(test, feature = "overlap"))]
    pub(super) fn close(
        &mut self,
        index: usize,
        gradient: FloatTensor<B>,
        weight: Option<f64>,
        reduction: GradientReduction,
    ) {
        self.dtypes[index].get_or_insert(gradient.dtype());
        let gradient = weigh::<B>(gradient, weight, reduction);
        // The last micro-step completes all sums that wait.
        self.closed[index] = self.join(self.sums.len(), index, Some(gradient));
    }

    /// The sum of `gradient`, which is parameter `index`'s, and what the last `count` sums have of it.
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

    /// The sums of gradients by parameter index.
    pub(super) fn gradients(&mut self) -> Vec<Option<FloatTensor<B>>> {
        let none = || self.dtypes.iter().map(|_| None).collect();
        self.sums.pop().unwrap_or_else(none)
    }

    /// By micro-step: weight, loss times weight, weight that has a loss, 1, and 1 if a weight was given; zeros where
    /// there were no items.
    pub(super) fn numbers(&mut self, reduction: GradientReduction) -> Result<Vec<[f64; 5]>> {
        let numbers = |Numbers { loss, weight }: Numbers<B>| {
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

/// `gradient` as it is added: in no half precision, and times its weight.
fn weigh<B: Backend>(
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

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use burn::tensor::ops::FloatTensorOps;
    use burn_flex::Flex;

    use super::*;
    use burn_ddp_comm::reduction::pairwise;
    use crate::communicator::{AnyTensor, into_data};

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
            let waiting = window.sums.iter().flatten().flatten().count();
            alive = alive.max(waiting + usize::from(gradient.is_some()));
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

    /// The bits of four parameters' sums over micro-steps whose gradients are `gradients`; of the last one those that `early`
    /// picks come before its end, in reverse order.
    fn closed(
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
                    window.close(index, value, weight, GradientReduction::Mean);
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
                    let plain = closed(order, &gradients, |_| false);
                    for subset in 1..1 << 4 {
                        let early = closed(order, &gradients, |index| subset >> index & 1 == 1);
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
