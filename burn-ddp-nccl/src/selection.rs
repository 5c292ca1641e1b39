//! The choice between NCCL and host memory, which all ranks make alike from the same records.

use burn_ddp::{CommunicatorKind, Error, ErrorKind, Rank, Result};
use serde::{Deserialize, Serialize};

use crate::device::DeviceInfo;
use crate::library::Version;

/// The facts that one rank tells the others before NCCL connects them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) host: String,
    pub(crate) device: DeviceInfo,
    /// The value of `BURN_DDP_COMM`.
    pub(crate) kind: CommunicatorKind,
    /// The NCCL it has, or why it has none.
    pub(crate) nccl: Result<Version, String>,
    /// NCCL's id for the group; only rank 0 has one, if it has NCCL.
    pub(crate) id: Option<Vec<u8>>,
}

/// The communicator of a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// NCCL.
    Nccl,
    /// Host memory, with the reason if the user did not ask for it.
    Host(Option<String>),
}

/// Selects the communicator from the records of all ranks, in rank order. A pure function, so all ranks select the
/// same.
///
/// # Errors
/// [`ErrorKind::Config`] or [`ErrorKind::Mismatch`] naming ranks: two on one device, different values of
/// `BURN_DDP_COMM`, different versions, or an NCCL that is asked for and missing.
pub(crate) fn select(records: &[Record]) -> Result<Selection> {
    let Some(first) = records.first() else { return Ok(Selection::Host(None)) };
    if let Some(rank) = records.iter().position(|record| record.kind != first.kind) {
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "BURN_DDP_COMM differs: rank 0 has {:?}, rank {rank} has {:?}; give all ranks the same",
                first.kind, records[rank].kind
            ),
        ));
    }
    if first.kind == CommunicatorKind::Host {
        return Ok(Selection::Host(None));
    }
    if let Some((one, other)) = first_on_one_device(records) {
        let Record { host, device, .. } = &records[one.0];
        return Err(Error::config(format!(
            "{one} and {other} drive one device ({}, {}, on {host}): start one rank a device, check LOCAL_RANK and \
             CUDA_VISIBLE_DEVICES, or set BURN_DDP_COMM=host to share it",
            device.name,
            device.uuid_text()
        )));
    }
    let missing =
        records.iter().enumerate().find_map(|(rank, record)| Some((Rank(rank), record.nccl.as_ref().err()?)));
    let problem = match (missing, &first.nccl) {
        (Some((rank, reason)), _) => {
            Some(format!("{rank} on {} has no NCCL: {reason}", records[rank.0].host))
        }
        (None, Ok(version)) => records.iter().enumerate().find_map(|(rank, record)| {
            let other = record.nccl.as_ref().ok()?;
            (!other.works_with(*version)).then(|| {
                format!(
                    "NCCL is {version} on rank 0 and {other} on rank {rank}: install one version everywhere"
                )
            })
        }),
        (None, Err(_)) => None,
    };
    match (problem, first.kind) {
        (None, _) => Ok(Selection::Nccl),
        (Some(problem), CommunicatorKind::Nccl) => {
            Err(Error::config(format!("BURN_DDP_COMM=nccl: {problem}")))
        }
        (Some(problem), _) => Ok(Selection::Host(Some(problem))),
    }
}

/// The first two ranks of one host that drive one device.
fn first_on_one_device(records: &[Record]) -> Option<(Rank, Rank)> {
    let same = |a: &Record, b: &Record| a.host == b.host && a.device.uuid == b.device.uuid;
    (1..records.len()).find_map(|other| {
        let one = (0..other).find(|one| same(&records[*one], &records[other]))?;
        Some((Rank(one), Rank(other)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(host: &str, device: u8) -> Record {
        Record {
            host: host.into(),
            device: DeviceInfo { ordinal: 0, name: "H200".into(), uuid: [device; 16] },
            kind: CommunicatorKind::Auto,
            nccl: Ok(Version { major: 2, minor: 27, patch: 5 }),
            id: None,
        }
    }

    fn text(records: &[Record]) -> String {
        select(records).unwrap_err().to_string()
    }

    #[test]
    fn two_ranks_on_one_device_are_named() {
        let text = text(&[record("h", 0), record("h", 1), record("h", 0)]);
        for word in ["rank 0 and rank 2", "H200", "GPU-00000000", "BURN_DDP_COMM=host"] {
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(select(&[record("h1", 0), record("h2", 0)]).unwrap(), Selection::Nccl);
        let mut shared = [record("h", 0), record("h", 0)];
        shared.iter_mut().for_each(|record| record.kind = CommunicatorKind::Host);
        assert_eq!(select(&shared).unwrap(), Selection::Host(None));
    }

    #[test]
    fn a_rank_without_nccl_takes_all_to_the_host_or_is_an_error() {
        let mut records = [record("a", 0), record("b", 1)];
        records[1].nccl = Err("libnccl.so.2 not found".into());
        let Selection::Host(Some(reason)) = select(&records).unwrap() else { panic!("no NCCL on rank 1") };
        assert!(reason.contains("rank 1 on b has no NCCL: libnccl.so.2 not found"), "{reason}");
        records.iter_mut().for_each(|record| record.kind = CommunicatorKind::Nccl);
        assert!(text(&records).starts_with("BURN_DDP_COMM=nccl: rank 1 on b has no NCCL"));
        records[0].kind = CommunicatorKind::Auto;
        assert!(text(&records).contains("rank 0 has Auto, rank 1 has Nccl"));
    }

    #[test]
    fn versions_must_be_of_one_release() {
        let mut records = [record("a", 0), record("b", 1)];
        records[1].nccl = Ok(Version { major: 2, minor: 27, patch: 7 });
        assert_eq!(select(&records).unwrap(), Selection::Nccl);
        records[1].nccl = Ok(Version { major: 2, minor: 26, patch: 2 });
        assert!(
            matches!(select(&records).unwrap(), Selection::Host(Some(reason)) if reason.contains("2.26.2 on rank 1"))
        );
    }
}
