//! Signals between the owner of the control channel and its monitor thread.

use crate::deadline::Deadline;
use crate::error::Result;
use crate::net::poll::Waker;
use crate::watched::Watched;

pub(super) struct Signals {
    flags: Watched<Flags>,
    /// Ends the monitor's wait.
    pub waker: Waker,
}

#[derive(Default)]
struct Flags {
    /// Set by the owner that leaves the group: the latest end of the monitor.
    leave_by: Option<Deadline>,
    /// Set by the monitor when it has sent the cause of the group's end to all peers it could, or has ended.
    cause_sent: bool,
}

impl Signals {
    /// # Errors
    /// `Io` when this process has no file descriptors left.
    pub fn new() -> Result<Self> {
        Ok(Self { flags: Watched::default(), waker: Waker::new()? })
    }

    /// Tells the monitor to leave the group until `deadline`.
    pub fn request_leave(&self, deadline: Deadline) {
        self.flags.lock().leave_by = Some(deadline);
        self.waker.wake();
    }

    /// The latest end of the monitor, if its owner leaves the group.
    pub fn leave_by(&self) -> Option<Deadline> {
        self.flags.lock().leave_by
    }

    /// Tells the owner that the cause of the group's end was sent.
    pub fn set_cause_sent(&self) {
        self.flags.update(|flags| flags.cause_sent = true);
    }

    /// Waits until the cause was sent, at most until `deadline`.
    pub fn wait_for_cause_sent(&self, deadline: Deadline) {
        self.flags.wait_for(deadline, |flags| flags.cause_sent.then_some(()));
    }
}
