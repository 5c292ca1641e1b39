//! Burn's hook into the backward pass, and the refusal of Burn's own data-parallel server.
//!
//! `DistributedBackend` mixes two things. One is a notification: during `backward()`, on the calling thread, Burn names
//! the marked parameters, then hands over each of their gradients when its last contribution is added, then reports
//! that all are complete. The other is an implementation of it, in the default bodies: a server thread that reduces
//! gradients between several devices of one process. `Ddp` is one process per device, so a gradient that reached that
//! server would wait for peers that do not exist, and a program that started it would train as many unrelated models as
//! it has devices. So every function is implemented here:
//!
//! - [`start_communication_server`](DistributedBackend::start_communication_server) and the collectives of the server
//!   refuse. They return no `Result`, so the refusal is a panic: the alternative is to train unsynchronized in silence.
//! - The notifications go to the reducer of the replica that has the parameter (`replica/registry.rs`), which may take
//!   the gradient and send it while the backward pass continues. Where there is no such reducer the gradient stays, and
//!   `Replica::reduce` sends it afterwards. Marks can get lost (`fork`, `to_device` and a record load drop them), so
//!   speed may depend on them but no number.

use burn_backend::{
    Backend, DeviceId,
    distributed::{
        CollectiveTensor, DistributedBackend, DistributedConfig, DistributedParams, ReduceOperation,
        TensorRef,
    },
    tensor::{Device, FloatTensor},
};

use super::Ddp;
use crate::replica::registry;

impl<B: Backend> DistributedBackend for Ddp<B> {
    fn start_communication_server(devices: &[Self::Device], _config: DistributedConfig) {
        refuse(
            "start_communication_server",
            format_args!(
                "`ExecutionStrategy::ddp` over {} devices of one process would train without synchronizing",
                devices.len()
            ),
        )
    }

    fn close_communication_server(_device: &Self::Device) {}

    fn register_sync_parameters(_device: &Self::Device, distributed_params: Vec<DistributedParams>) {
        registry::backward_begins::<Self>(&distributed_params);
    }

    fn submit_sync_collective(_device: &Self::Device) {}

    #[expect(unsafe_code, reason = "Burn hands the gradient over as a pointer")]
    fn submit_gradient_sync(tensor: TensorRef<Self>, distributed_params: DistributedParams) {
        // SAFETY: burn-autodiff makes the pointer from a `&mut` to the gradient in its container, calls this on its own
        // thread, and uses the gradient again only after this has returned; the pointer is not kept.
        let gradient = unsafe { &mut *tensor.0 };
        registry::gradient_ready::<Self>(&distributed_params, gradient);
    }

    fn all_reduce(
        _tensor: FloatTensor<Self>,
        op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        refuse(
            "all_reduce",
            format_args!("a {op:?} over {} devices of one process is not available", device_ids.len()),
        )
    }

    fn sync_collective(device: &Self::Device) {
        refuse("sync_collective", format_args!("no collective of one process can be pending on {device:?}"))
    }

    #[expect(unsafe_code, reason = "the trait declares this function unsafe")]
    unsafe fn comm_device(tensor: &TensorRef<Self>) -> Device<Self> {
        // SAFETY: the caller promises that the tensor behind the reference lives and that it is not written to.
        B::float_device(unsafe { &*tensor.0 })
    }

    #[expect(unsafe_code, reason = "the trait declares this function unsafe")]
    unsafe fn float_from_ref(tensor: &TensorRef<Self>) -> FloatTensor<Self> {
        // SAFETY: the caller promises that the tensor behind the reference lives and that it is not written to.
        unsafe { (*tensor.0).clone() }
    }
}

/// Panics with the reason `why` for a call of Burn's in-process data parallelism, and with the alternatives.
fn refuse(call: &str, why: std::fmt::Arguments<'_>) -> ! {
    panic!(
        "Ddp<B> refuses {call}: {why}. It runs one process per device: train a Learner with `DdpStrategy`, or a loop \
         of your own with `Replica`, and start the processes with `burnrun`"
    )
}
