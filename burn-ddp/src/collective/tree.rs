//! The order in which ranks are combined.
//!
//! Floating-point addition is not associative, so the order is part of the result. It is fixed here, once, and
//! every algorithm calls it: a binary tree over the ranks, split in the middle with the larger part on the
//! left, for each element by itself. Hence the bits depend on neither the algorithm, nor where a buffer was
//! cut, nor which rank's data came first. The tree also adds numbers of like size and, for a world that is a
//! power of two, is the tree of the smaller world with every leaf split.

use std::ops::Range;

use super::element::{Element, combine, finish, with_element};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

/// Elements combined at a time: all intermediate results of a block stay in the first-level cache.
const BLOCK: usize = 2048;

/// Where the tree splits `len` leaves: so many go left.
fn left_part(len: usize) -> usize {
    len.div_ceil(2)
}

/// Combines `values` in the tree of the reductions; `None` if there are none.
///
/// For numbers that every rank folds by itself and that must be the same on all of them, such as the squares
/// of a gradient norm.
///
/// ```
/// # use burn_ddp::collective::pairwise;
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
    if data.is_empty() || others.is_empty() {
        return others.iter().try_for_each(|piece| same_length(data.len(), piece.len()));
    }
    with_element!(dtype, T => {
        let others = others
            .iter()
            .map(|piece| {
                same_length(data.len(), piece.len())?;
                bytemuck::try_cast_slice::<u8, T>(piece).map_err(|error| unusable(dtype, error))
            })
            .collect::<Result<Vec<_>>>()?;
        let data = bytemuck::try_cast_slice_mut::<u8, T>(data).map_err(|error| unusable(dtype, error))?;
        Tree { op, own, others: &others }.reduce(data);
        Ok(())
    })
}

fn same_length(left: usize, right: usize) -> Result<()> {
    if left == right {
        return Ok(());
    }
    Err(Error::config(format!("cannot reduce {left} bytes of one rank with {right} bytes of another")))
}

fn unusable(dtype: DType, error: bytemuck::PodCastError) -> Error {
    Error::config(format!("a buffer cannot be read as {dtype}: {error}"))
}

struct Tree<'a, T> {
    op: ReduceOp,
    own: usize,
    others: &'a [&'a [T]],
}

