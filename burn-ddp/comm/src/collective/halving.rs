//! Recursive halving and doubling: `all_reduce` with a number of rounds that grows with the logarithm of the world.
//!
//! ```text
//! 4 ranks, elements a b c d           rank 0     rank 1     rank 2     rank 3
//! halve, step 0: 0 ◀─▶ 1, 2 ◀─▶ 3     a b        c d        a b        c d       each of 2 ranks
//! halve, step 1: 0 ◀─▶ 2, 1 ◀─▶ 3     a          c          b          d         each of 4 ranks
//! double, step 1                      a b        c d        a b        c d
//! double, step 0                      a b c d    a b c d    a b c d    a b c d
//! ```
//!
//! In step `s` ranks whose numbers differ in bit `s` alone face each other with the same range of elements. Each keeps
//! one half of it, sends what it has for the other half, and combines what comes. Neighbours go first: after step `s` a
//! rank has the partial result of the node of 2^(s+1) ranks around it, so the order is the tree's, computed in other
//! places. Partial results travel unrounded, in the type that elements are combined in; the first step sends the
//! elements themselves. Then the steps run backwards, and each rank sends what it has completed.
//!
//! Not every pair of ranks exchanges headers here, but every rank needs every other's data, by way of ranks that
//! compare headers in each step: no rank can come to an end while one rank is in another operation. A rank that faces
//! that one, or finds a frame of it while it waits for another, fails with an error that names both operations. A rank
//! that waits for a rank that has failed learns it through the group's [`Liveness`](crate::transport::Liveness), as
//! after every error.

use std::ops::Range;

use super::chunk::chunk;
use super::scratch::Scratch;
use super::segments::Segments;
use super::wire::reduce_pieces;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::rank::Rank;
use crate::reduction::{combine_siblings, complete, partial_size, reduce_node};
use crate::transport::exchange::Exchange;

/// Reduces the elements `block` of `data` in a world that is a power of two and at least two.
pub(super) fn halve_and_double(
    exchange: &mut Exchange<'_>,
    scratch: &mut Scratch,
    op: ReduceOp,
    dtype: DType,
    data: &mut Segments<'_, '_>,
    block: Range<usize>,
) -> Result<()> {
    let (rank, world, wide) = (exchange.rank().0, exchange.world_size(), partial_size(dtype));
    let steps = world.ilog2();
    let bytes = |range: &Range<usize>| range.start * dtype.size()..range.end * dtype.size();
    let first = halves(&block, rank, 0).0;
    let mut memory = scratch.pieces(2, first.len() * wide).into_iter();
    let (Some(partial), Some(received)) = (memory.next(), memory.next()) else { return Ok(()) };
    // The elements that this rank keeps before each step.
    let mut kept = vec![block];
    for step in 0..steps {
        let (keep, give) = halves(&kept[step as usize], rank, step);
        let peer = Rank(rank ^ 1 << step);
        let in_partial =
            |range: &Range<usize>| (range.start - first.start) * wide..(range.end - first.start) * wide;
        if step == 0 {
            let received = &mut received[..keep.len() * dtype.size()];
            let body: Vec<&[u8]> = data.pieces(bytes(&give)).collect();
            exchange.swap(0, (peer, peer), &body, &mut [&mut *received])?;
            if steps == 1 {
                reduce_pieces(op, dtype, Rank(rank), &[received], data.pieces_mut(bytes(&keep)))?;
            } else {
                fold_pair(op, dtype, rank, data.pieces(bytes(&keep)), received, partial)?;
            }
        } else {
            let received = &mut received[..keep.len() * wide];
            exchange.swap(step as u8, (peer, peer), &[&partial[in_partial(&give)]], &mut [&mut *received])?;
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
        exchange.swap((2 * steps - 1 - step) as u8, (peer, peer), &body, &mut into)?;
    }
    Ok(())
}

/// The half of `range` that `rank` keeps in step `step`, and the half that its peer keeps.
fn halves(range: &Range<usize>, rank: usize, step: u32) -> (Range<usize>, Range<usize>) {
    let half = |index| {
        let half = chunk(range.len(), 2, index);
        range.start + half.start..range.start + half.end
    };
    let bit = rank >> step & 1;
    (half(bit), half(1 - bit))
}

/// The first step: combines `own` elements with the neighbour's into `partial`.
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

/// The last step: combines both halves of the tree and rounds into `data`.
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
