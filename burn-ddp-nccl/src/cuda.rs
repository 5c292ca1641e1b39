//! The memory of Burn's CUDA tensors, with and without fusion.
//!
//! The module relies on these facts, read in the sources of cubecl 0.10 and Burn 0.21:
//!
//! - **Each thread has its own stream.** Operations run on the stream of the thread that called them
//!   (`StreamId::current`), also through fusion, whose device thread takes on the caller's id for each task.
//!   `client.sync()` records an event on the stream of the calling thread before it returns; the future that it returns
//!   only waits. Called here, behind the operations that filled the bucket, it is the bucket's fence, and any thread
//!   may wait for it.
//! - **A handle does not wait for its last write.** cubecl makes a stream wait for the *allocation* of a handle that
//!   another stream made, and a bucket is one allocation and then writes in place. So another thread that asked cubecl
//!   for the bucket could read it too early: hence the fence. The stream cannot be reached from outside, so NCCL's
//!   stream cannot wait for it either, and a thread has to.
//! - **An event can be waited for without a current context**: cubecl's own collector does so. The communication thread
//!   has the primary context, which is cubecl's too.
//! - **Fusion is lazy.** Resolving a tensor runs the operations that are queued for it. It resolves a clone, which
//!   tells fusion's queue that the tensor was read. In flight a bucket is a plain handle outside of fusion; it is
//!   registered anew on the thread that waits for it. Fusion tensors belong to the stream of the thread that made them,
//!   and one that another thread cuts up is kept until the first thread computes again, which may be never.
//! - **Memory lives as long as its handles**, and a bucket has one handle.
//!
//! A bucket has one dimension: its rows are not padded, so its elements are contiguous (checked).
#![allow(unsafe_code)]

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::DType;
use burn::tensor::backend::{Backend, BackendTypes};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{Ddp, Error, ErrorKind, Result};
use burn_fusion::stream::OperationStreams;
use burn_fusion::{Fusion, NoOp};
use burn_ir::{InitOperationIr, OperationIr};
use cubecl::cuda::install::cuda_path;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::future::block_on;
use cubecl::prelude::ComputeClient;

use crate::device_buffer::{DeviceAccess, DeviceBuffer, Fence};
use crate::process_group::NcclBackend;

/// A backend whose tensors lie in the memory of a CUDA device: Burn's `Cuda` with and without its feature `fusion`, and
/// [`Ddp`] of either.
pub trait CudaBackend: Backend<Device = CudaDevice> {
    /// The memory of `tensor`, after all operations that are queued for it were enqueued on the device.
    fn resolve(tensor: AnyTensor<Self>) -> CubeTensor<CudaRuntime>;

    /// A tensor of this memory.
    fn restore(cube: CubeTensor<CudaRuntime>) -> AnyTensor<Self>;
}

impl<F: FloatElement, I: IntElement, BT: BoolElement> CudaBackend for CubeBackend<CudaRuntime, F, I, BT> {
    fn resolve(tensor: AnyTensor<Self>) -> CubeTensor<CudaRuntime> {
        match tensor {
            AnyTensor::Float(tensor) | AnyTensor::Int(tensor) | AnyTensor::Bool(tensor) => tensor,
        }
    }

    fn restore(cube: CubeTensor<CudaRuntime>) -> AnyTensor<Self> {
        of_kind(cube.dtype, cube)
    }
}

impl<F: FloatElement, I: IntElement, BT: BoolElement> CudaBackend
    for Fusion<CubeBackend<CudaRuntime, F, I, BT>>
{
    fn resolve(tensor: AnyTensor<Self>) -> CubeTensor<CudaRuntime> {
        type Inner<F, I, BT> = CubeBackend<CudaRuntime, F, I, BT>;
        match tensor.clone() {
            AnyTensor::Float(tensor) => {
                let client = tensor.client.clone();
                client.resolve_tensor_float::<Inner<F, I, BT>>(tensor)
            }
            AnyTensor::Int(tensor) => {
                let client = tensor.client.clone();
                client.resolve_tensor_int::<Inner<F, I, BT>>(tensor)
            }
            AnyTensor::Bool(tensor) => {
                let client = tensor.client.clone();
                client.resolve_tensor_bool::<Inner<F, I, BT>>(tensor)
            }
        }
    }

    fn restore(cube: CubeTensor<CudaRuntime>) -> AnyTensor<Self> {
        type Inner<F, I, BT> = CubeBackend<CudaRuntime, F, I, BT>;
        let client = burn_fusion::get_client::<Inner<F, I, BT>>(&cube.device);
        let (shape, dtype) = (cube.meta.shape().clone(), cube.dtype);
        let made = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(cube.into()));
        let nothing = NoOp::<Inner<F, I, BT>>::new();
        let mut tensors = client.register(OperationStreams::default(), OperationIr::Init(made), nothing);
        of_kind(dtype, tensors.remove(0))
    }
}

