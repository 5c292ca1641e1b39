//! The operation traits, one file each; every function is forwarded to the backend inside.
//!
//! Functions with a default body are forwarded as well. The default composes several operations where `B` may have one
//! kernel, so it would be slower and could round differently.

/// Writes functions that only call the function of the same name of the backend inside.
macro_rules! forward {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)?;)*) => {
        $(fn $name($($argument: $type),*) $(-> $output)? {
            B::$name($($argument),*)
        })*
    };
}

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
