//! Burn's `SupervisedTraining` on many processes.

mod renderer;
#[cfg_attr(not(test), allow(dead_code))]
mod silent;

pub use renderer::PlainRenderer;
