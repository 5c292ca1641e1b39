//! The place of an NCCL communicator for `burn-ddp`: an implementation of its `Communicator` and `Engine` that
//! reduces CUDA tensors where they are. Nothing is in it; gradients of CUDA tensors travel through host memory.
