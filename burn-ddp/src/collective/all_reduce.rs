//! `all_reduce`: each rank owns a chunk, reduces what all have for it, and hands out the result.

use super::exchange::byte_chunk;
use super::tree::reduce_in_place;
use super::{Collectives, SMALL, aligned_elements};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::transport::OpKind;

impl Collectives {
    /// Replaces `data` on every rank by the reduction of all ranks' `data`; the same bits on all of them.
    ///
    /// # Errors
    /// `Config` for a length that is no multiple of the element size or a buffer that is not aligned to it;
    /// else what ended the operation (see [`Collectives`]), and `data` is then of no use.
    pub fn all_reduce(&mut self, dtype: DType, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        self.check()?;
        let count = aligned_elements("the data of all_reduce", dtype, data)?;
        let header = self.header(OpKind::AllReduce, dtype, count).with_reduce(op);
        self.operation(header, |exchange, scratch| {
            let rank = exchange.rank();
            if data.len() <= SMALL {
                let pieces = exchange.collect(scratch, data.len(), |_| &*data)?;
                return reduce_in_place(op, dtype, rank.0, &pieces, data);
            }
            let world_size = exchange.world_size();
            let chunk = |rank| byte_chunk(count * dtype.size(), dtype.size(), world_size, rank);
            let pieces = exchange.collect(scratch, chunk(rank).len(), |to| &data[chunk(to)])?;
            reduce_in_place(op, dtype, rank.0, &pieces, &mut data[chunk(rank)])?;
            exchange.gather_chunks(data, dtype.size(), None)
        })
    }
}
