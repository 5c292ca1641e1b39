//! The functions that a training program calls: for the GPU of a rank, and for the process group whose tensors NCCL
//! reduces.
#![allow(unsafe_code)]

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn_ddp::{CommunicatorKind, Error, GroupOptions, ProcessGroup, RankInfo, Result};

use crate::cuda_stream::CudaStream;
use crate::device::{DeviceInfo, devices, make_context, ordinal_of};
use crate::device_buffer::DeviceAccess;
use crate::factory::NcclFactory;
use crate::library::Library;
use crate::stream::Stream;

/// A backend whose tensors NCCL can reach, and [`Ddp`](burn_ddp::Ddp) of it.
pub trait NcclBackend: Backend {
    /// The access to the memory of its tensors.
    type Access: DeviceAccess<Self> + Clone + Default;

    /// The number of `device`, as CUDA counts after `CUDA_VISIBLE_DEVICES`; `None` for one that is no GPU.
    fn ordinal(device: &Self::Device) -> Option<usize>;

    /// The GPU of this number.
    fn device(ordinal: usize) -> Self::Device;

    /// One sentence for each thing that the backend needs on the machine, besides driver and device, and does not find.
    fn missing() -> Vec<String> {
        Vec::new()
    }
}

/// The GPU that this process drives: number `LOCAL_RANK` of the visible ones, or the only one.
///
/// # Errors
///
/// [`ErrorKind::Config`](burn_ddp::ErrorKind::Config) without driver or device, without what the backend compiles its
/// kernels with, and with fewer devices than ranks on this host.
pub fn local_device<B: NcclBackend>() -> Result<B::Device> {
    let (info, kind) = (RankInfo::from_env()?, GroupOptions::from_env()?.communicator);
    let (devices, _) = find_devices_and_nccl(kind)?;
    let missing = B::missing();
    if !missing.is_empty() {
        return Err(Error::config(missing.join("; ")));
    }
    ordinal_of(info.local_rank, info.local_world_size, devices.len(), kind).map(B::device)
}

/// The group that the process environment describes, like [`ProcessGroup::from_env`], with tensors on `device` reduced
/// by NCCL. `BURN_DDP_COMM` chooses: `auto` (NCCL if all ranks have it, else through host memory, with a warning),
/// `nccl`, `host`.
///
/// # Errors
///
/// Those of [`ProcessGroup::from_env`]; without driver, without the device, with two ranks on one device, and with
/// `BURN_DDP_COMM=nccl` where a rank has no NCCL: [`ErrorKind::Config`](burn_ddp::ErrorKind::Config), naming ranks and
/// what was looked for; what NCCL reports when ranks connect: [`ErrorKind::Device`](burn_ddp::ErrorKind::Device).
pub fn process_group<B: NcclBackend>(device: &B::Device) -> Result<ProcessGroup<B>> {
    process_group_with(RankInfo::from_env()?, GroupOptions::from_env()?, device)
}

/// The group that `info` describes; see [`process_group`].
///
/// # Errors
///
/// Those of [`process_group`], except errors of the environment.
pub fn process_group_with<B: NcclBackend>(
    info: RankInfo,
    options: GroupOptions,
    device: &B::Device,
) -> Result<ProcessGroup<B>> {
    let ordinal = B::ordinal(device).ok_or_else(|| {
        Error::config(format!(
            "{device:?} is no GPU: use burn_ddp_nccl::local_device, or ProcessGroup::from_env"
        ))
    })?;
    let (mut devices, library) = find_devices_and_nccl(options.communicator)?;
    if ordinal >= devices.len() {
        return Err(Error::config(format!(
            "cuda:{ordinal} is not there: {} device(s) are visible; check CUDA_VISIBLE_DEVICES",
            devices.len()
        )));
    }
    if let (Err(error), CommunicatorKind::Nccl, 1) = (&library, options.communicator, info.world_size) {
        return Err(error.context("BURN_DDP_COMM=nccl"));
    }
    let driven = devices.swap_remove(ordinal);
    make_context(ordinal)?;
    tracing::info!("{} drives {} (cuda:{ordinal}, {})", info.rank, driven.name, driven.uuid_text());
    if let Ok(library) = &library {
        tracing::info!("{} has NCCL {} ({})", info.rank, library.version(), library.path().display());
    }
    let nccl = library.map(|library| (library.symbols(), library.version()));
    let stream = Arc::new(move || Ok(Box::new(CudaStream::new(ordinal)?) as Box<dyn Stream>));
    // SAFETY: the symbols are those of a library that was checked, the access is that of the backend, and the stream is
    // of the device whose tensors it reaches.
    let factory =
        unsafe { NcclFactory::new(B::Access::default(), options.communicator, driven, nccl, stream) };
    ProcessGroup::with_factory(info, options, device, Arc::new(factory))
}

/// The devices and, unless `kind` is `Host`, NCCL. With `kind` `Nccl` one error names all that is missing. A rank that
/// lacks NCCL alone is no error here: it connects to the others and tells them.
fn find_devices_and_nccl(kind: CommunicatorKind) -> Result<(Vec<DeviceInfo>, Result<Library>)> {
    let library = match kind {
        CommunicatorKind::Host => Err(Error::config("BURN_DDP_COMM=host")),
        CommunicatorKind::Auto | CommunicatorKind::Nccl => Library::load(),
    };
    match (devices(), &library) {
        (Err(device), Err(nccl)) if kind == CommunicatorKind::Nccl => {
            Err(Error::config(format!("BURN_DDP_COMM=nccl: {device}; {nccl}")))
        }
        (Err(error), _) => Err(error),
        (Ok(devices), _) => Ok((devices, library)),
    }
}
