//! The one way in which this crate waits for sockets, and the bell that ends such a wait.
//!
//! A thread that waits for a peer must also hear that the group has been given up, and it can only wait for
//! file descriptors. So the news comes as one: [`Wake`] is a descriptor that another thread makes readable.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Longest single wait; callers look at their deadline again afterwards. Keeps any duration representable.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Waits until one of `fds` is ready or `limit` is over. A signal ends the wait early with nothing ready.
pub(crate) fn wait(fds: &mut [PollFd<'_>], limit: Duration) -> Result<()> {
    let limit = limit.min(LONGEST);
    let limit = Timespec { tv_sec: limit.as_secs() as _, tv_nsec: limit.subsec_nanos() as _ };
    match poll(fds, Some(&limit)) {
        Ok(_) => Ok(()),
        Err(Errno::INTR) => {
            fds.iter_mut().for_each(PollFd::clear_revents);
            Ok(())
        }
        Err(error) => Err(Error::io("cannot wait for the connections of the group", error)),
    }
}

/// A descriptor that becomes readable when somebody calls [`raise`](Wake::raise), and stays so until
/// [`clear`](Wake::clear).
pub(crate) struct Wake {
    read: OwnedFd,
    /// The other end where one descriptor cannot do both.
    write: Option<OwnedFd>,
}

impl Wake {
    /// A bell that has not rung.
    pub(crate) fn new() -> Result<Self> {
        Self::open().map_err(|error| Error::io("cannot open a descriptor to end waits with", error))
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn open() -> rustix::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let read = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { read, write: None })
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn open() -> rustix::io::Result<Self> {
        use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
        let (read, write) = rustix::pipe::pipe()?;
        for end in [&read, &write] {
            fcntl_setfd(end, FdFlags::CLOEXEC)?;
            ioctl_fionbio(end, true)?;
        }
        Ok(Self { read, write: Some(write) })
    }

    /// Makes the descriptor readable.
    pub(crate) fn raise(&self) {
        // The only failure is a bell that is full because it has already rung. Eight bytes is what an event
        // descriptor takes, and a pipe does not mind.
        let _ = rustix::io::write(self.write.as_ref().unwrap_or(&self.read), &1u64.to_ne_bytes());
    }

    /// Makes the descriptor silent again.
    pub(crate) fn clear(&self) {
        let mut rung = [0u8; 64];
        while rustix::io::read(&self.read, &mut rung).is_ok_and(|count| count == rung.len()) {}
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::PollFlags;

    fn rung(wake: &Wake) -> bool {
        let mut fds = [PollFd::new(wake, PollFlags::IN)];
        wait(&mut fds, Duration::ZERO).unwrap();
        !fds[0].revents().is_empty()
    }

    #[test]
    fn rings_until_cleared() {
        let wake = Wake::new().unwrap();
        assert!(!rung(&wake));
        for _ in 0..20 {
            wake.raise();
        }
        assert!(rung(&wake) && rung(&wake));
        wake.clear();
        assert!(!rung(&wake));
    }

    #[test]
    fn the_longest_duration_is_a_wait_too() {
        let wake = Wake::new().unwrap();
        wake.raise();
        wait(&mut [PollFd::new(&wake, PollFlags::IN)], Duration::MAX).unwrap();
    }
}
