//! The extension point for NCCL and MPI: an engine moves memory between ranks.
//!
//! An engine is made by a [`MakeEngine`], called and dropped on the group's communication thread, so it need not be
//! `Send`. [`HostEngine`](super::HostEngine) is the engine over this package's own collectives. The caller's thread
//! uses it during start-up. Then it moves to the communication thread, either as the group's engine or inside another
//! engine, which passes it the operations on memory of the host.

use super::memory::Staged;
use crate::deadline::Deadline;
use crate::environment::RankInfo;
use crate::error::Result;
use crate::operation::Operation;
use crate::options::GroupOptions;
use crate::transport::Liveness;

/// Moves staged memory between ranks. The communication thread calls it in the order of the program's collectives. It
/// must not call a tensor library.
pub trait Engine {
    /// Runs `operation` on `staged` and returns the result's memory.
    ///
    /// # Errors
    /// Any error ends the group: ranks are out of step afterwards.
    fn run(&mut self, operation: Operation, staged: Staged) -> Result<Staged>;

    /// Releases what peers may block on. It is called once, after the group has failed, so that peers do not wait until
    /// this rank's program drops the group.
    fn abandon(&mut self) {}
}

/// Makes an engine, on the thread that is to own it.
pub type MakeEngine = Box<dyn FnOnce() -> Result<Box<dyn Engine>> + Send>;

/// Description of a group whose ranks are connected and have no engine yet, for the function that makes the engine.
pub struct Setup {
    /// Name of the group, unique in a run.
    pub name: String,
    /// This rank, in this group.
    pub info: RankInfo,
    /// Limits of the group.
    pub options: GroupOptions,
    /// Moment by which all ranks must have finished their start-up.
    pub deadline: Deadline,
    /// State of the peers, and the cause for which the group has ended, if it has. Every wait of an engine must watch
    /// it.
    pub liveness: Liveness,
}
