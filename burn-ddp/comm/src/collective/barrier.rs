//! `barrier`: a header from every rank proves that every rank has arrived.

use super::{Collectives, FlatRoute};
use crate::dtype::DType;
use crate::error::Result;
use crate::operation::Operation;

impl Collectives {
    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// The error that ended the operation (see [`Collectives`]).
    pub fn barrier(&mut self) -> Result<()> {
        self.check()?;
        let header = self.header(Operation::Barrier, DType::U8, 0);
        self.run_flat(header, |route, _| match route {
            FlatRoute::SharedMemory(mut shared) => shared.agree(0).map(drop),
            FlatRoute::Wire(exchange) => exchange.barrier(),
        })
    }
}
