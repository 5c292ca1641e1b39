//! The memory that a group hands to its engine and gets back.
//!
//! A binding (burn-ddp, for one) takes the memory out of its tensors, hands it to the communication thread as
//! [`Staged`], and makes tensors of what comes back. An engine changes memory in place where it can. [`HostMemory`] is
//! a trait so that a binding's own buffers are reduced where they are, without a copy; it is implemented for `Vec`s of
//! plain numbers.

use std::any::Any;
use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::dtype::DType;

/// The memory of one tensor, or of several that travel as one.
#[derive(Debug)]
pub struct Segment {
    /// Element type on the wire.
    pub dtype: DType,
    /// Location of the elements.
    pub memory: Memory,
}

/// Memory on its way from the caller's thread to the communication thread, or back.
pub type Staged = Vec<Segment>;

/// Location of a segment's elements.
#[derive(Debug)]
pub enum Memory {
    /// Memory of this process.
    Host(Box<dyn HostMemory>),
    /// Memory of a device, known only to the communicator that staged it.
    Device(Box<dyn DeviceMemory>),
}

impl Memory {
    /// Size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Host(memory) => memory.as_bytes().len(),
            Self::Device(memory) => memory.bytes(),
        }
    }
}

/// Memory of this process that an engine may read and write on another thread. [`Any`] is a supertrait so that a
/// binding, when it gets the memory back, can turn the `Box<dyn HostMemory>` into a `Box<dyn Any>` and downcast that to
/// its own type. An engine may also return memory of another type, such as a `Vec`.
pub trait HostMemory: Any + Send + fmt::Debug {
    /// The elements, in the machine's byte order.
    fn as_bytes(&self) -> &[u8];

    /// The elements, for writing in place.
    fn as_bytes_mut(&mut self) -> &mut [u8];
}

impl<T: Pod + Send + fmt::Debug> HostMemory for Vec<T> {
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

/// Device memory of a communicator that reduces tensors where they are. [`Any`] is a supertrait so that its engine, and
/// later the communicator, can turn the `Box<dyn DeviceMemory>` into a `Box<dyn Any>` and downcast that to their own
/// type.
pub trait DeviceMemory: Any + Send + fmt::Debug {
    /// Size of the elements in bytes, without padding between tensors.
    fn bytes(&self) -> usize;
}

/// A number that collectives reduce and move.
pub trait Number: Pod + Send + Sync + fmt::Debug {
    /// Its type on the wire.
    const DTYPE: DType;
}

macro_rules! numbers {
    ($($number:ty: $dtype:ident),*) => {
        $(impl Number for $number {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

numbers!(u8: U8, i32: I32, i64: I64, f16: F16, bf16: BF16, f32: F32, f64: F64);

/// Zeroed memory of `bytes` bytes, aligned to the elements of `dtype`: a `Vec` of `u8`, `u16`, `u32` or `u64`.
pub fn zeroed(dtype: DType, bytes: usize) -> Box<dyn HostMemory> {
    match dtype.size() {
        8 => Box::new(vec![0u64; bytes / 8]),
        4 => Box::new(vec![0u32; bytes / 4]),
        2 => Box::new(vec![0u16; bytes / 2]),
        _ => Box::new(vec![0u8; bytes]),
    }
}
