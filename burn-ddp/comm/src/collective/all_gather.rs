//! `all_gather`: every rank gets the data of all ranks, of equal or of any lengths; `gather`: only the root does.

use super::{Collectives, FlatRoute, element_count, expect_length};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::rank::Rank;

impl Collectives {
    /// Fills `output` on every rank with all ranks' `input`, one after the other in rank order.
    ///
    /// # Errors
    /// `Config` for a length that is no multiple of the element size or an `output` that is not exactly as
    /// long as all inputs; else what ended the operation (see [`Collectives`]).
    pub fn all_gather(&mut self, dtype: DType, input: &[u8], output: &mut [u8]) -> Result<()> {
        self.check()?;
        let count = element_count("the input of all_gather", dtype, input)?;
        expect_length("the output of all_gather", output.len(), input.len() * self.world_size())?;
        let header = self.header(Operation::AllGather, dtype, count);
        self.run_flat(header, |route, _| match route {
            FlatRoute::SharedMemory(mut shared) => shared.all_gather(input, output),
            FlatRoute::Wire(exchange) => exchange.all_gather(input, output),
        })
    }

    /// All ranks' `input` in rank order; lengths may differ from rank to rank.
    ///
    /// # Errors
    /// The error that ended the operation (see [`Collectives`]).
    pub fn all_gather_bytes(&mut self, input: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        let header = self.header(Operation::AllGatherBytes, DType::U8, 0);
        self.run_flat(header, |route, _| match route {
            FlatRoute::SharedMemory(mut shared) => shared.gather_bytes(None, input),
            FlatRoute::Wire(exchange) => exchange.gather_bytes(None, input),
        })
    }

    /// On `root` all ranks' `input` in rank order, on the others nothing; lengths may differ from rank to rank.
    ///
    /// # Errors
    /// `Config` for a root outside the group; else what ended the operation (see [`Collectives`]).
    pub fn gather_bytes(&mut self, root: Rank, input: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        let world_size = self.world_size();
        if root.0 >= world_size {
            return Err(Error::config(format!(
                "the root of gather is {root}, but the group has {world_size}"
            )));
        }
        let header = self.header(Operation::GatherBytes(root), DType::U8, 0);
        self.run_flat(header, |route, _| match route {
            FlatRoute::SharedMemory(mut shared) => shared.gather_bytes(Some(root.0), input),
            FlatRoute::Wire(exchange) => exchange.gather_bytes(Some(root), input),
        })
    }
}
