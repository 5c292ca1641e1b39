//! The launcher's own standard output and standard error, written in whole lines.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_ddp_comm::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;
use rustix::io::Errno;

use crate::options::Stream;

/// Standard output and standard error of the launcher.
///
/// Each stream has a lock of its own, so that a stream without a reader does not block the other. If both are the same
/// file, a third lock serializes them, because a long write to a pipe is not atomic.
pub(crate) struct Console {
    /// `None` after a failed write.
    streams: [Mutex<Option<OwnedFd>>; 2],
    same_file: Option<Mutex<()>>,
    /// Number of threads that write or wait to write.
    writing: AtomicUsize,
    written: AtomicU64,
    closed: AtomicBool,
}

impl Console {
    /// Opens the standard streams of this process.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](burn_ddp_comm::ErrorKind::Io) if their descriptors cannot be duplicated.
    pub fn of_this_process() -> Result<Self> {
        let failed = |error| Error::io("cannot use the console", error);
        let out = std::io::stdout().as_fd().try_clone_to_owned().map_err(failed)?;
        let err = std::io::stderr().as_fd().try_clone_to_owned().map_err(failed)?;
        Ok(Self::new(out, err))
    }

    pub(super) fn new(out: OwnedFd, err: OwnedFd) -> Self {
        Self {
            same_file: is_same_file(&out, &err).then(Mutex::default),
            streams: [Mutex::new(Some(out)), Mutex::new(Some(err))],
            writing: AtomicUsize::new(0),
            written: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Writes whole lines. A closed stream (`burnrun .. | head`) does not end a training: its output is dropped from
    /// then on, and standard error tells so if it is standard output that was closed.
    pub fn write(&self, stream: Stream, lines: &[u8]) {
        self.writing.fetch_add(1, Ordering::SeqCst);
        let same_file = self.same_file.as_ref().map(lock);
        if !self.write_to(stream, lines) && stream == Stream::Out {
            self.write_to(Stream::Err, b"burnrun: standard output is closed; the ranks go on unseen\n");
        }
        drop(same_file);
        self.written.fetch_add(lines.len() as u64, Ordering::SeqCst);
        self.writing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns false if the stream broke in this very call.
    fn write_to(&self, stream: Stream, lines: &[u8]) -> bool {
        let mut target = lock(&self.streams[stream as usize]);
        if self.closed.load(Ordering::SeqCst) {
            return true;
        }
        let written = target.as_ref().is_none_or(|fd| write_all(fd, lines).is_ok());
        if !written {
            *target = None;
        }
        written
    }

    /// Returns true if a thread writes, or waits to write, at this moment.
    pub fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) > 0
    }

    /// Number of bytes written so far.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// Drops all output from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

/// Returns true if both lead to the same file, pipe or terminal, and false if that cannot be determined.
fn is_same_file(a: &OwnedFd, b: &OwnedFd) -> bool {
    match (fstat(a), fstat(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

fn write_all(fd: &OwnedFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Another process on the same terminal may have made it non-blocking.
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(fd, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            },
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Locks `mutex` even if a thread panicked while it held the lock: the data behind the locks of this module and of the
/// copiers is valid at every moment, and a panic of one thread must not silence the others.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::sync::Arc;

    #[test]
    fn a_stuck_stream_does_not_hold_up_the_other() {
        let out = std::io::pipe().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let console = Arc::new(Console::new(out.1.into(), file.try_clone().unwrap().into()));
        let stuck = console.clone();
        let writer = std::thread::spawn(move || stuck.write(Stream::Out, &vec![b'x'; 1 << 22]));
        // Once there is something to read, the writer is in the middle of its write and holds its lock.
        poll(&mut [PollFd::new(&out.0, PollFlags::IN)], None).unwrap();
        console.write(Stream::Err, b"heard\n");
        assert!(console.is_writing());
        let mut shown = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "heard\n");
        drop(out.0);
        writer.join().unwrap();
    }

    #[test]
    fn one_file_for_both_streams_is_detected() {
        let both = tempfile::tempfile().unwrap();
        let fd = |file: &File| OwnedFd::from(file.try_clone().unwrap());
        assert!(Console::new(fd(&both), fd(&both)).same_file.is_some());
        assert!(Console::new(fd(&both), fd(&tempfile::tempfile().unwrap())).same_file.is_none());
    }

    #[test]
    fn a_closed_stream_is_reported_on_the_other() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut file = tempfile::tempfile().unwrap();
        let console = Console::new(writer.into(), file.try_clone().unwrap().into());
        console.write(Stream::Out, b"a\n");
        console.write(Stream::Out, b"b\n");
        console.write(Stream::Err, b"c\n");
        let mut shown = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "burnrun: standard output is closed; the ranks go on unseen\nc\n");
        assert!(!console.is_writing());
    }
}
