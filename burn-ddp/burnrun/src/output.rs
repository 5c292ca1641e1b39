//! The ranks' output: read in pieces, shown in whole lines, remembered in part.
//!
//! Each stream of each rank has a thread that blocks on its pipe. When the console blocks, these threads block,
//! then the pipes fill, then the ranks wait, and nothing is lost; the supervisor itself never writes to the
//! console and so stays able to act.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;
use rustix::io::Errno;

use burn_ddp_comm::{Error, Result};

/// A longer line is split: a rank that never ends its line must not eat the launcher's memory.
const LONGEST_LINE: usize = 1 << 20;
/// Lines remembered of each rank, and how much of each.
const TAIL_LINES: usize = 20;
const TAIL_BYTES: usize = 4096;

/// Which of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Err,
}

/// The launcher's own standard output and error, written in whole lines.
///
/// A lock each, so that one that nobody reads does not hold up the other. Where both are the same file, one more
/// lock around both: a long write to a pipe is not atomic.
pub(super) struct Console {
    sinks: [Mutex<Option<OwnedFd>>; 2],
    together: Option<Mutex<()>>,
    writing: AtomicUsize,
    written: AtomicU64,
    closed: AtomicBool,
}

impl Console {
    /// The console of this process.
    pub fn standard() -> Result<Self> {
        let copy =
            |fd: std::io::Result<OwnedFd>| fd.map_err(|error| Error::io("cannot use the console", error));
        let out = std::os::fd::AsFd::as_fd(&std::io::stdout()).try_clone_to_owned();
        let err = std::os::fd::AsFd::as_fd(&std::io::stderr()).try_clone_to_owned();
        Ok(Self::new(copy(out)?, copy(err)?))
    }

    fn new(out: OwnedFd, err: OwnedFd) -> Self {
        Self {
            together: same_file(&out, &err).then(Mutex::default),
            sinks: [Mutex::new(Some(out)), Mutex::new(Some(err))],
            writing: AtomicUsize::new(0),
            written: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Writes whole lines. A reader that went away (`burnrun .. | head`) does not end a training run: its stream
    /// is dropped from then on, and the other one says so.
    pub fn write(&self, stream: Stream, lines: &[u8]) {
        self.writing.fetch_add(1, Ordering::SeqCst);
        let together = self.together.as_ref().map(lock);
        if !self.put(stream, lines) && stream == Stream::Out {
            self.put(Stream::Err, b"burnrun: standard output is closed; the ranks go on unseen\n");
        }
        drop(together);
        self.written.fetch_add(lines.len() as u64, Ordering::SeqCst);
        self.writing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether the stream was fine so far, or broken before.
    fn put(&self, stream: Stream, lines: &[u8]) -> bool {
        let mut sink = lock(&self.sinks[stream as usize]);
        if self.closed.load(Ordering::SeqCst) {
            return true;
        }
        let fine = sink.as_ref().is_none_or(|fd| write_whole(fd, lines).is_ok());
        if !fine {
            *sink = None;
        }
        fine
    }

    /// Whether somebody writes, or waits to write, at this moment.
    pub fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) > 0
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// Drops whatever is written from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

/// Whether both lead to the same place; false if that cannot be told.
fn same_file(a: &OwnedFd, b: &OwnedFd) -> bool {
    match (fstat(a), fstat(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

fn write_whole(fd: &OwnedFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Whoever shares the terminal with us may have made it non-blocking.
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(fd, PollFlags::OUT)], None).or_else(ignore_interruption)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn ignore_interruption(error: Errno) -> rustix::io::Result<usize> {
    if error == Errno::INTR { Ok(0) } else { Err(error) }
}

/// The last lines of a rank, of both streams, kept whether or not they were shown.
#[derive(Default)]
pub(super) struct Tail(Mutex<VecDeque<(Stream, Vec<u8>)>>);

impl Tail {
    fn push(&self, stream: Stream, line: &[u8]) {
        let mut lines = lock(&self.0);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        let mut kept = line[..line.len().min(TAIL_BYTES)].to_vec();
        if kept.len() < line.len() {
            kept.extend_from_slice(" [..]".as_bytes());
        }
        lines.push_back((stream, kept));
    }

    /// The lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        lock(&self.0).iter().map(|(_, line)| String::from_utf8_lossy(line).into_owned()).collect()
    }

    /// The one line that says most about a failure: the last that is not blank, of standard error if it has one.
    pub fn last(&self) -> Option<String> {
        let lines = lock(&self.0);
        let mut said = lines.iter().rev().filter(|(_, line)| !line.trim_ascii().is_empty());
        let line = said.clone().find(|(stream, _)| *stream == Stream::Err).or_else(|| said.next());
        line.map(|(_, line)| String::from_utf8_lossy(line.trim_ascii_end()).into_owned())
    }
}

/// Where one stream of one rank goes.
pub(super) struct Route {
    pub stream: Stream,
    pub prefix: String,
    pub console: Option<Arc<Console>>,
    pub file: Option<File>,
    pub tail: Arc<Tail>,
}

impl Route {
    /// Copies `from` until it ends.
    pub fn copy(mut self, mut from: impl Read) {
        let mut chunk = vec![0; 1 << 16];
        let mut partial = Vec::new();
        loop {
            match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(length) => {
                    self.keep(&chunk[..length]);
                    self.show(&mut partial, &chunk[..length]);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if !partial.is_empty() {
            self.show(&mut partial, b"\n");
        }
    }

    /// Files get the bytes as they come, unprefixed and at once.
    fn keep(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.file
            && let Err(error) = file.write_all(bytes)
        {
            self.file = None;
            if let Some(console) = &self.console {
                let line = format!("burnrun: {}cannot write the log file: {error}\n", self.prefix);
                console.write(Stream::Err, line.as_bytes());
            }
        }
    }

    /// Shows the lines that `bytes` complete, and keeps the rest in `partial`.
    fn show(&self, partial: &mut Vec<u8>, bytes: &[u8]) {
        let mut shown = Vec::with_capacity(bytes.len() + partial.len() + 64);
        let mut line = |text: &[u8]| {
            self.tail.push(self.stream, text);
            shown.extend_from_slice(self.prefix.as_bytes());
            shown.extend_from_slice(text);
            shown.push(b'\n');
        };
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            match piece.strip_suffix(b"\n") {
                Some(end) if partial.is_empty() => line(end),
                Some(end) => {
                    partial.extend_from_slice(end);
                    line(partial);
                    partial.clear();
                }
                None => partial.extend_from_slice(piece),
            }
        }
        if partial.len() >= LONGEST_LINE {
            line(partial);
            partial.clear();
        }
        if let Some(console) = &self.console
            && !shown.is_empty()
        {
            console.write(self.stream, &shown);
        }
    }
}

/// A panic of one thread must not silence the others: the data behind these locks is valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Seek;

    /// Hands out its bytes in pieces of the given length.
    struct Pieces<'a>(&'a [u8], usize);

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let length = self.1.min(self.0.len()).min(into.len());
            into[..length].copy_from_slice(&self.0[..length]);
            self.0 = &self.0[length..];
            Ok(length)
        }
    }

    fn copied(input: &[u8], piece: usize) -> (Vec<u8>, Vec<String>) {
        let mut file = tempfile::tempfile().unwrap();
        let fd = || OwnedFd::from(file.try_clone().unwrap());
        let tail = Arc::new(Tail::default());
        let route = Route {
            stream: Stream::Out,
            prefix: "[rank 1] ".into(),
            console: Some(Arc::new(Console::new(fd(), fd()))),
            file: None,
            tail: tail.clone(),
        };
        route.copy(Pieces(input, piece));
        let mut shown = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut shown).unwrap();
        (shown, tail.lines())
    }

