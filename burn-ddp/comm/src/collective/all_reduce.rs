//! `all_reduce`: the choice of the algorithm, and the two without a recursion.
//!
//! Large data goes through in blocks, so that what others send needs little memory. Results of a block leave in the same
//! frames as the next block's data, so the wire has something to carry while the last block is being reduced.

use std::ops::Range;

use super::chunk::chunk;
use super::cost::{Algorithm, choose};
use super::exchange::Exchange;
use super::scratch::Scratch;
use super::segments::Segments;
use super::{Collectives, Road, aligned_elements, hierarchical};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::rank::Rank;
use crate::reduction::{partial_size, reduce_in_place};
use crate::transport::OpKind;

/// Bytes that are reduced at a time, by all ranks together. Memory for what others send grows with it; a turn of the
/// ranks should be small beside the time that it takes on the wire, which is 30 ms at 1 Gbit/s and 3 ms at 10.
pub(super) const BLOCK: usize = 4 << 20;

impl Collectives {
    /// Replaces `data` on every rank by the reduction of all ranks' `data`; the same bits on all of them. It is a list
    /// of buffers that count as one run of elements; ranks may divide the elements differently.
    ///
    /// # Errors
    /// `Config` for a buffer whose length is no multiple of the element size or that is not aligned to it;
    /// else what ended the operation (see [`Collectives`]), and `data` is then of no use.
    pub fn all_reduce(&mut self, dtype: DType, op: ReduceOp, data: &mut [&mut [u8]]) -> Result<()> {
        self.reduce_as(OpKind::AllReduce, dtype, op, data)
    }

    /// [`all_reduce`](Self::all_reduce) of a gradient bucket: the same, and an error where other ranks are in an
    /// `all_reduce` of their own.
    pub fn reduce_gradients(&mut self, dtype: DType, op: ReduceOp, data: &mut [&mut [u8]]) -> Result<()> {
        self.reduce_as(OpKind::ReduceGradients, dtype, op, data)
    }

    fn reduce_as(&mut self, kind: OpKind, dtype: DType, op: ReduceOp, data: &mut [&mut [u8]]) -> Result<()> {
        self.check()?;
        let mut count = 0;
        for part in data.iter() {
            count += aligned_elements("the data of all_reduce", dtype, part)?;
        }
        let mut data = Segments::new(data);
        let header = self.header(kind, dtype, count).with_reduce(op);
        let algorithm = self.algorithm.unwrap_or_else(|| choose(self.world_size(), dtype, count));
        self.by_road(header, |road, scratch| {
            let exchange = match road {
                Road::Memory(mut shared) => return shared.all_reduce(dtype, op, &mut data, scratch),
                Road::Hosts(hosts, exchange) => {
                    return hierarchical::all_reduce(hosts, exchange, scratch, dtype, op, &mut data);
                }
                Road::Wire(exchange) => exchange,
            };
            match algorithm {
                // One rank has nobody to send to, and nothing to halve.
                _ if exchange.world_size() == 1 => Ok(()),
                Algorithm::Whole => exchange.send_whole(scratch, op, dtype, &mut data),
                Algorithm::Direct => exchange.send_chunks(scratch, op, dtype, &mut data, count),
                Algorithm::Halving => {
                    let blocks = blocks(count * partial_size(dtype));
                    (0..blocks)
                        .map(|index| chunk(count, blocks, index))
                        .try_for_each(|block| exchange.halve_and_double(scratch, op, dtype, &mut data, block))
                }
            }
        })
    }
}

impl Exchange<'_> {
    /// Everything to everybody.
    fn send_whole(
        &mut self,
        scratch: &mut Scratch,
        op: ReduceOp,
        dtype: DType,
        data: &mut Segments<'_, '_>,
    ) -> Result<()> {
        let all = 0..data.len();
        let pieces = self.collect(scratch, all.len(), |_| data.pieces(all.clone()).collect())?;
        reduce_pieces(op, dtype, self.rank(), &pieces, data.pieces_mut(all))
    }

    /// Each rank's chunk of a block to that rank, and with the next block's chunks the results of this one.
    fn send_chunks(
        &mut self,
        scratch: &mut Scratch,
        op: ReduceOp,
        dtype: DType,
        data: &mut Segments<'_, '_>,
        count: usize,
    ) -> Result<()> {
        let (rank, world_size, size) = (self.rank(), self.world_size(), dtype.size());
        let blocks = blocks(count * size);
        let place = |index: Option<usize>, rank: Rank| -> Range<usize> {
            let Some(index) = index.filter(|index| *index < blocks) else { return 0..0 };
            let block = chunk(count, blocks, index);
            let own = chunk(block.len(), world_size, rank.0);
            (block.start + own.start) * size..(block.start + own.end) * size
        };
        for turn in 0..=blocks {
            let (next, done) = (Some(turn), turn.checked_sub(1));
            let own = place(next, rank);
            let mut pieces = scratch.pieces(world_size - 1, own.len());
            for (to, from) in self.rounds() {
                let sent = [place(done, rank), place(next, to)];
                let (body, mut into) = data.borrow(sent, place(done, from));
                into.push(&mut *pieces[slot(rank, from)]);
                self.swap(turn as u8, (to, from), &body, &mut into)?;
            }
            let pieces: Vec<&[u8]> = pieces.into_iter().map(|piece| &*piece).collect();
            reduce_pieces(op, dtype, rank, &pieces, data.pieces_mut(own))?;
        }
        Ok(())
    }
}

/// Where the data of `from` stands among that of all ranks other than `rank`.
pub(super) fn slot(rank: Rank, from: Rank) -> usize {
    from.0 - usize::from(from > rank)
}

/// In how many blocks `bytes` are worked through; at least one, so that ranks meet over no data too.
pub(super) fn blocks(bytes: usize) -> usize {
    bytes.div_ceil(BLOCK).max(1)
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
