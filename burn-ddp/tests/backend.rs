//! Without a process group, `Ddp<B>` computes what `B` computes, bit for bit.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::quantization::{QuantScheme, QuantStore, QuantValue};
use burn::tensor::{
    DType, Distribution, Int, Tensor, TensorMetadata, TensorPrimitive, Transaction, module,
    ops::DeformConvOptions,
};
use burn_ddp::Ddp;
use burn_flex::Flex;
use burn_ndarray::NdArray;

use crate::training::{Trace, exclusive};

/// Compiles only for what `Autodiff` accepts as differentiable.
const fn differentiable<B: AutodiffBackend>() {}

const _: () = {
    differentiable::<Autodiff<Ddp<Flex>>>();
    differentiable::<Autodiff<Ddp<Flex>, BalancedCheckpointing>>();
    differentiable::<Autodiff<Ddp<NdArray<f32>>>>();
    differentiable::<Autodiff<Ddp<NdArray<f64>>>>();
};

// With `overlap`, a bare `Autodiff<B>` is not differentiable: there is nothing to compare with.
#[cfg(not(feature = "overlap"))]
mod trains_as {
    use super::*;
    use crate::training::train;

    const STEPS: usize = 4;

    fn check<Plain: AutodiffBackend, Decorated: AutodiffBackend>() {
        let _exclusive = exclusive();
        let plain = train::<Plain>(17, STEPS, |model| model);
        let decorated = train::<Decorated>(17, STEPS, |model| model);
        plain.assert_equal(&decorated);

        let gradients = plain.labels().filter(|label| *label == "gradient").count();
        assert!(gradients > 10 * STEPS, "only {gradients} gradients were compared");
        let other = train::<Decorated>(18, STEPS, |model| model);
        assert_ne!(plain, other, "another seed must be seen by the comparison");
    }

    #[test]
    fn flex() {
        check::<Autodiff<Flex>, Autodiff<Ddp<Flex>>>();
    }

    #[test]
    fn flex_with_checkpointing() {
        check::<Autodiff<Flex, BalancedCheckpointing>, Autodiff<Ddp<Flex>, BalancedCheckpointing>>();
    }

    #[test]
    fn ndarray_f32() {
        check::<Autodiff<NdArray<f32>>, Autodiff<Ddp<NdArray<f32>>>>();
    }

    #[test]
    fn ndarray_f64() {
        check::<Autodiff<NdArray<f64>>, Autodiff<Ddp<NdArray<f64>>>>();
    }
}

/// Operations that a training run does not reach, on the backend itself.
fn operations<B: Backend>() -> Trace {
    let device = B::Device::default();
    B::seed(&device, 5);
    let mut trace = Trace::default();
    let uniform = Distribution::Uniform(-1.0, 1.0);
    let x = Tensor::<B, 4>::random([2, 3, 6, 6], uniform, &device);
    trace.push("random", &x.to_data());

    let (pooled, indices) = module::max_pool2d_with_indices(x.clone(), [3, 3], [1, 1], [1, 1], [1, 1], false);
    let (line, positions) = module::max_pool1d_with_indices(x.clone().flatten::<3>(2, 3), 2, 2, 0, 1, false);
    let offset = Tensor::<B, 4>::random([2, 18, 4, 4], uniform, &device);
    let weight = Tensor::<B, 4>::random([2, 3, 3, 3], uniform, &device);
    let options = DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
    let deformed = module::deform_conv2d(x.clone(), offset, weight, None, None, options);

    let numbers = Tensor::<B, 1, Int>::arange(-8..8, &device);
    let odd = numbers.clone().remainder_scalar(2).equal_elem(1);
    let square = numbers.clone().powi_scalar(2).mask_fill(odd.clone(), 3).reshape([4, 4]);
    let exclusive_or = odd.clone().not_equal(odd.clone().flip([0]));
    let drawn = Tensor::<B, 1, Int>::random([16], Distribution::Uniform(0.0, 100.0), &device);
    let read = Transaction::default()
        .register(indices)
        .register(pooled)
        .register(odd.clone())
        .register(line)
        .register(positions)
        .register(deformed)
        .register(square.sort(1))
        .register(exclusive_or)
        .register(odd.argwhere())
        .register(drawn)
        .execute();
    for (place, data) in read.iter().enumerate() {
        trace.push(format!("transaction, place {place}"), data);
    }
    trace
}

