//! Groups whose "device" is host memory.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use burn::tensor::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::tensor::{BasicOps, Tensor, TensorData};
use burn_backend::read_sync;
use burn_ddp::communicator::{AnyTensor, CommunicatorFactory, HostEngine, Layout, Meeting, Opened};
use burn_ddp::{Ddp, Error, ErrorKind, GroupOptions, ProcessGroup, RankInfo, Result};
use burn_ddp_nccl::{DeviceAccess, DeviceBuffer, Fence, NcclComm, NcclCommunicator, NcclEngine, UniqueId};
use burn_flex::Flex;

use crate::fake::{self, FakeQueue};

pub type B = Ddp<Flex>;

/// What the memory holds while the "kernels" before a fence have not run.
const GARBAGE: u8 = 0xAB;

/// Hands out a tensor's memory as a device would: what it holds is written by another thread, at the fence and no
/// sooner. Who does not wait for the fence sends garbage.
pub struct HostAccess;

pub struct Kept {
    data: TensorData,
    layout: Layout<B>,
    _end: End,
}

/// Notes when memory goes.
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

/// What the fake was called for, with "memory" for each bucket that was given back or dropped.
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

struct FakeNccl;

impl CommunicatorFactory<B> for FakeNccl {
    fn open(&self, meeting: Meeting, mut host: HostEngine) -> Result<Opened<B>> {
        let Meeting { info, options, deadline, liveness, .. } = meeting;
        let symbols = fake::symbols();
        let mine = match info.rank.is_root() {
            true => UniqueId::new(&symbols)?.as_bytes().to_vec(),
            false => Vec::new(),
        };
        let id = UniqueId::from_bytes(&host.exchange(&mine, deadline)?[0])?;
        let communicator = NcclCommunicator::new(HostAccess, &info, Default::default());
        let engine = move || {
            // SAFETY: the fake keeps NCCL's contract.
            let comm = unsafe {
                NcclComm::connect(
                    symbols,
                    &id,
                    info.rank,
                    info.world_size,
                    Box::new(FakeQueue::new()),
                    liveness.clone(),
                    deadline,
                )
            }?;
            Ok(Box::new(NcclEngine::new(comm, host, liveness, options.timeout)) as _)
        };
        Ok(Opened { communicator: Box::new(communicator), engine: Box::new(engine) })
    }
}

/// The group of the environment: over the fake, or over TCP where the argument begins with "host".
pub fn group() -> Result<ProcessGroup<B>> {
    let (info, options, device) = (RankInfo::from_env()?, GroupOptions::from_env()?, Default::default());
    match crate::harness::argument().starts_with("host") {
        true => ProcessGroup::new(info, options, &device),
        false => ProcessGroup::with_factory(info, options, &device, Arc::new(FakeNccl)),
    }
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
