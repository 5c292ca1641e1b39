//! Reductions that are done in parts, in several places.
//!
//! A node of the tree (`tree.rs`) is a range of ranks, and its partial result depends on these ranks alone. So whoever
//! has the data of a whole node can fold it and send the result, in the type that elements are combined in, instead of
//! everybody's data: the bits stay those of the whole tree, because nothing is rounded in between. Recursive halving does
//! so with pairs of ranks, a group over several hosts with the ranks of a host.
//!
//! Partial results are bytes too, aligned to 16 wherever they are: no accumulator needs more.

use std::ops::Range;

use super::element::{Accumulator, Element, with_element};
use super::fold::{blocks, combine, combine_right, finish, fold, room};
use super::tree::{elements, elements_mut, left_part};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

/// The ranks below a node of the tree.
pub(super) type Node = Range<usize>;

/// The largest nodes of the tree over `world` ranks that have no other ranks than `members`, which are sorted; from left
/// to right.
pub(super) fn nodes_within(world: usize, members: &[usize]) -> Vec<Node> {
    fn visit(node: Node, members: &[usize], found: &mut Vec<Node>) {
        let inside = members.partition_point(|rank| *rank < node.end)
            - members.partition_point(|rank| *rank < node.start);
        if inside == node.len() {
            found.push(node);
        } else if inside > 0 {
            let middle = node.start + left_part(node.len());
            visit(node.start..middle, members, found);
            visit(middle..node.end, members, found);
        }
    }
    let mut found = Vec::new();
    if world > 0 {
        visit(0..world, members, &mut found);
    }
    found
}

/// Bytes of an element of a partial result.
pub(super) fn partial_size(dtype: DType) -> usize {
    with_element!(dtype, T => size_of::<<T as Element>::Acc>())
}

/// Fills `out` with the partial result of `node`, of which `leaf` has the elements by rank.
///
/// # Errors
/// `Config` for an empty node and for slices of other lengths or alignments.
pub(super) fn reduce_node<'l>(
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
        let mut spare = room(out.len(), leaves.len());
        for at in blocks(out.len()) {
            fold(op, 0..leaves.len(), &|index: usize| &leaves[index][at.clone()], &mut out[at.clone()], &mut spare);
        }
        Ok(())
    })
}

/// Combines the partial results of two siblings into `own`; `own_first` says that it is the left one.
///
/// # Errors
/// `Config` for slices of other lengths or alignments.
pub(super) fn combine_siblings(
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
pub(super) fn complete(
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
        let mut room = room(out.len(), world);
        for at in blocks(out.len()) {
            let (result, spare) = room.split_at_mut(at.len());
            assemble(op, 0..world, &mut partials.iter(), &at, result, spare);
            finish(op, world, result, &mut out[at]);
        }
        Ok(())
    })
}

/// Whether `node` consists of the first of `partials`, which are taken off.
fn tiled(node: Node, partials: &mut &[(Node, &[u8])]) -> bool {
    match partials {
        [(first, _), rest @ ..] if *first == node => {
            *partials = rest;
            true
        }
        _ if node.len() < 2 => false,
        _ => {
            let middle = node.start + left_part(node.len());
            tiled(node.start..middle, partials) && tiled(middle..node.end, partials)
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
    if let Some(values) = taken(&node, partials) {
        return result.copy_from_slice(&values[at.clone()]);
    }
    let middle = node.start + left_part(node.len());
    assemble(op, node.start..middle, partials, at, result, spare);
    if let Some(values) = taken(&(middle..node.end), partials) {
        return combine(op, result, &values[at.clone()]);
    }
    let (right, spare) = spare.split_at_mut(result.len());
    assemble(op, middle..node.end, partials, at, right, spare);
    combine(op, result, right);
}

/// The partial result of `node` if it is the next one.
fn taken<'p, A>(node: &Node, partials: &mut std::slice::Iter<'p, (Node, &'p [A])>) -> Option<&'p [A]> {
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
    fn a_hosts_ranks_are_few_nodes_where_they_stand_together() {
        let nodes = |world, members: &[usize]| {
            let nodes = nodes_within(world, members);
            nodes.iter().map(|node| (node.start, node.end)).collect::<Vec<_>>()
        };
        assert_eq!(nodes(8, &[0, 1, 2, 3]), [(0, 4)]);
        assert_eq!(nodes(8, &[2, 3, 4, 5]), [(2, 4), (4, 6)]);
        assert_eq!(nodes(8, &[0, 2, 4, 6]), [(0, 1), (2, 3), (4, 5), (6, 7)]);
        assert_eq!(nodes(5, &[0, 1, 2]), [(0, 3)]);
        assert_eq!(nodes(6, &[3, 4, 5]), [(3, 6)]);
        assert_eq!(nodes(6, &[0, 1, 2, 3, 4, 5]), [(0, 6)]);
        assert_eq!(nodes(3, &[]), []);
    }

    #[test]
    fn siblings_are_combined_in_order_whoever_owns_them() {
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