impl<B: CudaBackend> CudaBackend for Ddp<B> {
    fn resolve(tensor: AnyTensor<Self>) -> CubeTensor<CudaRuntime> {
        B::resolve(match tensor {
            AnyTensor::Float(tensor) => AnyTensor::Float(tensor),
            AnyTensor::Int(tensor) => AnyTensor::Int(tensor),
            AnyTensor::Bool(tensor) => AnyTensor::Bool(tensor),
        })
    }

    fn restore(cube: CubeTensor<CudaRuntime>) -> AnyTensor<Self> {
        match B::restore(cube) {
            AnyTensor::Float(tensor) => AnyTensor::Float(tensor),
            AnyTensor::Int(tensor) => AnyTensor::Int(tensor),
            AnyTensor::Bool(tensor) => AnyTensor::Bool(tensor),
        }
    }
}

/// `tensor` in the variant for its `dtype`.
fn of_kind<B, T>(dtype: DType, tensor: T) -> AnyTensor<B>
where
    B: Backend + BackendTypes<FloatTensorPrimitive = T, IntTensorPrimitive = T, BoolTensorPrimitive = T>,
{
    match dtype {
        DType::Bool(_) => AnyTensor::Bool(tensor),
        dtype if dtype.is_float() => AnyTensor::Float(tensor),
        _ => AnyTensor::Int(tensor),
    }
}

impl<B: CudaBackend> NcclBackend for B {
    type Access = CudaAccess;

    fn ordinal(device: &CudaDevice) -> Option<usize> {
        Some(device.index)
    }

    fn device(ordinal: usize) -> CudaDevice {
        CudaDevice::new(ordinal)
    }

    fn missing() -> Vec<String> {
        missing_compiler()
    }
}

/// One sentence for each part of the CUDA compiler that is missing. Burn compiles its kernels when they first run;
/// without the compiler cubecl panics in a thread of its own.
fn missing_compiler() -> Vec<String> {
    let mut missing = Vec::new();
    // SAFETY: only tries to load the library, whose initializers are NVIDIA's.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        missing.push(
            "no CUDA compiler: libnvrtc.so cannot be loaded; install the CUDA toolkit, or have its folder in \
             LD_LIBRARY_PATH"
                .into(),
        );
    }
    let path = cuda_path();
    if !path.as_ref().is_some_and(|path| path.join("include/cuda_runtime.h").exists()) {
        let place = path.map_or("nowhere".into(), |path| path.display().to_string());
        missing.push(format!(
            "no CUDA headers: include/cuda_runtime.h was looked for in {place}; set CUDA_PATH to the CUDA toolkit"
        ));
    }
    missing
}

/// Access to the tensors of every [`CudaBackend`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaAccess;

// SAFETY: the handle keeps the memory allocated and is the only one, since the bucket had no other owner; the fence is
// behind everything that was enqueued by this thread, which made the tensor.
unsafe impl<B: CudaBackend> DeviceAccess<B> for CudaAccess {
    type Kept = CubeTensor<CudaRuntime>;

    fn open(&self, tensor: AnyTensor<B>) -> Result<DeviceBuffer<CubeTensor<CudaRuntime>>> {
        // The client panics if the thread of cubecl or of fusion has died, which has printed why to stderr.
        let opened = catch_unwind(AssertUnwindSafe(|| open(tensor)));
        opened
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Device, "Burn's CUDA runtime panicked: see above")))
    }

    fn close(&self, kept: CubeTensor<CudaRuntime>) -> Result<AnyTensor<B>> {
        Ok(B::restore(kept))
    }
}

fn open<B: CudaBackend>(tensor: AnyTensor<B>) -> Result<DeviceBuffer<CubeTensor<CudaRuntime>>> {
    let cube = B::resolve(tensor);
    let (shape, strides) = (cube.meta.shape(), cube.meta.strides());
    if shape.num_dims() != 1 || strides[0] != 1 {
        let text = format!("a bucket of shape {shape:?} and strides {strides:?} is not contiguous");
        return Err(Error::new(ErrorKind::Device, text));
    }
    let client: ComputeClient<CudaRuntime> = cube.client.clone();
    let resource = client.get_resource(cube.handle.clone());
    let resource = resource.map_err(|error| failed("memory of a bucket", &error))?;
    let (address, bytes) = (resource.resource().ptr as usize, resource.resource().size as usize);
    let event = client.sync();
    let fence = Fence::new(|| block_on(event).map_err(|error| failed("kernels before a collective", &error)));
    Ok(DeviceBuffer { address, bytes, kept: cube, fence })
}

/// cubecl's `error` of `what` as one line, without the backtrace at its end.
fn failed(what: &str, error: &dyn fmt::Display) -> Error {
    let text = error.to_string();
    let lines: Vec<&str> =
        text.lines().take_while(|line| !line.starts_with("Backtrace")).map(str::trim).collect();
    Error::new(ErrorKind::Device, format!("{what}: {}", lines.join(" ")))
}
