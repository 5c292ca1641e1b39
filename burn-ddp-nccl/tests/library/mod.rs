//! The search for NCCL, and what a real one answers without a device. The libraries are stubs of a few lines, built
//! here. Each search runs in a process of its own, since the system's linker reads its environment once.

mod child;
mod real;
mod search;
mod stub;
