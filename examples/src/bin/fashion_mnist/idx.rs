//! The file format of the MNIST family: a big-endian header (a magic number, then one size a dimension), then bytes;
//! here compressed by gzip.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use burn_ddp::{Error, Result};
use flate2::read::GzDecoder;

/// Bytes of a file with `D` dimensions, the first of which counts items; the others must be `item`.
pub(crate) fn read<const D: usize>(path: &Path, item: &[u32]) -> Result<(usize, Vec<u8>)> {
    let wrong = |what: String| Error::config(format!("{}: {what}", path.display()));
    let file = File::open(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let mut decoder = GzDecoder::new(file);

    let mut header = vec![0; 4 + 4 * D];
    decoder.read_exact(&mut header).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => wrong(format!("ends within its header, which has {} bytes", 4 + 4 * D)),
        ErrorKind::InvalidInput | ErrorKind::InvalidData => wrong(format!("expected a gzip file: {error}")),
        _ => wrong(format!("cannot be read: {error}")),
    })?;
    let words: Vec<u32> =
        header.chunks_exact(4).map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]])).collect();
    // 8: unsigned bytes.
    let magic = 0x800 + D as u32;
    if words[0] != magic {
        return Err(wrong(format!(
            "expected the magic number {magic:#010x} of bytes in {D} dimension(s), found {:#010x}",
            words[0]
        )));
    }
    if words[2..] != *item {
        return Err(wrong(format!("expected items of {item:?}, found {:?}", &words[2..])));
    }

    let expected = words[1..].iter().map(|size| u64::from(*size)).product::<u64>();
    let mut bytes = Vec::new();
    // One byte more, to see a file that goes on.
    let read = decoder.take(expected.saturating_add(1)).read_to_end(&mut bytes);
    let found = bytes.len() as u64;
    match read {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            Err(wrong(format!("is cut off: expected {expected} bytes of data, found {found}")))
        }
        Err(error) => Err(wrong(format!("is damaged after {found} of {expected} bytes: {error}"))),
        Ok(_) if found > expected => {
            Err(wrong(format!("expected {expected} bytes of data, found more than that")))
        }
        Ok(_) if found < expected => Err(wrong(format!("expected {expected} bytes of data, found {found}"))),
        Ok(_) => Ok((words[1] as usize, bytes)),
    }
}
