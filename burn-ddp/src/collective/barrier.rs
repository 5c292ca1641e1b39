//! `barrier`: a header from everybody proves that everybody has arrived.

use super::Collectives;
use crate::dtype::DType;
use crate::error::Result;
use crate::transport::OpKind;

impl Collectives {
    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// What ended the operation (see [`Collectives`]).
    pub fn barrier(&mut self) -> Result<()> {
        self.check()?;
        let header = self.header(OpKind::Barrier, DType::U8, 0);
        self.operation(header, |exchange, _| {
            exchange.rounds().try_for_each(|round| exchange.swap(0, round, &[], &mut []))
        })
    }
}
