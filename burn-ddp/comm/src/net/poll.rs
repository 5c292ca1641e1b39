//! Waiting for sockets, and the descriptor with which another thread ends such a wait.
//!
//! A thread that waits for a peer must also notice that the group has failed or that its owner wants it to stop, and a
//! wait for sockets only ends for file descriptors. So the other thread makes the descriptor of a [`Waker`] readable,
//! which stands in each wait beside the sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Longest single wait, so that any duration can be given; callers check their deadline afterwards.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Waits until one of `fds` is ready or `limit` is over. A signal ends the wait early with nothing ready.
///
/// # Errors
/// `Io` when the system call fails.
pub(crate) fn wait(fds: &mut [PollFd<'_>], limit: Duration) -> Result<()> {
    let limit = limit.min(LONGEST);
    let limit = Timespec { tv_sec: limit.as_secs() as _, tv_nsec: limit.subsec_nanos() as _ };
    match poll(fds, Some(&limit)) {
        Ok(_) => Ok(()),
        Err(Errno::INTR) => {
            fds.iter_mut().for_each(PollFd::clear_revents);
            Ok(())
        }
        Err(error) => Err(Error::io("cannot wait for sockets", error)),
    }
}

/// A descriptor that becomes readable with [`wake`](Waker::wake), and stays so until [`clear`](Waker::clear).
pub(crate) struct Waker {
    read: OwnedFd,
    /// The other end where one descriptor cannot do both.
    write: Option<OwnedFd>,
}

impl Waker {
    /// A descriptor that is not readable yet.
    ///
    /// # Errors
    /// `Io` when this process has no file descriptors left.
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
    pub(crate) fn wake(&self) {
        // Fails only when the descriptor is full, and then it is readable. An event descriptor takes eight bytes at a
        // time, and a pipe takes any number.
        let _ = rustix::io::write(self.write.as_ref().unwrap_or(&self.read), &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable again.
    pub(crate) fn clear(&self) {
        let mut bytes = [0u8; 64];
        while rustix::io::read(&self.read, &mut bytes).is_ok_and(|count| count == bytes.len()) {}
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::PollFlags;

    fn readable(waker: &Waker) -> bool {
        let mut fds = [PollFd::new(waker, PollFlags::IN)];
        wait(&mut fds, Duration::ZERO).unwrap();
        !fds[0].revents().is_empty()
    }

    #[test]
    fn a_waker_is_readable_until_cleared() {
        let waker = Waker::new().unwrap();
        assert!(!readable(&waker));
        for _ in 0..20 {
            waker.wake();
        }
        assert!(readable(&waker) && readable(&waker));
        waker.clear();
        assert!(!readable(&waker));
    }

    #[test]
    fn the_longest_duration_is_a_wait_too() {
        let waker = Waker::new().unwrap();
        waker.wake();
        wait(&mut [PollFd::new(&waker, PollFlags::IN)], Duration::MAX).unwrap();
    }
}
