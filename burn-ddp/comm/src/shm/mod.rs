//! Memory that the ranks of one host share, and the steps in which they use it.
//!
//! The interface is a `SharedRegion`, in which each member has slots of its own and all members take the same steps. In
//! each step a member writes to its slot, publishes it, waits for the others, and reads all slots. A sum can so be
//! taken straight out of what peers have written, and all can read a result that is written once. The collectives
//! decide what the bytes are. (docs/architecture.md says why this is not a [`Transport`](crate::transport::Transport).)
//!
//! ```text
//!            step s                                        step s + 1
//! member 0   write ─▶ publish s ─▶ wait ───────────▶ read all slots, write ─▶ publish s + 1 ─▶ ...
//! member 1   write ───────────────────▶ publish s ─▶ read all slots, write ─▶ publish s + 1 ─▶ ...
//!                                                    └── a StepAccess: all have published s ──┘
//! ```
//!
//! | file | content |
//! |---|---|
//! | `region.rs` | `SharedRegion`: layout, steps, and why no slot is read while it is written |
//! | `step_counter.rs` | one member's counter of published steps, and sleeping until it moves |
//! | `spin.rs` | how long a waiting rank spins before it sleeps |
//! | `mapping.rs` | anonymous memory that several processes map (Linux) |
//! | `connect.rs` | how the members find each other and get the memory (Linux) |
//! | `unsupported.rs` | the stand-in for the last two on other systems |

mod address;
mod region;
mod spin;
mod step_counter;

#[cfg(target_os = "linux")]
mod connect;
#[cfg(target_os = "linux")]
mod mapping;
#[cfg(target_os = "linux")]
use {connect as system, mapping::Mapping};

#[cfg(not(target_os = "linux"))]
#[path = "unsupported.rs"]
mod system;
#[cfg(not(target_os = "linux"))]
use system::Mapping;

pub use spin::ComputeHint;

pub(crate) use address::ShmAddress;
#[cfg(test)]
pub(crate) use region::tests::regions;
pub(crate) use region::{PublishedSlots, RegionLayout, SharedRegion};
pub(crate) use system::{ShmConnection, ShmListener};
