//! `reduce_scatter`: the first half of an `all_reduce`, for callers that keep only their chunk.

use std::ops::Range;

use super::chunk::{block_count, byte_chunk};
use super::wire::collect;
use super::{Collectives, FlatRoute, aligned_element_count, element_count, expect_length};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::operation::Operation;
use crate::rank::Rank;
use crate::reduction::reduce_in_place;

impl Collectives {
    /// Fills `output` on each rank with its [`chunk`](super::chunk) of the reduction of all ranks' `input`.
    /// The bits are those of an [`all_reduce`](Collectives::all_reduce).
    ///
    /// # Errors
    /// `Config` for a length that is no multiple of the element size, an `output` that is not aligned or not
    /// exactly this rank's chunk; else what ended the operation (see [`Collectives`]).
    pub fn reduce_scatter(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        self.check()?;
        let count = element_count("the input of reduce_scatter", dtype, input)?;
        aligned_element_count("the output of reduce_scatter", dtype, output)?;
        let (rank, world_size) = (self.rank(), self.world_size());
        let chunk = |rank| byte_chunk(input.len(), dtype.size(), world_size, rank);
        expect_length("the output of reduce_scatter", output.len(), chunk(rank).len())?;
        let header = self.header(Operation::ReduceScatter(op), dtype, count);
        self.run_flat(header, |route, scratch| {
            let exchange = match route {
                FlatRoute::SharedMemory(mut shared) => {
                    return shared.reduce_scatter(dtype, op, input, output);
                }
                FlatRoute::Wire(exchange) => exchange,
            };
            output.copy_from_slice(&input[chunk(rank)]);
            // The first rank's chunk is the longest, so that all have the same number of blocks.
            let blocks = block_count(chunk(Rank(0)).len() * (world_size - 1));
            for index in 0..blocks {
                let part = |of: Range<usize>| {
                    let part = byte_chunk(of.len(), dtype.size(), blocks, Rank(index));
                    of.start + part.start..of.start + part.end
                };
                let own = part(0..output.len());
                let pieces = collect(exchange, scratch, own.len(), |to| vec![&input[part(chunk(to))]])?;
                reduce_in_place(op, dtype, rank.0, &pieces, &mut output[own])?;
            }
            Ok(())
        })
    }
}
