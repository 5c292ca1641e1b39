//! The devices that the CUDA driver shows, and which of them a rank drives.
//!
//! Both Burn's CUDA backend and cudarc panic when there is no driver, and NCCL reports two ranks on one device as
//! "invalid usage" on the rank that notices, or not at all. So the driver is asked first, here, and ranks compare their
//! devices before NCCL connects them.
#![allow(unsafe_code)]

use burn_ddp::{CommunicatorKind, Error, Result};
use cudarc::driver::{DriverError, result, sys};
use serde::{Deserialize, Serialize};

use crate::driver::failure;

/// A CUDA device of this process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Its number among the devices that `CUDA_VISIBLE_DEVICES` shows to this process.
    pub ordinal: usize,
    /// Its name, as the driver has it.
    pub name: String,
    /// The same in every process that sees the device, whatever its number is there.
    pub uuid: [u8; 16],
}

impl DeviceInfo {
    /// The UUID as `nvidia-smi -L` writes it.
    pub(crate) fn uuid_text(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let parts = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex(&self.uuid[range]));
        format!("GPU-{}", parts.join("-"))
    }
}

/// The devices that the driver shows to this process, in its order.
///
/// # Errors
/// `Config` when there is no driver or no device, `Device` when the driver fails.
pub(crate) fn devices() -> Result<Vec<DeviceInfo>> {
    // SAFETY: only tries to load the library, whose initializers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::config(
            "no CUDA driver: libcuda.so.1 cannot be loaded; install NVIDIA's driver (in a container: run it with the \
             GPU passed in), or train on a CPU backend",
        ));
    }
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(none_visible()),
        other => other.map_err(|error| failure("cuInit", error))?,
    }
    let count = result::device::get_count().map_err(|error| failure("cuDeviceGetCount", error))?;
    let devices = (0..count).map(|ordinal| {
        let device = result::device::get(ordinal)?;
        let uuid = result::device::get_uuid(device)?.bytes.map(|byte| byte as u8);
        Ok(DeviceInfo { ordinal: ordinal as usize, name: result::device::get_name(device)?, uuid })
    });
    let devices: Result<Vec<_>, DriverError> = devices.collect();
    match devices {
        Ok(devices) if devices.is_empty() => Err(none_visible()),
        devices => devices.map_err(|error| failure("cuDeviceGet", error)),
    }
}

/// Retains the primary context of the device `ordinal`, which Burn's tensors will use, until the process ends. A device
/// that is full, or exclusive to another process, refuses it; Burn would panic then.
pub(crate) fn make_context(ordinal: usize) -> Result<()> {
    let made = result::device::get(ordinal as i32).and_then(|device| {
        // SAFETY: the device is the driver's.
        unsafe { result::primary_ctx::retain(device) }
    });
    made.map(drop).map_err(|error| {
        let what = format!("cuda:{ordinal} cannot be used (nvidia-smi shows by whom it is)");
        failure("cuDevicePrimaryCtxRetain", error).context(what)
    })
}

fn none_visible() -> Error {
    let mask = std::env::var("CUDA_VISIBLE_DEVICES");
    let mask = mask.map_or("not set".into(), |mask| format!("'{mask}'"));
    Error::config(format!(
        "the CUDA driver shows no device (CUDA_VISIBLE_DEVICES is {mask}); nvidia-smi -L lists them"
    ))
}

/// The ordinal of the device that `local_rank` of `local_world_size` ranks on this host drives: `local_rank`, or 0 if
/// only one is `visible`, its own. With `kind` `Host` ranks may share devices.
///
/// # Errors
/// `Config` when there are fewer devices than ranks.
pub(crate) fn ordinal_of(
    local_rank: usize,
    local_world_size: usize,
    visible: usize,
    kind: CommunicatorKind,
) -> Result<usize> {
    if visible == 1 || kind == CommunicatorKind::Host {
        // Ranks find out whether they share a device when they compare records.
        return Ok(local_rank % visible.max(1));
    }
    let ranks = local_world_size.max(local_rank + 1);
    if ranks > visible {
        return Err(Error::config(format!(
            "{ranks} ranks on this host are more than its {visible} visible devices ({ranks} > {visible}): start \
             fewer, widen CUDA_VISIBLE_DEVICES, or set BURN_DDP_COMM=host to share them"
        )));
    }
    Ok(local_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_drives_the_device_of_its_number_or_the_only_one() {
        let ordinal_of = |rank, size, visible| ordinal_of(rank, size, visible, CommunicatorKind::Auto);
        assert_eq!(ordinal_of(2, 4, 4).unwrap(), 2);
        assert_eq!(ordinal_of(1, 2, 8).unwrap(), 1);
        assert_eq!(ordinal_of(3, 4, 1).unwrap(), 0);
        assert_eq!(super::ordinal_of(3, 4, 2, CommunicatorKind::Host).unwrap(), 1);
        for (local_rank, size) in [(0, 3), (2, 3), (2, 2)] {
            let error = ordinal_of(local_rank, size, 2).unwrap_err();
            assert_eq!(error.exit_code(), 2);
        }
        let text = ordinal_of(0, 3, 2).unwrap_err().to_string();
        assert!(text.contains("3 > 2") && text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    }

    #[test]
    fn a_uuid_reads_as_in_nvidia_smi() {
        let uuid = std::array::from_fn(|i| i as u8);
        let device = DeviceInfo { ordinal: 0, name: "x".into(), uuid };
        assert_eq!(device.uuid_text(), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn devices_are_listed_or_missed_by_name() {
        match devices() {
            Ok(devices) => assert!(devices.iter().enumerate().all(|(i, device)| device.ordinal == i)),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libcuda.so.1") || text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
            }
        }
    }
}
