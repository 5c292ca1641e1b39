//! How one process of a group is found.

use std::net::SocketAddr;

use derive_new::new;
use serde::{Deserialize, Serialize};

use crate::rank::Rank;

/// What a rank publishes of itself so that the others can connect to it and name it in messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, new)]
pub struct PeerInfo {
    /// Position in the group.
    pub rank: Rank,
    /// Name of its host.
    pub host: String,
    /// Process id on that host.
    pub pid: u32,
    /// Where it listens.
    pub address: SocketAddr,
}
