//! Moves of data over the wire that several collectives are made of.

use super::chunk::byte_chunk;
use super::scratch::Scratch;
use super::segments::Segments;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::rank::Rank;
use crate::reduction::reduce_in_place;
use crate::transport::exchange::Exchange;

/// Position of `peer` among all members other than `own`.
pub(super) fn peer_index(own: usize, peer: usize) -> usize {
    peer - usize::from(peer > own)
}

/// Phase 0 of a reduction: sends each peer what `body` has for it and returns what all of them have for this rank,
/// `bytes` each, in rank order without this rank.
pub(super) fn collect<'s, 'd>(
    exchange: &mut Exchange<'_>,
    scratch: &'s mut Scratch,
    bytes: usize,
    body: impl Fn(Rank) -> Vec<&'d [u8]>,
) -> Result<Vec<&'s [u8]>> {
    let mut pieces = scratch.pieces(exchange.world_size() - 1, bytes);
    for (to, from) in exchange.rounds() {
        let index = peer_index(exchange.rank().0, from.0);
        exchange.swap(0, (to, from), &body(to), &mut [&mut *pieces[index]])?;
    }
    Ok(pieces.into_iter().map(|piece| &*piece).collect())
}

/// Phase 1 of an operation over `data`: each rank has its chunk of it and gets all others. A rank that is `complete`
/// has them already and is sent none.
pub(super) fn gather_chunks(
    exchange: &mut Exchange<'_>,
    data: &mut Segments<'_, '_>,
    element_size: usize,
    complete: Option<Rank>,
) -> Result<()> {
    let (rank, world_size) = (exchange.rank(), exchange.world_size());
    let bytes = data.len();
    let chunk = |rank| byte_chunk(bytes, element_size, world_size, rank);
    for (to, from) in exchange.rounds() {
        let own = if complete == Some(to) { 0..0 } else { chunk(rank) };
        let theirs = if complete == Some(rank) { 0..0 } else { chunk(from) };
        let (body, mut into) = data.borrow([own], theirs);
        exchange.swap(1, (to, from), &body, &mut into)?;
    }
    Ok(())
}

/// Reduces into the buffers `data` of rank `own`, one after the other; `others` are all other ranks' in rank order.
pub(super) fn reduce_pieces<'d>(
    op: ReduceOp,
    dtype: DType,
    own: Rank,
    others: &[&[u8]],
    data: impl Iterator<Item = &'d mut [u8]>,
) -> Result<()> {
    let mut start = 0;
    let mut parts = others.to_vec();
    for piece in data {
        let range = start..start + piece.len();
        start = range.end;
        parts.iter_mut().zip(others).for_each(|(part, other)| *part = &other[range.clone()]);
        reduce_in_place(op, dtype, own.0, &parts, piece)?;
    }
    Ok(())
}
