//! Burn-DDP dtypes and reductions as NCCL numbers them.