    #[test]
    fn lines_stay_whole_however_they_arrive() {
        for piece in [1, 2, 3, 7, 1000] {
            let (shown, tail) = copied(b"one\n\ntwo \xff three\r\nlast", piece);
            assert_eq!(shown, b"[rank 1] one\n[rank 1] \n[rank 1] two \xff three\r\n[rank 1] last\n");
            assert_eq!(tail, ["one", "", "two \u{fffd} three\r", "last"]);
        }
        assert!(copied(b"", 9).0.is_empty());
    }

    #[test]
    fn a_line_without_end_is_split() {
        let input = vec![b'x'; 3 * LONGEST_LINE / 2];
        let (shown, tail) = copied(&input, 1 << 16);
        let lengths: Vec<usize> = shown.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [9 + LONGEST_LINE, 9 + LONGEST_LINE / 2, 0]);
        assert!(tail[0].len() < 2 * TAIL_BYTES);
    }

    #[test]
    fn the_tail_is_the_end() {
        let input: String = (0..50).map(|line| format!("{line}\n")).collect();
        let (_, tail) = copied(input.as_bytes(), 64);
        assert_eq!(tail.len(), TAIL_LINES);
        assert_eq!((tail[0].as_str(), tail[19].as_str()), ("30", "49"));
    }

    #[test]
    fn the_last_line_is_one_that_says_something() {
        let tail = Tail::default();
        assert_eq!(tail.last(), None);
        tail.push(Stream::Out, b"step 1");
        tail.push(Stream::Out, b"  ");
        assert_eq!(tail.last().as_deref(), Some("step 1"));
        tail.push(Stream::Err, b"peer lost\r");
        tail.push(Stream::Err, b"");
        tail.push(Stream::Out, b"step 2");
        assert_eq!(tail.last().as_deref(), Some("peer lost"));
    }

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
    fn one_place_for_both_streams_is_found_out() {
        let both = tempfile::tempfile().unwrap();
        let fd = |file: &File| OwnedFd::from(file.try_clone().unwrap());
        assert!(Console::new(fd(&both), fd(&both)).together.is_some());
        assert!(Console::new(fd(&both), fd(&tempfile::tempfile().unwrap())).together.is_none());
    }

    #[test]
    fn a_closed_console_is_survived_and_said_on_the_other() {
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
