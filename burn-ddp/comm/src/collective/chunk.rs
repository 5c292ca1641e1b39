//! Division of data: into one chunk for each rank, and into blocks that go through one after the other.

use std::ops::Range;

use crate::rank::Rank;

/// Bytes that are reduced at a time, by all ranks together. Memory for what other ranks send grows with it. The time in
/// which ranks are not in step should be small beside the time that a block takes on the wire, which is 30 ms at 1
/// Gbit/s and 3 ms at 10.
const BLOCK_BYTES: usize = 4 << 20;

/// The range of the `index`-th of `parts` chunks: nearly equal, contiguous ranges of `count` elements.
///
/// The first `count % parts` chunks are one element longer, so every element has an owner for any count. With fewer
/// elements than chunks the last chunks are empty.
///
/// ```
/// # use burn_ddp_comm::collective::chunk;
/// assert_eq!([chunk(5, 3, 0), chunk(5, 3, 1), chunk(5, 3, 2)], [0..2, 2..4, 4..5]);
/// ```
///
/// # Panics
/// When `parts` is 0: no rank, no owner.
pub fn chunk(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (short, longer) = (count / parts, count % parts);
    let start = index * short + index.min(longer);
    start..start + short + usize::from(index < longer)
}

/// The bytes of `rank`'s chunk in a buffer of `bytes` bytes.
pub(super) fn byte_chunk(bytes: usize, element_size: usize, world_size: usize, rank: Rank) -> Range<usize> {
    let elements = chunk(bytes / element_size, world_size, rank.0);
    elements.start * element_size..elements.end * element_size
}

/// Number of blocks in which `bytes` bytes are reduced; at least one, so that ranks meet over no data too.
pub(super) fn block_count(bytes: usize) -> usize {
    bytes.div_ceil(BLOCK_BYTES).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_tile_every_count_and_differ_by_at_most_one() {
        for parts in 1..=9 {
            for count in 0..=40 {
                let chunks: Vec<_> = (0..parts).map(|index| chunk(count, parts, index)).collect();
                assert_eq!((chunks[0].start, chunks[parts - 1].end), (0, count));
                for pair in chunks.windows(2) {
                    assert_eq!(pair[0].end, pair[1].start);
                    assert!(pair[0].len() == pair[1].len() || pair[0].len() == pair[1].len() + 1);
                }
                assert!(chunks[0].len() - chunks[parts - 1].len() <= 1);
            }
        }
    }

    #[test]
    fn fewer_elements_than_parts() {
        let chunks: Vec<_> = (0..4).map(|index| chunk(2, 4, index)).collect();
        assert_eq!(chunks, [0..1, 1..2, 2..2, 2..2]);
    }
}
