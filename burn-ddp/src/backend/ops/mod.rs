//! The operation traits, one file each, every function forwarded to the backend inside.
//!
//! Functions with a default body are forwarded as well: the default would be right and slow, since it composes what
//! `B` may have in one kernel, and its rounding could differ from that kernel's.

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
