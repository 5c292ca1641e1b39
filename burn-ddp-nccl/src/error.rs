//! What NCCL reports, as errors.
