//! The loops over elements of known type.
//!
//! Two and four ranks of a type that converts one by one are summed in one pass over memory (`sum_two`, `sum_four`,
//! which are the tree written out): these are the gradients of most runs, and each further pass would take as long
//! again. Everything else goes through blocks that stay in the first-level cache: a node of the tree is folded into
//! accumulators, divided and rounded.

use std::ops::Range;

use super::element::{Accumulator, Element};
use super::order::{Node, halves};
use super::simd::{Simd, run_vectorized};
use crate::dtype::ReduceOp;

/// Elements combined at a time: all intermediate results of a block stay in the first-level cache.
pub(super) const BLOCK: usize = 1024;

/// Elements of half precision that are widened at a time beside a block.
const WIDENED: usize = 256;

/// Accumulators for folding `ranks` leaves: the result, and one block for each level, in which a right branch is folded
/// while the left result waits.
pub(super) fn accumulators<A: Accumulator>(elements: usize, ranks: usize) -> Vec<A> {
    vec![A::default(); BLOCK.min(elements) * (1 + ranks.ilog2() as usize)]
}

/// The ranges of the blocks of `elements` elements.
pub(super) fn block_ranges(elements: usize) -> impl Iterator<Item = Range<usize>> {
    (0..elements).step_by(BLOCK).map(move |start| start..elements.min(start + BLOCK))
}

/// Leaves in `result` the combination of the leaves `node`; `spare` is the rest of [`accumulators`].
pub(super) fn fold<'l, T: Element>(
    op: ReduceOp,
    node: Node,
    leaf: &impl Fn(usize) -> &'l [T],
    result: &mut [T::Acc],
    spare: &mut [T::Acc],
) {
    match node.len() {
        0 => {}
        1 => run_vectorized(
            #[inline(always)]
            |simd| T::widen(simd, leaf(node.start), result),
        ),
        2 => combine_leaves(op, leaf(node.start), leaf(node.start + 1), result),
        _ => {
            let (left, right) = halves(&node);
            fold(op, left, leaf, result, spare);
            if right.len() == 1 {
                return combine_leaf(op, result, leaf(right.start));
            }
            let (folded, spare) = spare.split_at_mut(result.len());
            fold(op, right, leaf, folded, spare);
            combine(op, result, folded);
        }
    }
}

/// Runs `loops` with the operator that `op` names; a mean is still a sum here. The loop is in the macro's argument, so
/// that each operator has its own.
macro_rules! with_operator {
    ($op:expr, $A:ty, $combined:ident => $loops:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Mean => with_operator!(@ <$A>::add, $combined => $loops),
            ReduceOp::Min => with_operator!(@ <$A>::least, $combined => $loops),
            ReduceOp::Max => with_operator!(@ <$A>::greatest, $combined => $loops),
        }
    };
    (@ $operator:expr, $combined:ident => $loops:expr) => {{
        let $combined = $operator;
        run_vectorized(#[inline(always)] |simd| $loops(simd))
    }};
}

/// Combines each element of `left` with its counterpart in `right`.
pub(super) fn combine<A: Accumulator>(op: ReduceOp, left: &mut [A], right: &[A]) {
    with_operator!(op, A, combined => |_| {
        left.iter_mut().zip(right).for_each(|(left, right)| *left = combined(*left, *right));
    });
}

/// Like [`combine`], but the result is left in `right`.
pub(super) fn combine_right<A: Accumulator>(op: ReduceOp, left: &[A], right: &mut [A]) {
    with_operator!(op, A, combined => |_| {
        right.iter_mut().zip(left).for_each(|(right, left)| *right = combined(*left, *right));
    });
}

/// Combines two leaves into `result`.
fn combine_leaves<T: Element>(op: ReduceOp, left: &[T], right: &[T], result: &mut [T::Acc]) {
    if T::CONVERTS_SINGLY {
        return with_operator!(op, T::Acc, combined => |_| {
            let both = left.iter().zip(right);
            result.iter_mut().zip(both).for_each(|(result, (left, right))| {
                *result = combined(left.wide(), right.wide());
            });
        });
    }
    run_vectorized(
        #[inline(always)]
        |simd| T::widen(simd, left, result),
    );
    combine_leaf(op, result, right);
}

/// Combines `result`, on the left, with a leaf.
fn combine_leaf<T: Element>(op: ReduceOp, result: &mut [T::Acc], leaf: &[T]) {
    with_operator!(op, T::Acc, combined => |simd: Simd| {
        if T::CONVERTS_SINGLY {
            result.iter_mut().zip(leaf).for_each(|(left, right)| *left = combined(*left, right.wide()));
        } else {
            let mut wide = [T::Acc::default(); WIDENED];
            for (result, leaf) in result.chunks_mut(WIDENED).zip(leaf.chunks(WIDENED)) {
                let wide = &mut wide[..leaf.len()];
                T::widen(simd, leaf, wide);
                result.iter_mut().zip(wide).for_each(|(left, right)| *left = combined(*left, *right));
            }
        }
    });
}

/// The last step of `ranks` ranks' reduction and the rounding.
pub(super) fn finish<T: Element>(op: ReduceOp, ranks: usize, values: &mut [T::Acc], into: &mut [T]) {
    run_vectorized(
        #[inline(always)]
        |simd| {
            match op {
                ReduceOp::Mean => {
                    values.iter_mut().for_each(|value| *value = value.divided(ranks).canonical())
                }
                _ => values.iter_mut().for_each(|value| *value = value.canonical()),
            }
            T::narrow(simd, values, into);
        },
    );
}

/// The sum or mean of two ranks in one pass; which of the two is `data` changes no bit of a sum.
pub(super) fn sum_two<T: Element>(op: ReduceOp, data: &mut [T], other: &[T]) {
    run_vectorized(
        #[inline(always)]
        |_| match op {
            ReduceOp::Mean => data.iter_mut().zip(other).for_each(|(data, other)| {
                *data = T::narrowed(data.wide().add(other.wide()).divided(2).canonical());
            }),
            _ => data.iter_mut().zip(other).for_each(|(data, other)| {
                *data = T::narrowed(data.wide().add(other.wide()).canonical());
            }),
        },
    );
}

/// The sum or mean of four ranks in one pass: `data` and its sibling, and the two others.
pub(super) fn sum_four<T: Element>(op: ReduceOp, data: &mut [T], sibling: &[T], others: [&[T]; 2]) {
    run_vectorized(
        #[inline(always)]
        |_| {
            let [third, fourth] = others;
            let all = data.iter_mut().zip(sibling).zip(third.iter().zip(fourth));
            match op {
                ReduceOp::Mean => all.for_each(|((data, sibling), (third, fourth))| {
                    let (near, far) = (data.wide().add(sibling.wide()), third.wide().add(fourth.wide()));
                    *data = T::narrowed(near.add(far).divided(4).canonical());
                }),
                _ => all.for_each(|((data, sibling), (third, fourth))| {
                    let (near, far) = (data.wide().add(sibling.wide()), third.wide().add(fourth.wide()));
                    *data = T::narrowed(near.add(far).canonical());
                }),
            }
        },
    );
}
