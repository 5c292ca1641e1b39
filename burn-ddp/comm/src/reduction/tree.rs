//! Whole reductions: the data of all ranks is in one place and is combined in the order of `order.rs`.

use std::ops::Range;

use bytemuck::Pod;

use super::element::{Element, elements, elements_mut, with_element};
use super::fold::{accumulators, block_ranges, finish, fold, sum_four, sum_two};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

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
pub(crate) fn reduce_in_place(
    op: ReduceOp,
    dtype: DType,
    own: usize,
    others: &[&[u8]],
    data: &mut [u8],
) -> Result<()> {
    reduce_blocks(op, dtype, own, others, data, None)
}

/// Like [`reduce_in_place`], and writes the result to `copy` too while it is in the cache.
pub(crate) fn reduce_in_place_and(
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
        // Worlds of two and four need no list of pieces.
        match (others, op) {
            (&[other], ReduceOp::Sum | ReduceOp::Mean) if T::CONVERTS_SINGLY => {
                let other = elements::<T>(dtype, other)?;
                for at in passes(data.len(), copy.is_some()) {
                    sum_two(op, &mut data[at.clone()], &other[at.clone()]);
                    copy_block(&mut copy, data, at);
                }
            }
            (&[first, second, third], ReduceOp::Sum | ReduceOp::Mean) if T::CONVERTS_SINGLY => {
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
                let mut accumulators = accumulators(data.len(), ranks);
                for at in block_ranges(data.len()) {
                    let (result, spare) = accumulators.split_at_mut(at.len());
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

/// The ranges in which `elements` elements are reduced: all at once, or in blocks whose result is still in the cache
/// when it is copied.
fn passes(elements: usize, in_blocks: bool) -> impl Iterator<Item = Range<usize>> {
    let whole = (!in_blocks).then_some(0..elements);
    let parts = in_blocks.then(|| block_ranges(elements)).into_iter().flatten();
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
