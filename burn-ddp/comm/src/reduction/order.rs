//! The order in which ranks are combined: a binary tree over the ranks, split in the middle with the larger part on the
//! left.
//!
//! ```text
//!            0..5
//!          ╱      ╲
//!       0..3      3..5
//!      ╱    ╲     ╱  ╲
//!    0..2    2   3    4
//!    ╱  ╲
//!   0    1               ((0 + 1) + 2) + (3 + 4)
//! ```
//!
//! The tree adds numbers of like size. For a world that is a power of two it is the tree of the smaller world with
//! every leaf split, which is how one, two, four and eight ranks can come to the same bits.

use std::ops::Range;

/// A node of the tree: the ranks below it.
pub(crate) type Node = Range<usize>;

/// Splits a node of more than one rank.
pub(super) fn halves(node: &Node) -> (Node, Node) {
    let middle = node.start + left_part(node.len());
    (node.start..middle, middle..node.end)
}

/// Number of leaves, of `len`, that go left.
fn left_part(len: usize) -> usize {
    len.div_ceil(2)
}

/// Combines `values` in the tree of the reductions; `None` if there are none.
///
/// For numbers that every rank folds by itself and that must be the same on all of them, such as the squares
/// of a gradient norm.
///
/// ```
/// # use burn_ddp_comm::reduction::pairwise;
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

/// The largest nodes of the tree over `world` ranks that have no other ranks than `members`, which are sorted; from
/// left to right.
pub(crate) fn nodes_within(world: usize, members: &[usize]) -> Vec<Node> {
    fn visit(node: Node, members: &[usize], found: &mut Vec<Node>) {
        let inside = members.partition_point(|rank| *rank < node.end)
            - members.partition_point(|rank| *rank < node.start);
        if inside == node.len() {
            found.push(node);
        } else if inside > 0 {
            let (left, right) = halves(&node);
            visit(left, members, found);
            visit(right, members, found);
        }
    }
    let mut found = Vec::new();
    if world > 0 {
        visit(0..world, members, &mut found);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
