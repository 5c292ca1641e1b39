//! Burn's `SupervisedTraining` on many processes.
