//! Peak of this process's memory.

use burn_ddp::{Error, Result};

/// The peak of this process's resident memory in bytes, shared pages included (VmHWM).
///
/// # Errors
/// `Io` without `/proc`, that is, on systems other than Linux.
pub fn peak() -> Result<usize> {
    let path = "/proc/self/status";
    let status =
        std::fs::read_to_string(path).map_err(|error| Error::io(format!("cannot read {path}"), error))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| Error::config(format!("{path} has no VmHWM in kB")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touched_buffer_counts() {
        let buffer = vec![1_u8; 64 << 20];
        assert!(peak().unwrap() >= buffer.iter().map(|byte| usize::from(*byte)).sum());
    }
}
