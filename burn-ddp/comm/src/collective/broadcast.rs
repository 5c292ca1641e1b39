//! `broadcast`: small data straight from the root, large data in chunks that all ranks pass on, so that the root's wire
//! carries it at most twice and not once for each rank.

use super::chunk::byte_chunk;
use super::segments::Segments;
use super::wire::gather_chunks;
use super::{Collectives, FlatRoute, element_count};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::rank::Rank;
use crate::transport::exchange::Exchange;

/// Most bytes that the root sends to all ranks whole, in one phase rather than two of chunks: rounds cost more than
/// bytes.
const SMALL: usize = 4096;

impl Collectives {
    /// Replaces `data` on every rank by the root's. It is a list of buffers that count as one run of elements; ranks
    /// may divide the elements differently.
    ///
    /// # Errors
    /// `Config` for a buffer whose length is no multiple of the element size or a root outside the group; else what
    /// ended the operation (see [`Collectives`]), and `data` is then of no use.
    pub fn broadcast(&mut self, dtype: DType, root: Rank, data: &mut [&mut [u8]]) -> Result<()> {
        self.check()?;
        let mut count = 0;
        for part in data.iter() {
            count += element_count("the data of broadcast", dtype, part)?;
        }
        let mut data = Segments::new(data);
        let world_size = self.world_size();
        if root.0 >= world_size {
            return Err(Error::config(format!(
                "the root of broadcast is {root}, but the group has {world_size}"
            )));
        }
        let header = self.header(Operation::Broadcast(root), dtype, count);
        self.run_flat(header, |route, _| {
            let exchange = match route {
                FlatRoute::SharedMemory(mut shared) => return shared.broadcast(root.0, &mut data),
                FlatRoute::Wire(exchange) => exchange,
            };
            // Between two ranks chunks would take the same wire in two phases.
            if data.len() <= SMALL || world_size == 2 {
                return from_root(exchange, root, &mut data, |bytes, _| 0..bytes);
            }
            let chunk = |bytes, rank| byte_chunk(bytes, dtype.size(), world_size, rank);
            from_root(exchange, root, &mut data, chunk)?;
            gather_chunks(exchange, &mut data, dtype.size(), Some(root))
        })
    }
}

/// Phase 0: the root sends each rank its chunk of `data`; all others exchange headers only.
fn from_root(
    exchange: &mut Exchange<'_>,
    root: Rank,
    data: &mut Segments<'_, '_>,
    part: impl Fn(usize, Rank) -> std::ops::Range<usize>,
) -> Result<()> {
    let (rank, bytes) = (exchange.rank(), data.len());
    for (to, from) in exchange.rounds() {
        let out = if rank == root { part(bytes, to) } else { 0..0 };
        let own = if from == root { part(bytes, rank) } else { 0..0 };
        let (body, mut into) = data.borrow([out], own);
        exchange.swap(0, (to, from), &body, &mut into)?;
    }
    Ok(())
}
