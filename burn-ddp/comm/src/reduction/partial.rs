//! Reductions whose nodes are computed in several places.
//!
//! A node of the tree (`order.rs`) is a range of ranks, and its partial result depends on these ranks alone. A rank
//! that has the data of a whole node can therefore fold it and send the result instead of the data of all these ranks.
//! Partial results travel in the type that elements are combined in, so nothing is rounded in between and the bits stay
//! those of the whole tree. Recursive halving does so with pairs of ranks, a group over several hosts with the ranks of
//! a host.
//!
//! Partial results are bytes too, always aligned to 16: no accumulator needs more.

use std::ops::Range;

use super::element::{Accumulator, Element, elements, elements_mut, with_element};
use super::fold::{accumulators, block_ranges, combine, combine_right, finish, fold};
use super::order::{Node, halves};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

/// Bytes of an element of a partial result.
pub(crate) fn partial_size(dtype: DType) -> usize {
    with_element!(dtype, T => size_of::<<T as Element>::Acc>())
}

/// Fills `out` with the partial result of `node`, of which `leaf` has the elements by rank.
///
/// # Errors
/// `Config` for an empty node and for slices of other lengths or alignments.
pub(crate) fn reduce_node<'l>(
    op: ReduceOp,
    dtype: DType,
    node: Node,
    leaf: &dyn Fn(usize) -> &'l [u8],
    out: &mut [u8],
) -> Result<()> {
    if node.is_empty() {
        return Err(Error::config("a partial result needs the data of at least one rank"));
    }
    with_element!(dtype, T => {
        let out = elements_mut::<<T as Element>::Acc>(dtype, out)?;
        let leaves = node.clone().map(|rank| {
            let leaf = elements::<T>(dtype, leaf(rank))?;
            same_count(out.len(), leaf.len())?;
            Ok(leaf)
        });
        let leaves = leaves.collect::<Result<Vec<&[T]>>>()?;
        let mut spare = accumulators(out.len(), leaves.len());
        for at in block_ranges(out.len()) {
            fold(op, 0..leaves.len(), &|index: usize| &leaves[index][at.clone()], &mut out[at.clone()], &mut spare);
        }
        Ok(())
    })
}

/// Combines the partial results of two siblings into `own`; `own_first` says that it is the left one.
///
/// # Errors
/// `Config` for slices of other lengths or alignments.
pub(crate) fn combine_siblings(
    op: ReduceOp,
    dtype: DType,
    own: &mut [u8],
    sibling: &[u8],
    own_first: bool,
) -> Result<()> {
    with_element!(dtype, T => {
        let own = elements_mut::<<T as Element>::Acc>(dtype, own)?;
        let sibling = elements::<<T as Element>::Acc>(dtype, sibling)?;
        same_count(own.len(), sibling.len())?;
        match own_first {
            true => combine(op, own, sibling),
            false => combine_right(op, sibling, own),
        }
        Ok(())
    })
}

/// Combines `partials`, whose nodes are all of the tree over `world` ranks from left to right, and rounds into `out`.
///
/// # Errors
/// `Config` for nodes that are not the whole tree and for slices of other lengths or alignments.
pub(crate) fn complete(
    op: ReduceOp,
    dtype: DType,
    world: usize,
    partials: &[(Node, &[u8])],
    out: &mut [u8],
) -> Result<()> {
    let mut rest = partials;
    if world == 0 || !tiled(0..world, &mut rest) || !rest.is_empty() {
        let nodes: Vec<&Node> = partials.iter().map(|(node, _)| node).collect();
        return Err(Error::config(format!("the nodes {nodes:?} are not the tree over {world} ranks")));
    }
    with_element!(dtype, T => {
        let out = elements_mut::<T>(dtype, out)?;
        let partials = partials.iter().map(|(node, bytes)| {
            let values = elements::<<T as Element>::Acc>(dtype, bytes)?;
            same_count(out.len(), values.len())?;
            Ok((node.clone(), values))
        });
        let partials = partials.collect::<Result<Vec<_>>>()?;
        let mut accumulators = accumulators(out.len(), world);
        for at in block_ranges(out.len()) {
            let (result, spare) = accumulators.split_at_mut(at.len());
            assemble(op, 0..world, &mut partials.iter(), &at, result, spare);
            finish(op, world, result, &mut out[at]);
        }
        Ok(())
    })
}

