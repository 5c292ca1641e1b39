//! Copies one output stream of one rank, and remembers its last lines.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use super::console::{Console, lock};
use crate::options::Stream;

/// Longer lines are split, so that a rank that never ends its line cannot exhaust the launcher's memory.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Number of lines that [`LastLines`] keeps.
const KEPT_LINES: usize = 20;
/// Number of bytes that [`LastLines`] keeps of each line.
const KEPT_BYTES: usize = 4096;

/// The last lines of a rank, of both streams. Lines that the console does not show are kept too.
#[derive(Default)]
pub(crate) struct LastLines(Mutex<VecDeque<(Stream, Vec<u8>)>>);

impl LastLines {
    fn push(&self, stream: Stream, line: &[u8]) {
        let mut lines = lock(&self.0);
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        let mut kept = line[..line.len().min(KEPT_BYTES)].to_vec();
        if kept.len() < line.len() {
            kept.extend_from_slice(" [..]".as_bytes());
        }
        lines.push_back((stream, kept));
    }

    /// Returns the lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        lock(&self.0).iter().map(|(_, line)| String::from_utf8_lossy(line).into_owned()).collect()
    }

    /// Returns the line that is most likely to explain a failure: the last non-blank line of standard error, or of
    /// standard output if standard error has none.
    pub fn most_telling(&self) -> Option<String> {
        let lines = lock(&self.0);
        let mut candidates = lines.iter().rev().filter(|(_, line)| !line.trim_ascii().is_empty());
        let line =
            candidates.clone().find(|(stream, _)| *stream == Stream::Err).or_else(|| candidates.next());
        line.map(|(_, line)| String::from_utf8_lossy(line.trim_ascii_end()).into_owned())
    }
}

/// Copies one stream of one rank to its destinations.
pub(crate) struct Copier {
    pub stream: Stream,
    /// Text in front of each line on the console.
    pub prefix: String,
    /// `None` if the console does not show this stream.
    pub console: Option<Arc<Console>>,
    /// `None` if the stream does not go to a file.
    pub file: Option<File>,
    pub last_lines: Arc<LastLines>,
}

impl Copier {
    /// Copies from `pipe` until it ends.
    pub fn run(mut self, mut pipe: impl Read) {
        let mut chunk = vec![0; 1 << 16];
        let mut partial = Vec::new();
        loop {
            match pipe.read(&mut chunk) {
                Ok(0) => break,
                Ok(length) => {
                    self.write_to_file(&chunk[..length]);
                    self.write_lines(&mut partial, &chunk[..length]);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if !partial.is_empty() {
            self.write_lines(&mut partial, b"\n");
        }
    }

    /// Writes `bytes` to the file as they are, without prefixes. After a failed write the file gets no more.
    fn write_to_file(&mut self, bytes: &[u8]) {
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

    /// Writes the lines that `bytes` complete to the console, and leaves the rest in `partial`.
    fn write_lines(&self, partial: &mut Vec<u8>, bytes: &[u8]) {
        let mut shown = Vec::with_capacity(bytes.len() + partial.len() + 64);
        let mut line = |text: &[u8]| {
            self.last_lines.push(self.stream, text);
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
        if partial.len() >= MAX_LINE_BYTES {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Seek;
    use std::os::fd::OwnedFd;

    /// A reader that returns its bytes in pieces of the given length.
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
        let last_lines = Arc::new(LastLines::default());
        let copier = Copier {
            stream: Stream::Out,
            prefix: "[rank 1] ".into(),
            console: Some(Arc::new(Console::new(fd(), fd()))),
            file: None,
            last_lines: last_lines.clone(),
        };
        copier.run(Pieces(input, piece));
        let mut shown = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut shown).unwrap();
        (shown, last_lines.lines())
    }

    #[test]
    fn lines_stay_whole_however_they_arrive() {
        for piece in [1, 2, 3, 7, 1000] {
            let (shown, last_lines) = copied(b"one\n\ntwo \xff three\r\nlast", piece);
            assert_eq!(shown, b"[rank 1] one\n[rank 1] \n[rank 1] two \xff three\r\n[rank 1] last\n");
            assert_eq!(last_lines, ["one", "", "two \u{fffd} three\r", "last"]);
        }
        assert!(copied(b"", 9).0.is_empty());
    }

    #[test]
    fn a_line_without_end_is_split() {
        let input = vec![b'x'; 3 * MAX_LINE_BYTES / 2];
        let (shown, last_lines) = copied(&input, 1 << 16);
        let lengths: Vec<usize> = shown.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [9 + MAX_LINE_BYTES, 9 + MAX_LINE_BYTES / 2, 0]);
        assert!(last_lines[0].len() < 2 * KEPT_BYTES);
    }

    #[test]
    fn the_last_lines_are_kept() {
        let input: String = (0..50).map(|line| format!("{line}\n")).collect();
        let (_, last_lines) = copied(input.as_bytes(), 64);
        assert_eq!(last_lines.len(), KEPT_LINES);
        assert_eq!((last_lines[0].as_str(), last_lines[19].as_str()), ("30", "49"));
    }

    #[test]
    fn the_most_telling_line_is_not_blank_and_of_standard_error() {
        let last_lines = LastLines::default();
        assert_eq!(last_lines.most_telling(), None);
        last_lines.push(Stream::Out, b"step 1");
        last_lines.push(Stream::Out, b"  ");
        assert_eq!(last_lines.most_telling().as_deref(), Some("step 1"));
        last_lines.push(Stream::Err, b"peer lost\r");
        last_lines.push(Stream::Err, b"");
        last_lines.push(Stream::Out, b"step 2");
        assert_eq!(last_lines.most_telling().as_deref(), Some("peer lost"));
    }
}
