//! Memory for the data that other ranks send.

use bytemuck::{Pod, Zeroable};

/// Memory that is kept between operations, because the first touch of a page costs more than using it. It
/// grows to the largest operation and never shrinks.
#[derive(Default)]
pub(super) struct Scratch {
    lines: Vec<CacheLine>,
}

/// One cache line; its alignment makes every piece usable as any element type.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CacheLine([u8; 64]);

impl Scratch {
    /// `count` slices of `bytes` bytes, each aligned to 64; their content is left over from earlier use.
    pub(super) fn pieces(&mut self, count: usize, bytes: usize) -> Vec<&mut [u8]> {
        let lines = bytes.div_ceil(size_of::<CacheLine>()).max(1);
        let needed = count * lines;
        if self.lines.len() < needed {
            self.lines.resize(needed, CacheLine::zeroed());
        }
        self.lines
            .chunks_exact_mut(lines)
            .take(count)
            .map(|piece| &mut bytemuck::cast_slice_mut(piece)[..bytes])
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_and_kept() {
        let mut scratch = Scratch::default();
        for (count, bytes) in [(3, 100), (2, 0), (0, 7), (4, 64)] {
            let pieces = scratch.pieces(count, bytes);
            assert_eq!(pieces.len(), count);
            for piece in pieces {
                assert_eq!((piece.len(), piece.as_ptr().align_offset(64)), (bytes, 0));
            }
        }
        assert_eq!(scratch.lines.len(), 6);
    }
}
