//! `all_reduce`: the choice of the algorithm, and the two algorithms without a recursion.
//!
//! Large data goes through in blocks, so that what peers send needs little memory. Results of a block leave in the same
//! frames as the next block's data, so the wire is in use while a block is reduced.

use std::ops::Range;

use super::chunk::{block_count, chunk};
use super::cost::{Algorithm, choose};
use super::halving::halve_and_double;
use super::scratch::Scratch;
use super::segments::Segments;
use super::wire::{collect, peer_index, reduce_pieces};
use super::{Collectives, Route, aligned_element_count, hierarchical};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::operation::Operation;
use crate::rank::Rank;
use crate::reduction::partial_size;
use crate::transport::exchange::Exchange;

impl Collectives {
    /// Replaces `data` on every rank by the reduction of all ranks' `data`; the same bits on all of them. It is a list
    /// of buffers that count as one run of elements; ranks may divide the elements differently.
    ///
    /// # Errors
    /// `Config` for a buffer whose length is no multiple of the element size or that is not aligned to it;
    /// else what ended the operation (see [`Collectives`]), and `data` is then of no use.
    pub fn all_reduce(&mut self, dtype: DType, op: ReduceOp, data: &mut [&mut [u8]]) -> Result<()> {
        self.reduce_as(Operation::AllReduce(op), dtype, op, data)
    }

    /// [`all_reduce`](Self::all_reduce) of a gradient bucket: the same, and an error where other ranks are in an
    /// `all_reduce` of their own.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    pub fn reduce_gradients(&mut self, dtype: DType, op: ReduceOp, data: &mut [&mut [u8]]) -> Result<()> {
        self.reduce_as(Operation::ReduceGradients(op), dtype, op, data)
    }

    fn reduce_as(
        &mut self,
        operation: Operation,
        dtype: DType,
        op: ReduceOp,
        data: &mut [&mut [u8]],
    ) -> Result<()> {
        self.check()?;
        let mut count = 0;
        for part in data.iter() {
            count += aligned_element_count("the data of all_reduce", dtype, part)?;
        }
        let mut data = Segments::new(data);
        let header = self.header(operation, dtype, count);
        let algorithm = self.algorithm.unwrap_or_else(|| choose(self.world_size(), dtype, count));
        self.run(header, |route, scratch| {
            let exchange = match route {
                Route::SharedMemory(mut shared) => return shared.all_reduce(dtype, op, &mut data, scratch),
                Route::Hierarchical { hosts, local, exchange } => {
                    return hierarchical::all_reduce(hosts, local, exchange, scratch, dtype, op, &mut data);
                }
                Route::Wire(exchange) => exchange,
            };
            match algorithm {
                // One rank has no peer to send to, and nothing to halve.
                _ if exchange.world_size() == 1 => Ok(()),
                Algorithm::Whole => send_whole(exchange, scratch, op, dtype, &mut data),
                Algorithm::Direct => send_chunks(exchange, scratch, op, dtype, &mut data, count),
                Algorithm::Halving => {
                    let blocks = block_count(count * partial_size(dtype));
                    (0..blocks).map(|index| chunk(count, blocks, index)).try_for_each(|block| {
                        halve_and_double(exchange, scratch, op, dtype, &mut data, block)
                    })
                }
            }
        })
    }
}

/// Sends everything to all peers.
fn send_whole(
    exchange: &mut Exchange<'_>,
    scratch: &mut Scratch,
    op: ReduceOp,
    dtype: DType,
    data: &mut Segments<'_, '_>,
) -> Result<()> {
    let all = 0..data.len();
    let pieces = collect(exchange, scratch, all.len(), |_| data.pieces(all.clone()).collect())?;
    reduce_pieces(op, dtype, exchange.rank(), &pieces, data.pieces_mut(all))
}

/// Sends each rank's chunk of a block to that rank, and with the next block's chunks the results of this one:
///
/// ```text
/// phase 0   chunks of block 0
/// phase 1   chunks of block 1, results of block 0
/// phase 2                      results of block 1
/// ```
fn send_chunks(
    exchange: &mut Exchange<'_>,
    scratch: &mut Scratch,
    op: ReduceOp,
    dtype: DType,
    data: &mut Segments<'_, '_>,
    count: usize,
) -> Result<()> {
    let (rank, world_size, size) = (exchange.rank(), exchange.world_size(), dtype.size());
    let blocks = block_count(count * size);
    let bytes = |index: Option<usize>, rank: Rank| -> Range<usize> {
        let Some(index) = index.filter(|index| *index < blocks) else { return 0..0 };
        let block = chunk(count, blocks, index);
        let own = chunk(block.len(), world_size, rank.0);
        (block.start + own.start) * size..(block.start + own.end) * size
    };
    for phase in 0..=blocks {
        let (next, done) = (Some(phase), phase.checked_sub(1));
        let own = bytes(next, rank);
        let mut pieces = scratch.pieces(world_size - 1, own.len());
        for (to, from) in exchange.rounds() {
            let sent = [bytes(done, rank), bytes(next, to)];
            let (body, mut into) = data.borrow(sent, bytes(done, from));
            into.push(&mut *pieces[peer_index(rank.0, from.0)]);
            exchange.swap(phase as u8, (to, from), &body, &mut into)?;
        }
        let pieces: Vec<&[u8]> = pieces.into_iter().map(|piece| &*piece).collect();
        reduce_pieces(op, dtype, rank, &pieces, data.pieces_mut(own))?;
    }
    Ok(())
}
