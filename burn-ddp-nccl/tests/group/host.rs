//! Groups whose "device" is host memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use burn::tensor::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::tensor::{BasicOps, Tensor, TensorData};
use burn_backend::read_sync;
use burn_ddp::communicator::{AnyTensor, Layout};
use burn_ddp::{CommunicatorKind, Ddp, Error, ErrorKind, GroupOptions, ProcessGroup, RankInfo, Result};
use burn_ddp_nccl::DeviceInfo;
use burn_ddp_nccl::library::{RawStream, Symbols, Version};
use burn_ddp_nccl::{DeviceAccess, DeviceBuffer, Fence, NcclFactory, Stream};
use burn_flex::Flex;

use crate::fake::{self, FakeStream};

pub type B = Ddp<Flex>;

/// Contents of the memory while the "kernels" before a fence have not run.
const GARBAGE: u8 = 0xAB;

/// Gives a tensor's memory as a device would: another thread writes its contents, at the fence and no sooner. An engine
/// that does not wait for the fence sends garbage.
#[derive(Clone)]
pub struct HostAccess;

pub struct Kept {
    data: TensorData,
    layout: Layout<B>,
    _end: End,
}

/// Logs "memory" when the memory is freed.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        note(&["memory"]);
    }
}

static EVENTS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

fn note(more: &[&'static str]) -> Vec<&'static str> {
    let mut events = EVENTS.lock().expect("no panic with it");
    events.extend(fake::log());
    events.extend(more);
    events.clone()
}

/// The calls of the fake, with "memory" for each bucket that was given back or dropped.
pub fn events() -> Vec<&'static str> {
    note(&[])
}

// SAFETY: `kept` owns the memory, which does not move with it; the thread has ended when the fence is reached.
unsafe impl DeviceAccess<B> for HostAccess {
    type Kept = Kept;

    fn open(&self, tensor: AnyTensor<B>) -> Result<DeviceBuffer<Kept>> {
        let layout = Layout::of(&tensor);
        assert_eq!(layout.shape.len(), 1, "a bucket");
        let mut data = into_data(tensor);
        let written = data.bytes.to_vec();
        data.bytes.fill(GARBAGE);
        let (address, bytes) = (data.bytes.as_mut_ptr().expose_provenance(), written.len());
        let (run, kernel) = channel::<()>();
        let (end, ended) = channel::<()>();
        std::thread::spawn(move || {
            if kernel.recv().is_ok() {
                // SAFETY: the bucket waits for the fence, or else drops it before its memory.
                unsafe {
                    std::ptr::copy(
                        written.as_ptr(),
                        std::ptr::with_exposed_provenance_mut(address),
                        written.len(),
                    );
                }
                let _ = end.send(());
            }
        });
        let fence = Fence::new(move || {
            let ran = run.send(()).is_ok() && ended.recv().is_ok();
            ran.then_some(()).ok_or_else(|| Error::new(ErrorKind::Device, "the kernel is gone"))
        });
        Ok(DeviceBuffer { address, bytes, kept: Kept { data, layout, _end: End }, fence })
    }

    fn close(&self, Kept { data, layout, .. }: Kept) -> Result<AnyTensor<B>> {
        Ok(match layout.dtype.is_float() {
            true => AnyTensor::Float(B::float_from_data(data, &layout.device)),
            false => AnyTensor::Int(B::int_from_data(data, &layout.device)),
        })
    }
}

/// Set to make the stream of the next collective panic.
pub static PANIC_AT_EVENT: AtomicBool = AtomicBool::new(false);

struct HostStream(FakeStream);

impl Stream for HostStream {
    fn raw(&self) -> RawStream {
        self.0.raw()
    }

    fn record(&mut self) -> Result<()> {
        assert!(!PANIC_AT_EVENT.load(Ordering::SeqCst), "asked to panic");
        self.0.record()
    }

    fn is_reached(&mut self) -> Result<bool> {
        self.0.is_reached()
    }
}

/// The group of the environment: over the fake, or over TCP where the argument begins with "host".
pub fn group() -> Result<ProcessGroup<B>> {
    if crate::harness::argument().starts_with("host") {
        return ProcessGroup::from_env(&Default::default());
    }
    let rank = RankInfo::from_env()?.rank;
    over_fake(rank.0 as u8, Ok((fake::symbols(), VERSION)))
}

pub const VERSION: Version = Version { major: 2, minor: 27, patch: 5 };

/// The group of the environment, in which this rank drives the device with this UUID and has `nccl`.
pub fn over_fake(uuid: u8, nccl: Result<(Symbols, Version)>) -> Result<ProcessGroup<B>> {
    over_fake_of_kind(GroupOptions::from_env()?.communicator, uuid, nccl)
}

/// [`over_fake`] with a value of `BURN_DDP_COMM` for this rank alone.
pub fn over_fake_of_kind(
    kind: CommunicatorKind,
    uuid: u8,
    nccl: Result<(Symbols, Version)>,
) -> Result<ProcessGroup<B>> {
    let (info, options) = (RankInfo::from_env()?, GroupOptions::from_env()?);
    let device = DeviceInfo { ordinal: 0, name: "a fake".into(), uuid: [uuid; 16] };
    let stream = Arc::new(|| Ok(Box::new(HostStream(FakeStream::new())) as Box<dyn Stream>));
    // SAFETY: the fake keeps NCCL's contract, and its device is host memory.
    let factory = unsafe { NcclFactory::new(HostAccess, kind, device, nccl, stream) };
    ProcessGroup::with_factory(info, options, &Default::default(), Arc::new(factory))
}

pub fn into_data(tensor: AnyTensor<B>) -> TensorData {
    let data = match tensor {
        AnyTensor::Float(tensor) => read_sync(B::float_into_data(tensor)),
        AnyTensor::Int(tensor) => read_sync(B::int_into_data(tensor)),
        AnyTensor::Bool(tensor) => read_sync(B::bool_into_data(tensor)),
    };
    data.expect("host memory")
}

pub fn numbers<const D: usize, K: BasicOps<B>>(tensor: Tensor<B, D, K>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}