/// All five gradients of a deformable convolution, each a field that the decorator moves to another type.
fn deformable_gradients<B: Backend>() -> Trace {
    let device = B::Device::default();
    B::seed(&device, 7);
    let draw = |shape: [usize; 4]| {
        Tensor::<B, 4>::random(shape, Distribution::Uniform(-1.0, 1.0), &device).into_primitive().tensor()
    };
    let gradients = B::deform_conv2d_backward(
        draw([2, 3, 6, 6]),
        draw([2, 18, 4, 4]),
        draw([2, 3, 3, 3]),
        Some(draw([2, 9, 4, 4])),
        Some(Tensor::<B, 1>::ones([2], &device).into_primitive().tensor()),
        draw([2, 2, 4, 4]),
        DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1),
    );
    let mut trace = Trace::default();
    let mut push = |label: &str, gradient: B::FloatTensorPrimitive| {
        let dimensions = gradient.shape().num_dims();
        let data = match dimensions {
            1 => Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(gradient)).into_data(),
            _ => Tensor::<B, 4>::from_primitive(TensorPrimitive::Float(gradient)).into_data(),
        };
        trace.push(label, &data);
    };
    push("x", gradients.x_grad);
    push("offset", gradients.offset_grad);
    push("weight", gradients.weight_grad);
    push("mask", gradients.mask_grad.expect("a mask was given"));
    push("bias", gradients.bias_grad.expect("a bias was given"));
    trace
}

/// The round trip through a quantized tensor, and operations on one.
fn quantized<B: Backend>() -> Trace {
    let device = B::Device::default();
    B::seed(&device, 6);
    let mut trace = Trace::default();
    let scheme = QuantScheme::default().with_value(QuantValue::Q8S).with_store(QuantStore::Native);
    let x = Tensor::<B, 2>::random([8, 8], Distribution::Normal(0.0, 2.0), &device);
    let y = Tensor::<B, 2>::random([8, 8], Distribution::Normal(1.0, 1.0), &device);
    let (qx, qy) = (x.clone().quantize_dynamic(&scheme), y.quantize_dynamic(&scheme));
    trace.push("quantized", &qx.to_data());
    trace.push("dequantized", &qx.clone().dequantize().into_data());
    trace.push("sum", &qx.clone().add(qy.clone()).into_data());
    trace.push("product", &qx.clone().matmul(qy.clone()).into_data());
    trace.push("mixed product", &x.matmul(qy.clone()).into_data());
    trace.push("exp", &qx.clone().exp().into_data());
    trace.push("transposed", &qx.clone().transpose().dequantize().into_data());
    trace.push("restored", &Tensor::<B, 2>::from_data(qy.to_data(), &device).dequantize().into_data());
    let read = Transaction::default().register(qx.clone().argmax(1)).register(qy).register(qx).execute();
    for (place, data) in read.iter().enumerate() {
        trace.push(format!("transaction, place {place}"), data);
    }
    trace
}

#[test]
fn single_operations_are_those_of_the_backend_inside() {
    let _exclusive = exclusive();
    operations::<Flex>().assert_equal(&operations::<Ddp<Flex>>());
    operations::<NdArray<f32>>().assert_equal(&operations::<Ddp<NdArray<f32>>>());
    operations::<NdArray<f64>>().assert_equal(&operations::<Ddp<NdArray<f64>>>());
    deformable_gradients::<Flex>().assert_equal(&deformable_gradients::<Ddp<Flex>>());
}

#[test]
fn quantized_operations_are_those_of_the_backend_inside() {
    let _exclusive = exclusive();
    quantized::<Flex>().assert_equal(&quantized::<Ddp<Flex>>());
    quantized::<NdArray<f32>>().assert_equal(&quantized::<Ddp<NdArray<f32>>>());
}

#[test]
fn the_name_nests_and_the_rest_is_asked_of_the_backend_inside() {
    fn check<B: Backend>() {
        let device = B::Device::default();
        let inner = B::name(&device);
        assert_eq!(Ddp::<B>::name(&device), format!("ddp<{inner}>"));
        assert!(!Ddp::<B>::ad_enabled(&device));
        assert_eq!(Ddp::<B>::device_count(0), B::device_count(0));
        assert!(Ddp::<B>::sync(&device).is_ok());
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::U8] {
            assert_eq!(Ddp::<B>::supports_dtype(&device, dtype), B::supports_dtype(&device, dtype));
            assert_eq!(Ddp::<B>::dtype_usage(&device, dtype), B::dtype_usage(&device, dtype));
        }
    }
    check::<Flex>();
    check::<NdArray<f64>>();
    let device = Default::default();
    assert_eq!(Autodiff::<Ddp<Flex>>::name(&device), "autodiff<ddp<flex>>");
    assert!(Autodiff::<Ddp<Flex>>::ad_enabled(&device));
}
