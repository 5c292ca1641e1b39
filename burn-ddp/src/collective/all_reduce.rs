//! `all_reduce`: each rank owns a chunk, reduces what all have for it, and hands out the result.

use super::exchange::byte_chunk;
use super::segments::Segments;
use super::tree::reduce_in_place;
use super::{Collectives, Road, SMALL, aligned_elements, hierarchical};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::rank::Rank;
use crate::transport::OpKind;

impl Collectives {
    /// Replaces `data` on every rank by the reduction of all ranks' `data`; the same bits on all of them. It is a list
    /// of buffers that count as one run of elements; ranks may divide the elements differently.
    ///
    /// # Errors
    /// `Config` for a buffer whose length is no multiple of the element size or that is not aligned to it;
    /// else what ended the operation (see [`Collectives`]), and `data` is then of no use.
    pub fn all_reduce(&mut self, dtype: DType, op: ReduceOp, data: &mut [&mut [u8]]) -> Result<()> {
        self.check()?;
        let mut count = 0;
        for part in data.iter() {
            count += aligned_elements("the data of all_reduce", dtype, part)?;
        }
        let mut data = Segments::new(data);
        let header = self.header(OpKind::AllReduce, dtype, count).with_reduce(op);
        self.by_road(header, |road, scratch| {
            let exchange = match road {
                Road::Memory(mut shared) => return shared.all_reduce(dtype, op, &mut data, scratch),
                Road::Hosts(hosts, exchange) => {
                    return hierarchical::all_reduce(hosts, exchange, scratch, dtype, op, &mut data);
                }
                Road::Wire(exchange) => exchange,
            };
            let (rank, world_size, bytes) = (exchange.rank(), exchange.world_size(), data.len());
            if bytes <= SMALL {
                let pieces = exchange.collect(scratch, bytes, |_| data.pieces(0..bytes).collect())?;
                return reduce_pieces(op, dtype, rank, &pieces, data.pieces_mut(0..bytes));
            }
            let chunk = |rank| byte_chunk(bytes, dtype.size(), world_size, rank);
            let own = chunk(rank);
            let pieces = exchange.collect(scratch, own.len(), |to| data.pieces(chunk(to)).collect())?;
            reduce_pieces(op, dtype, rank, &pieces, data.pieces_mut(own))?;
            exchange.gather_chunks(&mut data, dtype.size(), None)
        })
    }
}

/// Reduces into the buffers `data` of rank `own`, one after the other; `others` are all other ranks' in rank order.
fn reduce_pieces<'d>(
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
