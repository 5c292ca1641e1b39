//! Arithmetic over the data of several ranks: element types, SIMD loops, and the order of summation.
//!
//! **The order of summation is decided in `order.rs`, and nowhere else**: a binary tree over the ranks, split in the
//! middle with the larger part on the left, for each element by itself. Floating-point addition is not associative, so
//! this order is part of the result, and every algorithm of the collectives calls the functions of this module. The
//! bits depend on neither the algorithm, nor where a buffer was cut, nor which rank's data came first.
//!
//! This module knows no peer and sends nothing. Files, each of which uses only those above it:
//!
//! | file | content |
//! |---|---|
//! | `order.rs` | the tree: where it splits, its nodes, [`pairwise`] |
//! | `simd.rs` | loops compiled for the processor at hand |
//! | `element.rs` | element types, and the types in which they are combined |
//! | `fold.rs` | the tree over blocks that stay in the first-level cache; one pass for two and four ranks |
//! | `tree.rs` | whole reductions: the data of all ranks in one place, [`tree_reduce`] |
//! | `partial.rs` | reductions whose nodes are computed in several places |

mod element;
mod fold;
#[cfg(test)]
mod measure;
mod order;
mod partial;
mod simd;
#[cfg(test)]
mod tests;
mod tree;

pub use order::pairwise;
pub use tree::tree_reduce;

pub(crate) use element::is_aligned;
pub(crate) use order::{Node, nodes_within};
pub(crate) use partial::{combine_siblings, complete, partial_size, reduce_node};
pub(crate) use tree::{reduce_in_place, reduce_in_place_and};
