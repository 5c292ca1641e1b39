//! Who a process says it is when it meets the others.

use derive_new::new;
use serde::{Deserialize, Serialize};

use crate::rank::{Rank, RankInfo};

/// The identity a process claims. Two processes with one rank is the mistake behind most hangs at start-up, and
/// only host and pid tell the user which two they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, new)]
pub struct Claim {
    /// The rank it takes.
    pub rank: Rank,
    /// The number of processes it believes in.
    pub world_size: usize,
    /// The run it belongs to.
    #[new(into)]
    pub run_id: String,
    /// How often its launcher has restarted the ranks.
    pub restart_count: usize,
    /// The host it runs on.
    #[new(into)]
    pub host: String,
    /// Its process on that host.
    pub pid: u32,
}

impl Claim {
    /// The claim of this process, which was told to be `info`.
    pub fn of(info: &RankInfo) -> Self {
        // A host without a readable name is still told apart by its pids; it is no reason not to train.
        let host =
            hostname::get().map_or_else(|_| "unknown".into(), |name| name.to_string_lossy().into_owned());
        let pid = std::process::id();
        Self::new(info.rank, info.world_size, info.run_id.as_str(), info.restart_count, host, pid)
    }

    /// Whether both are of one process.
    pub(super) fn same_process(&self, other: &Claim) -> bool {
        (self.pid, &self.host) == (other.pid, &other.host)
    }

    /// Whether both are of one process in one rank.
    pub(super) fn is_of(&self, other: &Claim) -> bool {
        self.rank == other.rank && self.same_process(other)
    }

    /// The process for messages: `pid 12 on host a`.
    pub(super) fn process(&self) -> String {
        format!("pid {} on host {}", self.pid, self.host)
    }
}
