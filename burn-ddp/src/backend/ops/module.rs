//! Operations of neural network modules.
//!
//! The result structures have the backend in their type and are rebuilt field by field, without `..`, so that a field
//! that Burn adds is a compile error.

use burn_backend::{
    Backend,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward, DeformConvOptions,
        InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices,
        ModuleOps, UnfoldOptions,
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use crate::backend::Ddp;

impl<B: Backend> ModuleOps<Self> for Ddp<B> {
    forward! {
        fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self>;
        fn embedding_backward(
            weights: FloatTensor<Self>, output_grad: FloatTensor<Self>, indices: IntTensor<Self>
        ) -> FloatTensor<Self>;
        fn linear(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>
        ) -> FloatTensor<Self>;
        fn linear_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn linear_weight_backward(x: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn conv1d(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<1>
        ) -> FloatTensor<Self>;
        fn conv1d_x_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<1>
        ) -> FloatTensor<Self>;
        fn conv1d_weight_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<1>
        ) -> FloatTensor<Self>;
        fn conv1d_bias_backward(
            x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>
        ) -> FloatTensor<Self>;
        fn conv2d(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<2>
        ) -> FloatTensor<Self>;
        fn conv2d_x_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<2>
        ) -> FloatTensor<Self>;
        fn conv2d_weight_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<2>
        ) -> FloatTensor<Self>;
        fn conv2d_bias_backward(
            x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>
        ) -> FloatTensor<Self>;
        fn deform_conv2d(
            x: FloatTensor<Self>, offset: FloatTensor<Self>, weight: FloatTensor<Self>,
            mask: Option<FloatTensor<Self>>, bias: Option<FloatTensor<Self>>, options: DeformConvOptions<2>
        ) -> FloatTensor<Self>;
    }

    fn deform_conv2d_backward(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        output_grad: FloatTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> DeformConv2dBackward<Self> {
        let DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad } =
            B::deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options);
        DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad }
    }

    forward! {
        fn conv3d(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<3>
        ) -> FloatTensor<Self>;
        fn conv3d_x_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<3>
        ) -> FloatTensor<Self>;
        fn conv3d_weight_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<3>
        ) -> FloatTensor<Self>;
        fn conv3d_bias_backward(
            x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>
        ) -> FloatTensor<Self>;
        fn conv_transpose1d(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>,
            options: ConvTransposeOptions<1>
        ) -> FloatTensor<Self>;
        fn conv_transpose1d_x_backward(
            weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<1>
        ) -> FloatTensor<Self>;
        fn conv_transpose1d_weight_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>,
            options: ConvTransposeOptions<1>
        ) -> FloatTensor<Self>;
        fn conv_transpose1d_bias_backward(
            x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>
        ) -> FloatTensor<Self>;
        fn conv_transpose2d(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>,
            options: ConvTransposeOptions<2>
        ) -> FloatTensor<Self>;
        fn conv_transpose2d_x_backward(
            weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<2>
        ) -> FloatTensor<Self>;
        fn conv_transpose2d_weight_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>,
            options: ConvTransposeOptions<2>
        ) -> FloatTensor<Self>;
        fn conv_transpose2d_bias_backward(
            x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>
        ) -> FloatTensor<Self>;
        fn conv_transpose3d(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>,
            options: ConvTransposeOptions<3>
        ) -> FloatTensor<Self>;
        fn conv_transpose3d_x_backward(
            weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<3>
        ) -> FloatTensor<Self>;
        fn conv_transpose3d_weight_backward(
            x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>,
            options: ConvTransposeOptions<3>
        ) -> FloatTensor<Self>;
        fn conv_transpose3d_bias_backward(
            x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>
        ) -> FloatTensor<Self>;
        fn unfold4d(x: FloatTensor<Self>, kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor<Self>;
        fn avg_pool1d(
            x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool,
            ceil_mode: bool
        ) -> FloatTensor<Self>;
        fn avg_pool1d_backward(
            x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize,
            count_include_pad: bool, ceil_mode: bool
        ) -> FloatTensor<Self>;
        fn avg_pool2d(
            x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            count_include_pad: bool, ceil_mode: bool
        ) -> FloatTensor<Self>;
        fn avg_pool2d_backward(
            x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2],
            padding: [usize; 2], count_include_pad: bool, ceil_mode: bool
        ) -> FloatTensor<Self>;
        fn adaptive_avg_pool2d(x: FloatTensor<Self>, output_size: [usize; 2]) -> FloatTensor<Self>;
        fn adaptive_avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn adaptive_avg_pool1d(x: FloatTensor<Self>, output_size: usize) -> FloatTensor<Self>;
        fn adaptive_avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn max_pool1d(
            x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool
        ) -> FloatTensor<Self>;
    }

    fn max_pool1d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> MaxPool1dWithIndices<Self> {
        let MaxPool1dWithIndices { output, indices } =
            B::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
        MaxPool1dWithIndices { output, indices }
    }

    fn max_pool1d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool1dBackward<Self> {
        let MaxPool1dBackward { x_grad } = B::max_pool1d_with_indices_backward(
            x,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            output_grad,
            indices,
        );
        MaxPool1dBackward { x_grad }
    }

    forward! {
        fn max_pool2d(
            x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            dilation: [usize; 2], ceil_mode: bool
        ) -> FloatTensor<Self>;
    }

    fn max_pool2d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> MaxPool2dWithIndices<Self> {
        let MaxPool2dWithIndices { output, indices } =
            B::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
        MaxPool2dWithIndices { output, indices }
    }

    fn max_pool2d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool2dBackward<Self> {
        let MaxPool2dBackward { x_grad } = B::max_pool2d_with_indices_backward(
            x,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            output_grad,
            indices,
        );
        MaxPool2dBackward { x_grad }
    }

    forward! {
        fn interpolate(x: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self>;
        fn interpolate_backward(
            x: FloatTensor<Self>, grad: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions
        ) -> FloatTensor<Self>;
        fn attention(
            query: FloatTensor<Self>, key: FloatTensor<Self>, value: FloatTensor<Self>,
            mask: Option<BoolTensor<Self>>, attn_bias: Option<FloatTensor<Self>>, options: AttentionModuleOptions
        ) -> FloatTensor<Self>;
        fn layer_norm(
            tensor: FloatTensor<Self>, gamma: FloatTensor<Self>, beta: Option<FloatTensor<Self>>, epsilon: f64
        ) -> FloatTensor<Self>;
        fn ctc_loss(
            log_probs: FloatTensor<Self>, targets: IntTensor<Self>, input_lengths: IntTensor<Self>,
            target_lengths: IntTensor<Self>, blank: usize
        ) -> FloatTensor<Self>;
        fn has_ctc_loss_backward() -> bool;
        fn ctc_loss_backward(
            log_probs: FloatTensor<Self>, targets: IntTensor<Self>, input_lengths: IntTensor<Self>,
            target_lengths: IntTensor<Self>, grad_loss: FloatTensor<Self>, blank: usize
        ) -> FloatTensor<Self>;
        fn rfft(signal: FloatTensor<Self>, dim: usize, n: Option<usize>) -> (FloatTensor<Self>, FloatTensor<Self>);
        fn irfft(
            spectrum_re: FloatTensor<Self>, spectrum_im: FloatTensor<Self>, dim: usize, n: Option<usize>
        ) -> FloatTensor<Self>;
    }
}
