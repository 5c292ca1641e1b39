//! The built programs run as users run them, and parts of them, in one test program: each that links Burn takes its
//! time.

mod all_reduce;
mod fashion_mnist;
mod gpt;
mod nccl_all_reduce;
mod process;
