//! The address of a rank's listener for shared memory. Ranks of different systems may be in one group, so all systems
//! have the type.

use serde::{Deserialize, Serialize};

/// Length of a nonce in bytes.
pub(super) const NONCE: usize = 16;

/// The abstract Unix socket on which a rank listens, and the nonce that members of its group send there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShmAddress {
    pub(super) name: String,
    pub(super) nonce: [u8; NONCE],
}
