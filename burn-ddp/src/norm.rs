//! The global gradient norm, in one fixed order.
//!
//! Burn's `sum` of a large tensor may add in another order from run to run (its threads race), which lets
//! replicas drift apart by an ulp a step. Here squares are added in f64 in the same pairwise tree that the
//! collectives use, so equal gradients give equal bits everywhere.
//!
//! Gradients on a device are not copied for that: each rank's device adds in an order of its own, and all ranks use
//! rank 0's sum.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, FloatDType, TensorData};
use burn_backend::TensorMetadata;
use burn_ddp_comm::Result;
use burn_ddp_comm::reduction::pairwise;

use crate::communicator::{AnyTensor, into_data};

/// Number of elements that are added one after the other, as one leaf of the tree.
const BLOCK: usize = 1024;

/// The norm of all `gradients` together, which are moved to the host and back.
///
/// # Errors
/// A gradient that cannot be read.
pub(crate) fn through_host<B: Backend>(gradients: &mut [Option<FloatTensor<B>>]) -> Result<f64> {
    let mut squares = Vec::new();
    for gradient in gradients {
        let Some(tensor) = gradient.take() else { continue };
        let device = B::float_device(&tensor);
        let data = into_data::<B>(AnyTensor::Float(tensor))?;
        squares.push(sum_of_squares(&data));
        *gradient = Some(B::float_from_data(data, &device));
    }
    Ok(sum(&squares).sqrt())
}

/// The norm of all `gradients` together, taken on their device in f32 (f64 if one of them is f64). Reads one number a
/// gradient.
///
/// # Errors
/// The numbers cannot be read.
pub(crate) fn on_device<B: Backend>(gradients: &[Option<FloatTensor<B>>]) -> Result<f64> {
    let gradients: Vec<_> = gradients.iter().flatten().collect();
    let double = gradients.iter().any(|gradient| gradient.dtype() == DType::F64);
    let dtype = if double { FloatDType::F64 } else { FloatDType::F32 };
    let squares = |gradient: &&FloatTensor<B>| {
        let gradient = match (*gradient).clone() {
            tensor if tensor.dtype() == dtype.into() => tensor,
            tensor => B::float_cast(tensor, dtype),
        };
        B::float_sum(B::float_mul(gradient.clone(), gradient))
    };
    if gradients.is_empty() {
        return Ok(0.0);
    }
    let sums = B::float_cat(gradients.iter().map(squares).collect(), 0);
    let sums: Vec<f64> = into_data::<B>(AnyTensor::Float(sums))?.iter::<f64>().collect();
    Ok(sum(&sums).sqrt())
}

fn sum_of_squares(data: &TensorData) -> f64 {
    if let Ok(values) = data.as_slice::<f32>() {
        return sum_squares(values, |value| f64::from(*value));
    }
    if let Ok(values) = data.as_slice::<f64>() {
        return sum_squares(values, |value| *value);
    }
    let values: Vec<f64> = data.iter::<f64>().collect();
    sum_squares(&values, |value| *value)
}

fn sum_squares<T>(values: &[T], widen: impl Fn(&T) -> f64) -> f64 {
    let block = |values: &[T]| {
        values.iter().fold(0.0, |sum, value| {
            let value = widen(value);
            sum + value * value
        })
    };
    sum(&values.chunks(BLOCK).map(block).collect::<Vec<_>>())
}

/// The sum of `values` in the order of the tree.
fn sum(values: &[f64]) -> f64 {
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

    #[test]
    fn the_device_finds_the_same_norm_and_the_gradients_stay() {
        use burn::tensor::ops::FloatTensorOps;
        type B = burn_flex::Flex;
        let tensor = |values: Vec<f32>, shape: [usize; 2]| {
            B::float_from_data(TensorData::new(values, shape), &Default::default())
        };
        let numbers: Vec<f32> = (0..4000).map(|i| (i as f32).sin() / 7.0).collect();
        let half = B::float_cast(tensor(vec![1.5, -2.0], [1, 2]), FloatDType::F16);
        let mut gradients =
            vec![Some(tensor(numbers, [40, 100])), None, Some(tensor(vec![3.0], [1, 1])), Some(half)];
        let on_device = on_device::<B>(&gradients).unwrap();
        let host = through_host::<B>(&mut gradients).unwrap();
        assert!((on_device / host - 1.0).abs() < 1e-6, "{on_device} {host}");
        assert!(gradients[0].is_some() && gradients[1].is_none() && host > 3.9);
        assert_eq!(super::on_device::<B>(&[None]).unwrap(), 0.0);
    }
}
