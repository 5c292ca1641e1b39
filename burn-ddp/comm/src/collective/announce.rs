//! `announce`: ranks agree on an operation that moves its data by other means.

use super::{Collectives, FlatRoute};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::operation::Operation;
use crate::rank::Rank;

/// Phase of an announced operation; tells it from one whose data goes over the wire.
const ANNOUNCED: u8 = 0xA0;

impl Collectives {
    /// Checks that all ranks start the same operation, which then moves its data by other means. NCCL needs this: it
    /// has no headers, waits for ever where ranks disagree, and cannot say which rank is late. Each rank tells the next
    /// one, in a ring: if two ranks disagree, so do two neighbours, and a rank that does not come is missed by exactly
    /// one other, which names it.
    ///
    /// `division` is a number for how the `count` elements are divided into tensors, equal where they are divided
    /// alike: an implementation that pads between tensors sends other amounts for another division of the same count.
    ///
    /// # Errors
    /// The error that ended the operation (see [`Collectives`]).
    pub fn announce(
        &mut self,
        operation: Operation,
        dtype: DType,
        count: usize,
        division: u64,
    ) -> Result<()> {
        self.check()?;
        let header = self.header(operation, dtype, count);
        let mine = division.to_le_bytes();
        let differ = |me: Rank, peer: Rank| {
            let text = format!(
                "{operation}: {me} and {peer} divide {count} x {dtype} into tensors of other sizes: give lists of \
                 equal sizes"
            );
            Err(Error::new(ErrorKind::Mismatch, text))
        };
        let me = self.rank();
        self.run_flat(header.with_body(ANNOUNCED, 0), |route, _| {
            let exchange = match route {
                FlatRoute::SharedMemory(mut shared) => {
                    let divisions = shared.agree(division)?;
                    let other = divisions.iter().position(|theirs| *theirs != division);
                    return other.map_or(Ok(()), |member| differ(me, shared.rank_of(member)));
                }
                FlatRoute::Wire(exchange) => exchange,
            };
            let Some(round) = exchange.rounds().next() else { return Ok(()) };
            let mut theirs = [0; size_of::<u64>()];
            exchange.swap(ANNOUNCED, round, &[&mine], &mut [&mut theirs])?;
            if theirs == mine {
                return Ok(());
            }
            differ(me, round.1)
        })
    }
}
