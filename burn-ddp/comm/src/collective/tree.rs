//! The order in which ranks are combined.
//!
//! Floating-point addition is not associative, so the order is part of the result. It is fixed here, once, and
//! every algorithm calls it: a binary tree over the ranks, split in the middle with the larger part on the
//! left, for each element by itself. Hence the bits depend on neither the algorithm, nor where a buffer was
//! cut, nor which rank's data came first. The tree also adds numbers of like size and, for a world that is a
//! power of two, is the tree of the smaller world with every leaf split.

use std::ops::Range;

use bytemuck::{Pod, PodCastError};

use super::element::{Element, with_element};
use super::fold::{blocks, finish, fold, room, sum_four, sum_two};
/// The same tree in parts.
pub(super) use super::partial::{Node, combine_siblings, complete, nodes_within, partial_size, reduce_node};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

/// Where the tree splits `len` leaves: so many go left.
pub(super) fn left_part(len: usize) -> usize {
    len.div_ceil(2)
}

/// Combines `values` in the tree of the reductions; `None` if there are none.
///
/// For numbers that every rank folds by itself and that must be the same on all of them, such as the squares
/// of a gradient norm.
///
/// ```
/// # use burn_ddp_comm::collective::pairwise;
/// let text = pairwise(&["a", "b", "c"].map(String::from), &|left, right| format!("({left}{right})"));
/// assert_eq!(text.as_deref(), Some("((ab)c)"));
/// ```
pub fn pairwise<T: Clone>(values: &[T], combine: &impl Fn(T, T) -> T) -> Option<T> {
    match values {
        [] => None,
        [value] => Some(value.clone()),
        _ => {
            let (left, right) = values.split_at(left_part(values.len()));
            Some(combine(pairwise(left, combine)?, pairwise(right, combine)?))
        }
    }
}

/// Reduces `pieces`, one of each rank in rank order, into `out`.
///
/// # Errors
/// [`ErrorKind::Config`](crate::error::ErrorKind::Config) when there is no piece, when lengths differ or are no
/// multiple of the element size, or when a slice is not aligned to its elements.
pub fn tree_reduce(op: ReduceOp, dtype: DType, pieces: &[&[u8]], out: &mut [u8]) -> Result<()> {
    let [first, others @ ..] = pieces else {
        return Err(Error::config("a reduction needs the data of at least one rank"));
    };
    same_length(first.len(), out.len())?;
    out.copy_from_slice(first);
    reduce_in_place(op, dtype, 0, others, out)
}

/// Reduces into `data`, which holds the piece of rank `own`; `others` are those of all other ranks in rank
/// order. One rank's data is its own reduction and stays as it is.
pub(super) fn reduce_in_place(
    op: ReduceOp,
    dtype: DType,
    own: usize,
    others: &[&[u8]],
    data: &mut [u8],
) -> Result<()> {
    reduce_blocks(op, dtype, own, others, data, None)
}

/// Like [`reduce_in_place`], and writes the result to `copy` too while it is in the cache.
pub(super) fn reduce_in_place_and(
    op: ReduceOp,
    dtype: DType,
    own: usize,
    others: &[&[u8]],
    data: &mut [u8],
    copy: &mut [u8],
) -> Result<()> {
    same_length(data.len(), copy.len())?;
    reduce_blocks(op, dtype, own, others, data, Some(copy))
}

fn reduce_blocks(
    op: ReduceOp,
    dtype: DType,
    own: usize,
    others: &[&[u8]],
    data: &mut [u8],
    mut copy: Option<&mut [u8]>,
) -> Result<()> {
    others.iter().try_for_each(|piece| same_length(data.len(), piece.len()))?;
    if data.is_empty() || others.is_empty() {
        copy.into_iter().for_each(|copy| copy.copy_from_slice(data));
        return Ok(());
    }
    with_element!(dtype, T => {
        let data = elements_mut::<T>(dtype, data)?;
        // Worlds of two and four have no list to make.
        match (others, op) {
            (&[other], ReduceOp::Sum | ReduceOp::Mean) if T::SINGLY => {
                let other = elements::<T>(dtype, other)?;
                for at in passes(data.len(), copy.is_some()) {
                    sum_two(op, &mut data[at.clone()], &other[at.clone()]);
                    copy_block(&mut copy, data, at);
                }
            }
            (&[first, second, third], ReduceOp::Sum | ReduceOp::Mean) if T::SINGLY => {
                let (sibling, far) = if own < 2 { (first, [second, third]) } else { (third, [first, second]) };
                let sibling = elements::<T>(dtype, sibling)?;
                let far = [elements::<T>(dtype, far[0])?, elements::<T>(dtype, far[1])?];
                for at in passes(data.len(), copy.is_some()) {
                    let far = far.map(|piece| &piece[at.clone()]);
                    sum_four(op, &mut data[at.clone()], &sibling[at.clone()], far);
                    copy_block(&mut copy, data, at);
                }
            }
            _ => {
                let others =
                    others.iter().map(|piece| elements::<T>(dtype, piece)).collect::<Result<Vec<_>>>()?;
                let ranks = others.len() + 1;
                let mut room = room(data.len(), ranks);
                for at in blocks(data.len()) {
                    let (result, spare) = room.split_at_mut(at.len());
                    let leaf = |rank: usize| match rank {
                        _ if rank == own => &data[at.clone()],
                        _ => &others[rank - usize::from(rank > own)][at.clone()],
                    };
                    fold(op, 0..ranks, &leaf, result, spare);
                    finish(op, ranks, result, &mut data[at.clone()]);
                    copy_block(&mut copy, data, at);
                }
            }
        }
        Ok(())
    })
}

/// The parts in which `elements` elements are gone through: all at once, or in blocks whose result is still in the
/// cache when it is copied.
fn passes(elements: usize, in_blocks: bool) -> impl Iterator<Item = Range<usize>> {
    let whole = (!in_blocks).then_some(0..elements);
    let parts = in_blocks.then(|| blocks(elements)).into_iter().flatten();
    whole.into_iter().chain(parts)
}

fn copy_block<T: Pod>(copy: &mut Option<&mut [u8]>, data: &[T], at: Range<usize>) {
    if let Some(copy) = copy {
        copy[at.start * size_of::<T>()..at.end * size_of::<T>()]
            .copy_from_slice(bytemuck::cast_slice(&data[at]));
    }
}

fn same_length(left: usize, right: usize) -> Result<()> {
    if left == right {
        return Ok(());
    }
    Err(Error::config(format!("cannot reduce {left} bytes of one rank with {right} bytes of another")))
}

/// `bytes` as elements of `dtype`, or as its accumulators.
pub(super) fn elements<T: Pod>(dtype: DType, bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|error| unusable(dtype, error))
}

/// Like [`elements`], for writing.
pub(super) fn elements_mut<T: Pod>(dtype: DType, bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| unusable(dtype, error))
}

fn unusable(dtype: DType, error: PodCastError) -> Error {
    Error::config(format!("a buffer cannot be read as {dtype}: {error}"))
}

#[cfg(test)]
mod tests;
