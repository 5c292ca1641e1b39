//! Makes the launcher reap the processes that ranks leave behind (Linux).
//!
//! When a rank ends, its children become orphans, whose parent is then the first process of the system or container.
//! Many containers' first processes reap orphans late or never, and an orphan that is not reaped still counts as a
//! member of its process group. As their "subreaper", the launcher becomes their parent instead.

#[cfg(target_os = "linux")]
use rustix::process;

/// Makes the launcher the parent of orphans while it lives, and restores the former setting when dropped.
pub(crate) struct Subreaper {
    #[cfg(target_os = "linux")]
    before: bool,
}

impl Subreaper {
    #[cfg(target_os = "linux")]
    pub fn enable() -> Self {
        let before = process::child_subreaper().is_ok_and(|set| set.is_some());
        // If this fails, ending orphans takes longer and works nevertheless.
        let _ = process::set_child_subreaper(Some(process::getpid()));
        Self { before }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn enable() -> Self {
        Self {}
    }
}

#[cfg(target_os = "linux")]
impl Drop for Subreaper {
    fn drop(&mut self) {
        if !self.before {
            let _ = process::set_child_subreaper(None);
        }
    }
}
