//! The seam that NCCL and MPI plug into: what moves memory between ranks.
//!
//! An engine runs on the group's communication thread and nowhere else: it is made there, called in the order of the
//! program's collectives, and dropped there, so it need not be `Send`. It makes no call of a tensor library.
//! [`HostEngine`](super::HostEngine) is the engine over this package's own collectives; another engine keeps one for
//! memory of the host.

use super::memory::Staged;
use crate::deadline::Deadline;
use crate::environment::RankInfo;
use crate::error::Result;
use crate::operation::Operation;
use crate::options::GroupOptions;
use crate::transport::Liveness;

/// Moves staged memory between ranks. See the [module documentation](self).
pub trait Engine {
    /// Runs `operation` on `staged` and returns the result's memory.
    ///
    /// # Errors
    /// Any error ends the group: ranks are out of step afterwards.
    fn run(&mut self, operation: Operation, staged: Staged) -> Result<Staged>;

    /// Releases what peers may block on. It is called once after the group has failed; nothing more will be run, though
    /// this rank's program may be busy elsewhere and drop the group much later.
    fn abandon(&mut self) {}
}

/// Makes an engine, on the thread that is to own it.
pub type MakeEngine = Box<dyn FnOnce() -> Result<Box<dyn Engine>> + Send>;

/// A group whose ranks are connected and have no engine yet: what an engine's maker may know.
pub struct Setup {
    /// Name of the group, unique in a run.
    pub name: String,
    /// This rank, in this group.
    pub info: RankInfo,
    /// Limits of the group.
    pub options: GroupOptions,
    /// Moment by which all ranks must have finished their start-up.
    pub deadline: Deadline,
    /// Cause for which the group has ended, if it has: every wait of an engine must watch it.
    pub liveness: Liveness,
}
