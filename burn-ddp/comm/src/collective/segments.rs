//! A list of buffers seen as one run of bytes.
//!
//! A bucket is a list of gradients, each in memory of its own. The algorithms count bytes as if the buffers stood one
//! behind the other, and reach the memory itself in pieces, so nothing is copied into a flat buffer. Buffers hold whole
//! elements, so a cut between elements stays one.

use std::ops::Range;

/// Buffers one behind the other; some may be empty.
pub(super) struct Segments<'a, 'b> {
    parts: &'a mut [&'b mut [u8]],
    /// By buffer: the bytes up to its end.
    ends: Vec<usize>,
}

impl<'a, 'b> Segments<'a, 'b> {
    pub(super) fn new(parts: &'a mut [&'b mut [u8]]) -> Self {
        let mut end = 0;
        let ends = parts
            .iter()
            .map(|part| {
                end += part.len();
                end
            })
            .collect();
        Self { parts, ends }
    }

    /// Bytes of all buffers.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The memory of the bytes `range`, in order and without empty pieces.
    pub(super) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        let first = self.first(range.start);
        let parts = self.parts[first..].iter().zip(&self.ends[first..]);
        parts
            .map_while(move |(part, end)| Some(&part[inside(&range, part.len(), *end)?]))
            .filter(|piece| !piece.is_empty())
    }

    /// Like [`pieces`](Self::pieces), for writing.
    pub(super) fn pieces_mut(&mut self, range: Range<usize>) -> impl Iterator<Item = &mut [u8]> {
        let first = self.first(range.start);
        let parts = self.parts[first..].iter_mut().zip(&self.ends[first..]);
        parts
            .map_while(move |(part, end)| {
                let inside = inside(&range, part.len(), *end)?;
                Some(&mut part[inside])
            })
            .filter(|piece| !piece.is_empty())
    }

    /// Copies the bytes `range` to `into`, which is as long.
    pub(super) fn copy_out(&self, range: Range<usize>, into: &mut [u8]) {
        debug_assert_eq!(range.len(), into.len(), "a copy is as long as what is copied");
        let mut rest = into;
        for piece in self.pieces(range) {
            let (here, behind) = rest.split_at_mut(piece.len());
            here.copy_from_slice(piece);
            rest = behind;
        }
    }

    /// Replaces the bytes from `start` on by `from`.
    pub(super) fn copy_in(&mut self, start: usize, from: &[u8]) {
        let mut rest = from;
        for piece in self.pieces_mut(start..start + from.len()) {
            let (here, behind) = rest.split_at(piece.len());
            piece.copy_from_slice(here);
            rest = behind;
        }
    }

    /// The memory of `reads`, for sending, beside that of `write`, for receiving meanwhile. No two of the ranges
    /// overlap, and `reads` are in order.
    pub(super) fn borrow<const N: usize>(
        &mut self,
        reads: [Range<usize>; N],
        write: Range<usize>,
    ) -> (Vec<&[u8]>, Vec<&mut [u8]>) {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let mut ranges: Vec<(Range<usize>, bool)> = reads.into_iter().map(|range| (range, false)).collect();
        ranges.push((write, true));
        ranges.retain(|(range, _)| !range.is_empty());
        ranges.sort_by_key(|(range, _)| range.start);
        let Some((Range { start, .. }, _)) = ranges.first() else { return (sent, received) };
        let first = self.first(*start);
        // Ranges before this one end before the buffer at hand.
        let mut open = 0;
        for (part, end) in self.parts[first..].iter_mut().zip(&self.ends[first..]) {
            let mut at = end - part.len();
            let mut rest: &mut [u8] = part;
            while let Some((range, write)) = ranges.get(open).filter(|(range, _)| range.start < *end) {
                let (from, to) = (range.start.max(at), range.end.min(*end));
                let (here, behind) = rest.split_at_mut(to - at);
                let here = &mut here[from - at..];
                match write {
                    true => received.push(here),
                    false => sent.push(&*here),
                }
                (at, rest) = (to, behind);
                if range.end > *end {
                    break;
                }
                open += 1;
            }
            if open == ranges.len() {
                break;
            }
        }
        (sent, received)
    }

    /// The buffer that has byte `at`.
    fn first(&self, at: usize) -> usize {
        self.ends.partition_point(|end| *end <= at)
    }
}

/// The part of `range` that lies in a buffer of `len` bytes which ends at `end`; `None` behind the range.
fn inside(range: &Range<usize>, len: usize, end: usize) -> Option<Range<usize>> {
    let start = end - len;
    (start < range.end).then(|| range.start.max(start) - start..range.end.min(end) - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: [&[usize]; 5] = [&[], &[0, 0], &[7], &[0, 3, 0, 0, 5, 1, 0], &[1, 1, 1, 1]];

    /// Buffers of these lengths, over which the bytes count from 0.
    fn counting(lengths: &[usize]) -> Vec<Vec<u8>> {
        let mut bytes = 0..;
        lengths.iter().map(|length| bytes.by_ref().take(*length).collect()).collect()
    }

    fn with_segments(lengths: &[usize], run: impl FnOnce(&mut Segments<'_, '_>)) -> Vec<u8> {
        let mut buffers = counting(lengths);
        let mut parts: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        run(&mut Segments::new(&mut parts));
        buffers.concat()
    }

    fn ranges(len: usize) -> impl Iterator<Item = Range<usize>> {
        (0..=len).flat_map(move |start| (start..=len).map(move |end| start..end))
    }

    #[test]
    fn every_range_of_every_list_is_reached() {
        for lengths in LENGTHS {
            let all = counting(lengths).concat();
            for range in ranges(all.len()) {
                let got = with_segments(lengths, |segments| {
                    assert_eq!(segments.len(), all.len());
                    let mut copy = vec![0; range.len()];
                    segments.copy_out(range.clone(), &mut copy);
                    assert_eq!(copy, all[range.clone()]);
                    assert_eq!(segments.pieces(range.clone()).collect::<Vec<_>>().concat(), copy);
                    segments.copy_in(range.start, &vec![99; range.len()]);
                });
                let mut expected = all.clone();
                expected[range].fill(99);
                assert_eq!(got, expected);
            }
        }
    }

    #[test]
    fn pieces_lie_in_one_buffer_each_and_none_is_empty() {
        with_segments(&[0, 3, 0, 0, 5, 1, 0], |segments| {
            let lengths: Vec<usize> = segments.pieces(1..9).map(<[u8]>::len).collect();
            assert_eq!(lengths, [2, 5, 1]);
            assert_eq!(segments.pieces_mut(3..8).map(|piece| piece.len()).collect::<Vec<_>>(), [5]);
            assert_eq!(segments.pieces(4..4).count() + segments.pieces(9..9).count(), 0);
        });
    }

    #[test]
    fn what_is_read_and_what_is_written_are_borrowed_together() {
        let lengths = &[0, 3, 0, 0, 5, 1, 0];
        let all = counting(lengths).concat();
        for first in ranges(9) {
            for second in ranges(9).filter(|range| range.start >= first.end) {
                for (read, write) in [(first.clone(), second.clone()), (second.clone(), first.clone())] {
                    let got = with_segments(lengths, |segments| {
                        let next = second.end..9;
                        let (sent, received) = segments.borrow([read.clone(), next.clone()], write.clone());
                        assert_eq!(sent.concat(), [&all[read], &all[next]].concat());
                        received.into_iter().for_each(|piece| piece.fill(99));
                    });
                    let mut expected = all.clone();
                    expected[write].fill(99);
                    assert_eq!(got, expected);
                }
            }
        }
    }
}
