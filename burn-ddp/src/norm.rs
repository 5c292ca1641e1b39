//! The global gradient norm, in one fixed order.
//!
//! Burn's `sum` of a large tensor may add in another order from run to run (its threads race), which lets
//! replicas drift apart by an ulp a step. Here squares are added in f64 in the same pairwise tree that the
//! collectives use, so equal gradients give equal bits everywhere.

use burn::tensor::TensorData;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

use crate::collective::pairwise;
use crate::communicator::{AnyTensor, into_data};
use crate::error::Result;

/// Elements that are added one after the other before the tree begins.
const BLOCK: usize = 1024;

/// The sum of squares of all elements of `tensor`, which is read to the host and given back.
pub(crate) fn squared_norm<B: Backend>(tensor: FloatTensor<B>) -> Result<(f64, FloatTensor<B>)> {
    let device = B::float_device(&tensor);
    let data = into_data::<B>(AnyTensor::Float(tensor))?;
    Ok((sum_of_squares(&data), B::float_from_data(data, &device)))
}

fn sum_of_squares(data: &TensorData) -> f64 {
    if let Ok(values) = data.as_slice::<f32>() {
        return tree(values, |value| f64::from(*value));
    }
    if let Ok(values) = data.as_slice::<f64>() {
        return tree(values, |value| *value);
    }
    let values: Vec<f64> = data.iter::<f64>().collect();
    tree(&values, |value| *value)
}

fn tree<T>(values: &[T], widen: impl Fn(&T) -> f64) -> f64 {
    let block = |values: &[T]| {
        values.iter().fold(0.0, |sum, value| {
            let value = widen(value);
            sum + value * value
        })
    };
    add(&values.chunks(BLOCK).map(block).collect::<Vec<_>>())
}

/// The sum of `values` in the tree's order.
pub(crate) fn add(values: &[f64]) -> f64 {
    pairwise(values, &|left, right| left + right).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_that_of_squares_for_every_type() {
        let values: Vec<f32> = (0..5000).map(|i| (i % 7) as f32 - 3.0).collect();
        let expected: f64 = values.iter().map(|value| f64::from(value * value)).sum();
        let data = TensorData::new(values, [5000]);
        assert_eq!(sum_of_squares(&data), expected);
        assert_eq!(sum_of_squares(&data.clone().convert::<f64>()), expected);
        assert_eq!(sum_of_squares(&data.convert::<burn_backend::bf16>()), expected);
        assert_eq!(sum_of_squares(&TensorData::new(Vec::<f32>::new(), [0])), 0.0);
    }
}