/// True if the first of `partials` make up `node`; removes them if so.
fn tiled(node: Node, partials: &mut &[(Node, &[u8])]) -> bool {
    match partials {
        [(first, _), rest @ ..] if *first == node => {
            *partials = rest;
            true
        }
        _ if node.len() < 2 => false,
        _ => {
            let (left, right) = halves(&node);
            tiled(left, partials) && tiled(right, partials)
        }
    }
}

/// Leaves in `result` the combination of `node` for the elements `at`, from the next of `partials`, which tile it.
fn assemble<'p, A: Accumulator>(
    op: ReduceOp,
    node: Node,
    partials: &mut std::slice::Iter<'p, (Node, &'p [A])>,
    at: &Range<usize>,
    result: &mut [A],
    spare: &mut [A],
) {
    if let Some(values) = take_node(&node, partials) {
        return result.copy_from_slice(&values[at.clone()]);
    }
    let (left, right) = halves(&node);
    assemble(op, left, partials, at, result, spare);
    if let Some(values) = take_node(&right, partials) {
        return combine(op, result, &values[at.clone()]);
    }
    let (folded, spare) = spare.split_at_mut(result.len());
    assemble(op, right, partials, at, folded, spare);
    combine(op, result, folded);
}

/// Takes the next partial result if it is that of `node`.
fn take_node<'p, A>(node: &Node, partials: &mut std::slice::Iter<'p, (Node, &'p [A])>) -> Option<&'p [A]> {
    let (first, values) = partials.as_slice().first()?;
    (first == node).then(|| {
        partials.next();
        *values
    })
}

fn same_count(left: usize, right: usize) -> Result<()> {
    if left == right {
        return Ok(());
    }
    Err(Error::config(format!("cannot combine {left} elements with {right}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn siblings_are_combined_in_order_on_both_sides() {
        // Only the left of two zeros stays.
        let (left, right) = ([0.0f32], [-0.0f32]);
        for own_first in [true, false] {
            let (own, sibling) = if own_first { (left, right) } else { (right, left) };
            let mut own = own;
            let sibling = bytemuck::cast_slice(&sibling);
            combine_siblings(
                ReduceOp::Min,
                DType::BF16,
                bytemuck::cast_slice_mut(&mut own),
                sibling,
                own_first,
            )
            .unwrap();
            assert!(own[0].is_sign_positive());
        }
    }

    #[test]
    fn what_is_no_whole_tree_is_refused() {
        let values = [0.0f32; 2];
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let refused = |world: usize, nodes: &[Node], out: &mut [f32]| {
            let partials: Vec<(Node, &[u8])> = nodes.iter().map(|node| (node.clone(), bytes)).collect();
            let out = bytemuck::cast_slice_mut(out);
            let error = complete(ReduceOp::Sum, DType::F32, world, &partials, out).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        };
        refused(0, &[], &mut [0.0; 2]);
        refused(4, &[0..1, 1..4], &mut [0.0; 2]);
        refused(4, &[2..4, 0..2], &mut [0.0; 2]);
        refused(4, &[0..2, 2..3], &mut [0.0; 2]);
        refused(4, &[0..4, 0..4], &mut [0.0; 2]);
        refused(4, &[0..2, 2..4], &mut [0.0; 3]);
        let leaf = |_: usize| bytes;
        let mut out = [0u8; 8];
        assert!(reduce_node(ReduceOp::Sum, DType::F32, 1..1, &leaf, &mut out).is_err());
        assert!(reduce_node(ReduceOp::Sum, DType::F16, 0..2, &leaf, &mut out).is_err());
    }
}
