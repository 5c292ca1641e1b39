//! Reading several tensors at once.

use burn_backend::{
    Backend, ExecutionError,
    ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData},
};

use crate::backend::Ddp;

impl<B: Backend> TransactionOps<Self> for Ddp<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        // The order of registration is a private field, which Burn keeps outside this call, so it is not lost.
        B::tr_execute(TransactionPrimitive::new(
            transaction.read_floats,
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
    }
}
