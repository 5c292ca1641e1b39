//! Processes that communicate, without Burn.

pub mod collective;
pub mod control;
pub mod deadline;
pub mod dtype;
pub mod error;
pub mod join;
pub mod options;
pub mod rank;
pub mod reduction;
pub mod rendezvous;
pub mod shm;
pub mod store;
pub mod topology;
pub mod transport;

pub use dtype::{DType, ReduceOp};
pub use error::{Error, ErrorKind, Result};
pub use options::{CommunicatorKind, GroupOptions, TransportKind};
pub use rank::{Rank, RankInfo};
