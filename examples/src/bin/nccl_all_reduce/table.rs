//! The table: sizes, and a row for each.

use std::fmt;
use std::time::Duration;

/// Bytes of an element, which is always f32.
pub(crate) const ELEMENT: usize = size_of::<f32>();

/// A number of bytes as nccl-tests takes it: `8`, `64K`, `128M`, `1G`, powers of 1024.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let bytes = digits.parse().ok().and_then(|number: usize| number.checked_mul(1 << shift));
    bytes
        .filter(|bytes| *bytes > 0 && bytes.is_multiple_of(ELEMENT))
        .ok_or_else(|| format!("give a multiple of {ELEMENT} bytes, like 8, 64K, 128M or 1G"))
}

/// From `least` to `most` bytes, each twice the one before.
pub(crate) fn sizes(least: usize, most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(least), |bytes| bytes.checked_mul(2)).take_while(move |bytes| *bytes <= most)
}

/// The measurement of one size: times of one all-reduce on the slowest rank.
pub(crate) struct Row {
    pub(crate) bytes: usize,
    pub(crate) world_size: usize,
    /// NCCL alone.
    pub(crate) nccl: Duration,
    /// `ProcessGroup::all_reduce`.
    pub(crate) group: Duration,
}

/// The line above all [`Row`]s.
pub(crate) fn head() -> String {
    format!(
        "{:>12} {:>12} {:>11} {:>11} {:>14}",
        "bytes", "nccl us", "algbw GB/s", "busbw GB/s", "all_reduce us"
    )
}

impl Row {
    /// Bytes that were reduced in a second, in units of 10^9.
    fn algorithm_bandwidth(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.nccl.as_secs_f64()
    }

    /// Bandwidth of each link, comparable for all numbers of ranks: an all-reduce moves each byte 2(n-1)/n times
    /// (`doc/PERFORMANCE.md` of nccl-tests).
    fn bus_bandwidth(&self) -> f64 {
        let ranks = self.world_size as f64;
        self.algorithm_bandwidth() * 2.0 * (ranks - 1.0) / ranks
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        write!(
            f,
            "{:>12} {:>12.2} {:>11.2} {:>11.2} {:>14.2}",
            self.bytes,
            micros(self.nccl),
            self.algorithm_bandwidth(),
            self.bus_bandwidth(),
            micros(self.group)
        )
    }
}
