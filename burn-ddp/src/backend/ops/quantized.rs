//! Operations on quantized tensors.
//!
//! [`TensorPrimitive`] and [`QuantizationParametersPrimitive`] have the backend in their type, so most results and two
//! arguments are rebuilt for the other backend.

use burn_backend::{
    Backend, BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorPrimitive,
    ops::QTensorOps,
    quantization::QuantScheme,
    tensor::{
        BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor,
        quantization::QuantizationParametersPrimitive,
    },
};

use super::{from_inner, to_inner};
use crate::backend::Ddp;

impl<B: Backend> QTensorOps<Self> for Ddp<B> {
    forward! {
        fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self>;
    }

    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        B::quantize(tensor, scheme, QuantizationParametersPrimitive { scales: qparams.scales })
    }

    forward! {
        fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self>;
        fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self>;
        fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self>;
        fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
    }

    fn q_into_data(
        tensor: QuantizedTensor<Self>,
    ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::q_into_data(tensor)
    }

    forward! {
        fn q_detach(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_set_require_grad(tensor: QuantizedTensor<Self>, require_grad: bool) -> QuantizedTensor<Self>;
        fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool;
        fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_transpose(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self>;
        fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self>;
        fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_repeat_dim(tensor: QuantizedTensor<Self>, dim: usize, times: usize) -> QuantizedTensor<Self>;
    }

    fn q_add(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_add(lhs, rhs))
    }

    fn q_add_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_add_scalar(lhs, rhs))
    }

    fn q_clamp_min(tensor: QuantizedTensor<Self>, min: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_clamp_min(tensor, min))
    }

    fn q_clamp_max(tensor: QuantizedTensor<Self>, max: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_clamp_max(tensor, max))
    }

    fn q_clamp(tensor: QuantizedTensor<Self>, min: Scalar, max: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_clamp(tensor, min, max))
    }

    fn q_sub(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_sub(lhs, rhs))
    }

    fn q_sub_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_sub_scalar(lhs, rhs))
    }

    fn q_mul(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_mul(lhs, rhs))
    }

    fn q_mul_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_mul_scalar(lhs, rhs))
    }

    fn q_div(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_div(lhs, rhs))
    }

    fn q_div_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_div_scalar(lhs, rhs))
    }

    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_matmul(to_inner(lhs), to_inner(rhs)))
    }

    fn q_neg(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_neg(tensor))
    }

    fn q_recip(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_recip(tensor))
    }

    fn q_sum(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_sum(tensor))
    }

    fn q_sum_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_sum_dim(tensor, dim))
    }

    fn q_prod(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_prod(tensor))
    }

    fn q_prod_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_prod_dim(tensor, dim))
    }

    fn q_mean(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_mean(tensor))
    }

    fn q_mean_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_mean_dim(tensor, dim))
    }

    fn q_cumsum(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_cumsum(tensor, dim))
    }

    fn q_cumprod(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_cumprod(tensor, dim))
    }

    fn q_cummin(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_cummin(tensor, dim))
    }

    fn q_cummax(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> {
        from_inner(B::q_cummax(tensor, dim))
    }

    fn q_exp(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_exp(tensor))
    }

    fn q_log(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_log(tensor))
    }

    fn q_log1p(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_log1p(tensor))
    }

    fn q_powf(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_powf(lhs, rhs))
    }

    fn q_powi(lhs: QuantizedTensor<Self>, rhs: IntTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_powi(lhs, rhs))
    }

    fn q_powi_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_powi_scalar(lhs, rhs))
    }

    fn q_powf_scalar(tensor: QuantizedTensor<Self>, value: Scalar) -> TensorPrimitive<Self> {
        from_inner(B::q_powf_scalar(tensor, value))
    }

    fn q_sqrt(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_sqrt(tensor))
    }

    forward! {
        fn q_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
    }

    fn q_cos(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_cos(tensor))
    }

    fn q_sin(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_sin(tensor))
    }

    fn q_tan(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_tan(tensor))
    }

    fn q_cosh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_cosh(tensor))
    }

    fn q_sinh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_sinh(tensor))
    }

    fn q_tanh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_tanh(tensor))
    }

    fn q_erf(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> {
        from_inner(B::q_erf(tensor))
    }

    forward! {
        fn q_cat(tensors: Vec<QuantizedTensor<Self>>, dim: usize) -> QuantizedTensor<Self>;
        fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_argtopk(tensor: QuantizedTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_topk(tensor: QuantizedTensor<Self>, dim: usize, k: usize) -> QuantizedTensor<Self>;
        fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_max(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_max_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_max_dim_with_indices(
            tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType
        ) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_min(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_min_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_min_dim_with_indices(
            tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType
        ) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_max_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_max_abs_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_any(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_any_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_all(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_all_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_sort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool) -> QuantizedTensor<Self>;
        fn q_sort_with_indices(
            tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType
        ) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_argsort(
            tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType
        ) -> IntTensor<Self>;
    }
}
