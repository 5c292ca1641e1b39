//! The memory of a tensor on its device, and how NCCL reaches it.
//!
//! NCCL needs an address, and a backend hides it. [`DeviceAccess`] reaches it; it is a value of its own, so that tests
//! can use host memory in place of a device.
#![allow(unsafe_code)]

use burn::tensor::backend::Backend;
use burn_ddp::Result;
use burn_ddp::communicator::AnyTensor;

/// Access to the device memory of tensors of backend `B`.
///
/// # Safety
///
/// Until it is given back to [`close`](DeviceAccess::close) or dropped, `kept` holds the memory of the buffer valid for
/// reads and writes by the device of the group, and nothing else reads or writes it once the fence is reached.
pub unsafe trait DeviceAccess<B: Backend>: Send + Sync + 'static {
    /// Keeps the memory alive and unshared.
    type Kept: Send + 'static;

    /// The memory of `tensor`, which has one dimension and no other owner. Called on the thread that made the tensor:
    /// the fence stands behind everything that this thread has enqueued.
    ///
    /// # Errors
    ///
    /// A tensor that is not contiguous or not on the device, and a device that has failed.
    fn open(&self, tensor: AnyTensor<B>) -> Result<DeviceBuffer<Self::Kept>>;

    /// The tensor again, on the thread that waited for the collective, after it is done.
    ///
    /// # Errors
    ///
    /// Those of the backend.
    fn close(&self, kept: Self::Kept) -> Result<AnyTensor<B>>;
}

/// The memory of a tensor.
#[derive(Debug)]
pub struct DeviceBuffer<K> {
    /// Its first byte, as the device counts (CUDA's `CUdeviceptr`).
    pub address: usize,
    /// Its size.
    pub bytes: usize,
    /// See [`DeviceAccess::Kept`].
    pub kept: K,
    /// The end of everything that writes into it.
    pub fence: Fence,
}

/// The end of everything that was enqueued on the submitting thread's stream before the fence was made. The
/// communication thread waits for it, and makes no other call of Burn.
pub struct Fence(Box<dyn FnOnce() -> Result<()> + Send>);

impl Fence {
    /// A fence that is reached when `wait` returns.
    pub fn new(wait: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Blocks until the fence is reached.
    ///
    /// # Errors
    ///
    /// When the device has failed in the work before the fence.
    pub fn wait(self) -> Result<()> {
        (self.0)()
    }
}

impl std::fmt::Debug for Fence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fence")
    }
}
