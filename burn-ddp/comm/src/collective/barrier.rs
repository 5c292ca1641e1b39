//! Operations of headers only: `barrier`, in which a header from everybody proves that everybody has arrived, and
//! `announce`, in which one from a neighbour proves that he does the same.

use super::{Collectives, Way};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::operation::Operation;

/// Tells an announced operation, which moves its data by other means, from one over the wire.
const ANNOUNCED: u8 = 0xA0;

impl Collectives {
    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// What ended the operation (see [`Collectives`]).
    pub fn barrier(&mut self) -> Result<()> {
        self.check()?;
        let header = self.header(Operation::Barrier, DType::U8, 0);
        self.operation(header, |way, _| match way {
            Way::Memory(mut shared) => shared.agree(0).map(drop),
            Way::Wire(exchange) => {
                exchange.rounds().try_for_each(|round| exchange.swap(0, round, &[], &mut []))
            }
        })
    }

    /// Checks that all ranks start the same operation, which is then done by other means: NCCL has no headers, waits for
    /// ever where ranks disagree, and cannot say who is late. Each rank tells the next one, in a ring: if two ranks
    /// disagree, so do two neighbours, and a rank that does not come is missed by exactly one other, which names it.
    ///
    /// `division` is a number for how the `count` elements are divided into tensors, equal where they are divided
    /// alike: whoever pads between tensors sends other amounts for another division of one count.
    ///
    /// # Errors
    /// What ended the operation (see [`Collectives`]).
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
                "{operation}: {me} and {peer} divide {count} x {dtype} into tensors of other sizes: give lists of equal sizes"
            );
            Err(Error::new(ErrorKind::Mismatch, text))
        };
        let me = self.rank();
        self.operation(header.with_body(ANNOUNCED, 0), |way, _| {
            let exchange = match way {
                Way::Memory(mut shared) => {
                    let divisions = shared.agree(division)?;
                    let other = divisions.iter().position(|theirs| *theirs != division);
                    return other.map_or(Ok(()), |member| differ(me, shared.rank_of(member)));
                }
                Way::Wire(exchange) => exchange,
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
