//! Data-parallel training for Burn.

pub mod deadline;
pub mod dtype;
pub mod error;
#[cfg(feature = "launcher")]
pub mod launch;
pub mod rank;
pub mod store;
pub mod transport;

pub use error::{Error, ErrorKind, Result};
pub use rank::{Rank, RankInfo};
