//! Data-parallel training for Burn.

pub mod bucket;
pub mod collective;
pub mod control;
#[cfg(feature = "burn")]
pub mod backend;
pub mod deadline;
pub mod dtype;
pub mod error;
pub mod options;
#[cfg(feature = "launcher")]
pub mod launch;
pub mod rank;
pub mod rendezvous;
pub mod store;
pub mod transport;

#[cfg(feature = "burn")]
pub mod communicator;
#[cfg(feature = "burn")]
mod norm;
#[cfg(feature = "burn")]
mod parameters;
#[cfg(feature = "burn")]
pub mod process_group;
#[cfg(feature = "burn")]
mod reducer;
#[cfg(feature = "burn")]
pub mod replica;

pub use dtype::{DType, ReduceOp};
pub use backend::Ddp;
pub use error::{Error, ErrorKind, Result};
pub use options::GroupOptions;
pub use rank::{Rank, RankInfo};

#[cfg(feature = "burn")]
pub use process_group::{ProcessGroup, Work};
#[cfg(feature = "burn")]
pub use reducer::GradientReduction;
#[cfg(feature = "burn")]
pub use replica::{MicroStep, Reduced, Replica, ReplicaOptions};
