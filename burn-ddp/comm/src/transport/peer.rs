//! What a rank tells its peers about itself before they connect.

use std::fmt;
use std::net::SocketAddr;

use derive_new::new;
use serde::{Deserialize, Serialize};

use crate::rank::Rank;

/// One rank as its peers see it: where to reach it, and which process to name when it fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, new)]
pub struct PeerInfo {
    /// Its position in the group.
    pub rank: Rank,
    /// The host it runs on.
    #[new(into)]
    pub host: String,
    /// Its process on that host.
    pub pid: u32,
    /// Where it accepts connections of its peers.
    pub address: SocketAddr,
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {} on host {})", self.rank, self.pid, self.host)
    }
}
