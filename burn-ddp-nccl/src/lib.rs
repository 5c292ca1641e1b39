//! NCCL communicator for `burn-ddp`.
