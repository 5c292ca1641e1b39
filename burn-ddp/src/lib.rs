//! Data-parallel training for Burn.

#[cfg(feature = "burn")]
pub mod backend;
pub mod deadline;
pub mod dtype;
pub mod error;
pub mod rank;
pub mod store;
pub mod transport;

#[cfg(feature = "burn")]
pub use backend::Ddp;
pub use error::{Error, ErrorKind, Result};
pub use rank::{Rank, RankInfo};