impl<T: Element> Tree<'_, T> {
    fn reduce(&self, data: &mut [T]) {
        let ranks = self.others.len() + 1;
        let block = BLOCK.min(data.len());
        // A right branch needs a block of its own while the left result waits: one for each level below.
        let mut wide = vec![T::Acc::default(); block * (1 + ranks.ilog2() as usize)];
        for start in (0..data.len()).step_by(block) {
            let at = start..data.len().min(start + block);
            let (result, spare) = wide.split_at_mut(block);
            let result = &mut result[..at.len()];
            self.fold(data, &at, 0..ranks, result, spare);
            finish(self.op, ranks, result);
            T::narrow(result, &mut data[at]);
        }
    }

    fn leaf<'a>(&'a self, data: &'a [T], at: &Range<usize>, rank: usize) -> &'a [T] {
        match rank {
            _ if rank == self.own => &data[at.clone()],
            _ => &self.others[rank - usize::from(rank > self.own)][at.clone()],
        }
    }

    /// Leaves in `result` the combination of `ranks` for the elements `at`.
    fn fold(
        &self,
        data: &[T],
        at: &Range<usize>,
        ranks: Range<usize>,
        result: &mut [T::Acc],
        spare: &mut [T::Acc],
    ) {
        if ranks.len() == 1 {
            return T::widen(self.leaf(data, at, ranks.start), result);
        }
        let middle = ranks.start + left_part(ranks.len());
        self.fold(data, at, ranks.start..middle, result, spare);
        let right = middle..ranks.end;
        if right.len() == 1
            && let Some(values) = T::as_wide(self.leaf(data, at, right.start))
        {
            return combine(self.op, result, values);
        }
        let (mine, spare) = spare.split_at_mut(BLOCK.min(data.len()));
        let mine = &mut mine[..at.len()];
        self.fold(data, at, right, mine, spare);
        combine(self.op, result, mine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn reduced<T: bytemuck::Pod>(op: ReduceOp, dtype: DType, pieces: &[Vec<T>]) -> Vec<T> {
        let mut out = pieces[0].clone();
        let pieces: Vec<&[u8]> = pieces.iter().map(|piece| bytemuck::cast_slice(piece)).collect();
        tree_reduce(op, dtype, &pieces, bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    /// Each rank's value alone, spread over several blocks and an incomplete one.
    fn columns<T: Clone>(values: &[T]) -> Vec<Vec<T>> {
        values.iter().map(|value| vec![value.clone(); 2 * BLOCK + 3]).collect()
    }

    #[test]
    fn the_left_part_is_the_larger() {
        let order = |count: usize| {
            let leaves: Vec<String> = (0..count).map(|leaf| leaf.to_string()).collect();
            pairwise(&leaves, &|left, right| format!("({left} {right})")).unwrap()
        };
        assert_eq!(order(2), "(0 1)");
        assert_eq!(order(5), "(((0 1) 2) (3 4))");
        assert_eq!(order(6), "(((0 1) 2) ((3 4) 5))");
        assert_eq!(order(7), "(((0 1) (2 3)) ((4 5) 6))");
        assert_eq!(pairwise(&[] as &[f64], &|left, right| left + right), None);
    }

    #[test]
    fn every_world_size_is_the_pairwise_fold() {
        for ranks in 1..=33 {
            let values: Vec<f32> = (0..ranks).map(|rank| 0.1 + 1e3 / (1 + rank * rank) as f32).collect();
            let expected = pairwise(&values, &|left, right| left + right).unwrap();
            let sums = reduced(ReduceOp::Sum, DType::F32, &columns(&values));
            assert!(sums.iter().all(|sum| sum.to_bits() == expected.to_bits()), "{ranks} ranks");
        }
    }

    #[test]
    fn halves_neither_overflow_nor_underflow_in_a_mean() {
        for value in [f16::from_f32(40000.0), f16::from_bits(1)] {
            assert!(
                reduced(ReduceOp::Mean, DType::F16, &columns(&[value; 2])).iter().all(|mean| *mean == value)
            );
        }
        let huge = bf16::MAX;
        assert_eq!(reduced(ReduceOp::Max, DType::BF16, &[vec![huge], vec![bf16::ONE]]), [huge]);
    }

    #[test]
    fn integers_are_exact() {
        let pieces = [vec![i64::MAX, -7, 1], vec![i64::MAX, 0, 1], vec![i64::MAX, 0, 1]];
        assert_eq!(reduced(ReduceOp::Mean, DType::I64, &pieces), [i64::MAX, -2, 1]);
        assert_eq!(reduced(ReduceOp::Sum, DType::I64, &pieces), [i64::MAX - 2, -7, 3]);
        assert_eq!(reduced(ReduceOp::Sum, DType::U8, &[vec![200u8], vec![100]]), [44]);
        assert_eq!(reduced(ReduceOp::Mean, DType::U8, &[vec![200u8], vec![101]]), [150]);
    }

    #[test]
    fn the_own_piece_may_stand_anywhere() {
        let pieces: Vec<Vec<f32>> = columns(&[1.0e8, 1.0, -1.0e8, 3.0, 0.5]);
        let expected = reduced(ReduceOp::Sum, DType::F32, &pieces);
        for own in 0..pieces.len() {
            let mut data = pieces[own].clone();
            let others: Vec<&[u8]> = (0..pieces.len())
                .filter(|rank| *rank != own)
                .map(|rank| bytemuck::cast_slice(&pieces[rank]))
                .collect();
            reduce_in_place(ReduceOp::Sum, DType::F32, own, &others, bytemuck::cast_slice_mut(&mut data))
                .unwrap();
            assert_eq!(data, expected, "own {own}");
        }
    }

    #[test]
    fn wrong_slices_are_refused() {
        let good = [0.0f32; 4];
        let bytes: &[u8] = bytemuck::cast_slice(&good);
        let refused = |pieces: &[&[u8]], out: &mut [u8]| {
            let error = tree_reduce(ReduceOp::Sum, DType::F32, pieces, out).unwrap_err();
            assert_eq!(error.kind(), crate::error::ErrorKind::Config);
        };
        let mut out = [0.0f32; 4];
        let out: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        refused(&[], &mut out[..]);
        refused(&[bytes, &bytes[..12]], &mut out[..]);
        refused(&[&bytes[1..13], &bytes[..12]], &mut out[1..13]);
        refused(&[&bytes[..7], &bytes[..7]], &mut out[..7]);
    }
}
