//! Processes that communicate: rendezvous, transports, shared memory and collectives over bytes, without Burn.
//!
//! This package is to burn-ddp what Gloo is to PyTorch. A program that trains without Burn can use it through
//! [`group::Group`]:
//!
//! ```no_run
//! use burn_ddp_comm::{ReduceOp, group::Group};
//!
//! # fn main() -> burn_ddp_comm::Result<()> {
//! let group = Group::from_env()?; // torchrun's variables, as burnrun sets them
//! let gradient = vec![group.rank().0 as f32; 1000];
//! let mean = group.all_reduce(gradient, ReduceOp::Mean).wait()?;
//! println!("{} of {}: {}", group.rank(), group.world_size(), mean[0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! Each module uses only those above it:
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`rank`], [`error`], [`dtype`], [`deadline`], [`environment`], [`options`], [`operation`] | base types |
//! | [`net`] | sockets, encoding of small messages, facts about this host |
//! | [`store`], [`rendezvous`] | ranks find each other |
//! | [`transport`] | frames between two ranks: TCP, loopback; what is known of peers ([`transport::Liveness`]) |
//! | [`control`] | heartbeats, aborts and goodbyes, on connections of their own |
//! | [`shm`] | memory that the ranks of one host share |
//! | [`topology`] | which ranks share a host |
//! | [`reduction`] | arithmetic: element types, SIMD loops, and the one order of summation |
//! | [`collective`] | algorithms over transport and shared memory, and the choice between them |
//! | [`group`] | the communication thread, the order of operations, [`group::Work`], the extension point for engines |
//!
//! Nothing waits for ever: each wait has a [`deadline`], and a dead, stopped or disagreeing rank is an [`Error`] that
//! names it. There is no global state but a counter that tells the store clients of one process apart. Ranks block;
//! there is no async runtime.

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
pub mod reduction;
pub mod rendezvous;
pub mod shm;
pub mod store;
pub mod topology;
pub mod transport;
mod watched;

pub use dtype::{DType, ReduceOp};
pub use environment::RankInfo;
pub use error::{Error, ErrorKind, Result};
pub use operation::Operation;
pub use options::{CommunicatorKind, GroupOptions, TransportKind};
pub use rank::Rank;
