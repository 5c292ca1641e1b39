//! Recursive halving and doubling: `all_reduce` with a number of turns that grows with the logarithm of the world.
//!
//! In step `s` ranks whose numbers differ in bit `s` alone face each other with the same range of elements. Each keeps one
//! half of it, sends what it has for the other half, and combines what comes. Neighbours go first: after step `s` a rank
//! has the partial result of the node of 2^(s+1) ranks around it, so the order is the tree's and only the place where it
//! is computed is another. Partial results travel unrounded, in the type that elements are combined in; the first step
//! sends the elements themselves. Then the steps are gone back, each rank giving what it has completed.
//!
//! Not every pair of ranks exchanges headers here, but every rank needs every other's data, by way of ranks that compare
//! headers in each step: nobody can come to an end while one rank is in another operation. Whoever faces that rank, or
//! finds a frame of it while it waits for another, gets both operations told and fails; who waits for a rank that has failed learns it through the group's
//! [`Liveness`](crate::transport::Liveness), as after every error.

use std::ops::Range;

use super::all_reduce::reduce_pieces;
use super::chunk::chunk;
use super::exchange::Exchange;
use super::scratch::Scratch;
use super::segments::Segments;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::rank::Rank;
use crate::reduction::{combine_siblings, complete, partial_size, reduce_node};

impl Exchange<'_> {
    /// Reduces the elements `block` of `data` in a world that is a power of two and at least two.
    pub(super) fn halve_and_double(
        &mut self,
        scratch: &mut Scratch,
        op: ReduceOp,
        dtype: DType,
        data: &mut Segments<'_, '_>,
        block: Range<usize>,
    ) -> Result<()> {
        let (rank, world, wide) = (self.rank().0, self.world_size(), partial_size(dtype));
        let steps = world.ilog2();
        let bytes = |range: &Range<usize>| range.start * dtype.size()..range.end * dtype.size();
        let first = halves(&block, rank, 0).0;
        let mut memory = scratch.pieces(2, first.len() * wide).into_iter();
        let (Some(partial), Some(received)) = (memory.next(), memory.next()) else { return Ok(()) };
        // What this rank keeps before each step.
        let mut kept = vec![block];
        for step in 0..steps {
            let (keep, give) = halves(&kept[step as usize], rank, step);
            let peer = Rank(rank ^ 1 << step);
            let in_partial =
                |range: &Range<usize>| (range.start - first.start) * wide..(range.end - first.start) * wide;
            if step == 0 {
                let received = &mut received[..keep.len() * dtype.size()];
                let body: Vec<&[u8]> = data.pieces(bytes(&give)).collect();
                self.swap(0, (peer, peer), &body, &mut [&mut *received])?;
                if steps == 1 {
                    reduce_pieces(op, dtype, Rank(rank), &[received], data.pieces_mut(bytes(&keep)))?;
                } else {
                    fold_pair(op, dtype, rank, data.pieces(bytes(&keep)), received, partial)?;
                }
            } else {
                let received = &mut received[..keep.len() * wide];
                self.swap(step as u8, (peer, peer), &[&partial[in_partial(&give)]], &mut [&mut *received])?;
                let own_first = rank >> step & 1 == 0;
                let own = &mut partial[in_partial(&keep)];
                if step + 1 < steps {
                    combine_siblings(op, dtype, own, received, own_first)?;
                } else {
                    let siblings = if own_first { [&*own, &*received] } else { [&*received, &*own] };
                    complete_pair(op, dtype, world, siblings, data.pieces_mut(bytes(&keep)))?;
                }
            }
            kept.push(keep);
        }
        for step in (0..steps).rev() {
            let (own, theirs) = halves(&kept[step as usize], rank, step);
            let peer = Rank(rank ^ 1 << step);
            let (body, mut into) = data.borrow([bytes(&own)], bytes(&theirs));
            self.swap((2 * steps - 1 - step) as u8, (peer, peer), &body, &mut into)?;
        }
        Ok(())
    }
}

/// What `rank` keeps of `range` in step `step`, and what its peer does.
fn halves(range: &Range<usize>, rank: usize, step: u32) -> (Range<usize>, Range<usize>) {
    let half = |index| {
        let half = chunk(range.len(), 2, index);
        range.start + half.start..range.start + half.end
    };
    let bit = rank >> step & 1;
    (half(bit), half(1 - bit))
}

/// The first step: `own` elements and the neighbour's, into `partial`.
fn fold_pair<'d>(
    op: ReduceOp,
    dtype: DType,
    rank: usize,
    own: impl Iterator<Item = &'d [u8]>,
    neighbours: &[u8],
    partial: &mut [u8],
) -> Result<()> {
    let node = rank & !1..(rank & !1) + 2;
    let (mut neighbours, mut partial) = (neighbours, partial);
    for own in own {
        let (theirs, rest) = neighbours.split_at(own.len());
        neighbours = rest;
        let (out, rest) = partial.split_at_mut(own.len() / dtype.size() * partial_size(dtype));
        partial = rest;
        let leaf = |leaf: usize| if leaf == rank { own } else { theirs };
        reduce_node(op, dtype, node.clone(), &leaf, out)?;
    }
    Ok(())
}

/// The last step: both halves of the tree, rounded into `data`.
fn complete_pair<'d>(
    op: ReduceOp,
    dtype: DType,
    world: usize,
    siblings: [&[u8]; 2],
    data: impl Iterator<Item = &'d mut [u8]>,
) -> Result<()> {
    let nodes = [0..world / 2, world / 2..world];
    let mut start = 0;
    for data in data {
        let end = start + data.len() / dtype.size() * partial_size(dtype);
        let partials = [0, 1].map(|side| (nodes[side].clone(), &siblings[side][start..end]));
        complete(op, dtype, world, &partials, data)?;
        start = end;
    }
    Ok(())
}
