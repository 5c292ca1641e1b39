//! The operation traits, one file each; every function is forwarded to the backend inside.
//!
//! Functions with a default body are forwarded as well. The default composes several operations where `B` may have one
//! kernel, so it would be slower and could round differently.

mod activation;
mod bool;
mod float;
mod int;
mod module;
mod quantized;
mod transaction;

use burn_backend::{Backend, TensorPrimitive};

use super::Ddp;

fn to_inner<B: Backend>(tensor: TensorPrimitive<Ddp<B>>) -> TensorPrimitive<B> {
    match tensor {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
    }
}

fn from_inner<B: Backend>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Ddp<B>> {
    match tensor {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
    }
}
