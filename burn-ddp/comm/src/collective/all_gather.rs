//! `all_gather`: everybody gets everybody's data, of equal or of any lengths; `gather`: only the root does.

use super::exchange::Exchange;
use super::{Collectives, Way, elements, expect_length};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::operation::Operation;

impl Collectives {
    /// Fills `output` on every rank with all ranks' `input`, one after the other in rank order.
    ///
    /// # Errors
    /// `Config` for a length that is no multiple of the element size or an `output` that is not exactly as
    /// long as all inputs; else what ended the operation (see [`Collectives`]).
    pub fn all_gather(&mut self, dtype: DType, input: &[u8], output: &mut [u8]) -> Result<()> {
        self.check()?;
        let count = elements("the input of all_gather", dtype, input)?;
        expect_length("the output of all_gather", output.len(), input.len() * self.world_size())?;
        let header = self.header(Operation::AllGather, dtype, count);
        self.operation(header, |way, _| match way {
            Way::Memory(mut shared) => shared.all_gather(input, output),
            Way::Wire(exchange) => gather(exchange, input, output),
        })
    }

    /// All ranks' `input` in rank order; lengths may differ from rank to rank.
    ///
    /// # Errors
    /// What ended the operation (see [`Collectives`]).
    pub fn all_gather_bytes(&mut self, input: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        let world_size = self.world_size();
        // The count of a header is the same on all ranks, and here no length is: they follow as data.
        let header = self.header(Operation::AllGatherBytes, DType::U8, 0);
        self.operation(header, |way, _| {
            let exchange = match way {
                Way::Memory(mut shared) => return shared.gather_bytes(None, input),
                Way::Wire(exchange) => exchange,
            };
            let mut lengths = vec![0u64; world_size];
            let own = input.len() as u64;
            gather(exchange, bytemuck::bytes_of(&own), bytemuck::cast_slice_mut(&mut lengths))?;
            let mut gathered = lengths.into_iter().enumerate().map(room).collect::<Result<Vec<Vec<u8>>>>()?;
            gathered[exchange.rank().0].copy_from_slice(input);
            for (to, from) in exchange.rounds() {
                exchange.swap(1, (to, from), &[input], &mut [&mut gathered[from.0]])?;
            }
            Ok(gathered)
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
        self.operation(header, |way, _| {
            let exchange = match way {
                Way::Memory(mut shared) => return shared.gather_bytes(Some(root.0), input),
                Way::Wire(exchange) => exchange,
            };
            let mut lengths = vec![0u64; world_size];
            let own = input.len() as u64;
            gather(exchange, bytemuck::bytes_of(&own), bytemuck::cast_slice_mut(&mut lengths))?;
            let is_root = exchange.rank() == root;
            if !is_root {
                lengths.fill(0);
            }
            let mut gathered = lengths.into_iter().enumerate().map(room).collect::<Result<Vec<Vec<u8>>>>()?;
            if is_root {
                gathered[root.0].copy_from_slice(input);
            }
            for (to, from) in exchange.rounds() {
                let body = if to == root { input } else { &[] };
                exchange.swap(1, (to, from), &[body], &mut [&mut gathered[from.0]])?;
            }
            Ok(if is_root { gathered } else { Vec::new() })
        })
    }
}

/// Phase 0: everybody's `input`, which is as long on all ranks.
fn gather(exchange: &mut Exchange<'_>, input: &[u8], output: &mut [u8]) -> Result<()> {
    let place = |rank: usize| rank * input.len()..(rank + 1) * input.len();
    output[place(exchange.rank().0)].copy_from_slice(input);
    for (to, from) in exchange.rounds() {
        exchange.swap(0, (to, from), &[input], &mut [&mut output[place(from.0)]])?;
    }
    Ok(())
}

/// Memory for what a rank announced. The length is another process's word, so a failed allocation is an error
/// and not the end of this one.
fn room((rank, length): (usize, u64)) -> Result<Vec<u8>> {
    let mut room = Vec::new();
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    room.try_reserve_exact(length).map_err(|error| {
        let message = format!("no memory for the {length} bytes that rank {rank} gives to all_gather");
        Error::with_source(ErrorKind::Io, message, error)
    })?;
    room.resize(length, 0);
    Ok(room)
}
