//! Processes that communicate, without Burn.

pub mod collective;
pub mod control;
pub mod deadline;
pub mod dtype;
pub mod environment;
pub mod error;
pub mod group;
pub mod net;
pub mod operation;
pub mod options;
pub mod rank;
pub mod rendezvous;
pub mod store;
pub mod transport;
mod watched;

pub use dtype::{DType, ReduceOp};
pub use environment::RankInfo;
pub use error::{Error, ErrorKind, Result};
pub use operation::Operation;
pub use options::{CommunicatorKind, GroupOptions, TransportKind};
pub use rank::Rank;
