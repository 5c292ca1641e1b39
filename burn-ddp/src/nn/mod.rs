//! Layers whose forward pass communicates.
