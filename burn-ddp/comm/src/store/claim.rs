//! The identity that a process claims towards the store.

use derive_new::new;
use serde::{Deserialize, Serialize};

use crate::environment::RankInfo;
use crate::net::host::host_name;
use crate::rank::Rank;

/// The identity that a process claims. Two processes with one rank are the mistake behind most hangs at start-up, and
/// host and pid tell the user which two they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, new)]
pub(super) struct Claim {
    /// Its rank.
    pub(super) rank: Rank,
    /// The number of processes of its run.
    pub(super) world_size: usize,
    /// The run it belongs to.
    #[new(into)]
    pub(super) run_id: String,
    /// Number of times that its launcher has restarted the ranks.
    pub(super) restart_count: usize,
    /// Name of its host.
    #[new(into)]
    pub(super) host: String,
    /// Its process id on that host.
    pub(super) pid: u32,
}

impl Claim {
    /// The claim of this process, which `info` describes.
    pub(super) fn of(info: &RankInfo) -> Self {
        let (rank, world_size, run_id) = (info.rank, info.world_size, info.run_id.as_str());
        Self::new(rank, world_size, run_id, info.restart_count, host_name(), std::process::id())
    }

    /// True if both claims come from one process.
    pub(super) fn same_process(&self, other: &Claim) -> bool {
        (self.pid, &self.host) == (other.pid, &other.host)
    }

    /// True if both claims come from one process with one rank.
    pub(super) fn same_member(&self, other: &Claim) -> bool {
        self.rank == other.rank && self.same_process(other)
    }

    /// The process in messages: `pid 12 on host a`.
    pub(super) fn process(&self) -> String {
        format!("pid {} on host {}", self.pid, self.host)
    }
}
