//! Execution of one collective on memory. Dtypes and reductions are decoded from `nccl.h`'s numbers here, on purpose
//! without the table that is under test.

use std::ffi::{c_int, c_void};
use std::ptr;

use burn_ddp::{DType, Rank, ReduceOp, Result};
use burn_ddp_comm::collective::Collectives;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    ReduceScatter,
    AllGather,
}

/// One collective; memory by its address, since it goes to the thread of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    kind: Kind,
    send: usize,
    recv: usize,
    count: usize,
    dtype: DType,
    op: ReduceOp,
    root: Rank,
}

impl Work {
    /// `None` for numbers that NCCL does not have, and for null pointers.
    pub(super) fn new(
        kind: Kind,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: c_int,
        op: Option<c_int>,
        root: c_int,
    ) -> Option<Self> {
        let dtype = match dtype {
            1 => DType::U8,
            2 => DType::I32,
            4 => DType::I64,
            6 => DType::F16,
            7 => DType::F32,
            8 => DType::F64,
            9 => DType::BF16,
            _ => return None,
        };
        let op = match op {
            None | Some(0) => ReduceOp::Sum,
            Some(2) => ReduceOp::Max,
            Some(3) => ReduceOp::Min,
            Some(4) => ReduceOp::Mean,
            _ => return None,
        };
        let root = Rank(usize::try_from(root).ok()?);
        let (send, recv) = (send.expose_provenance(), recv.expose_provenance());
        let missing = send == 0 || (recv == 0 && kind != Kind::Reduce);
        (!missing || count == 0).then_some(Self { kind, send, recv, count, dtype, op, root })
    }

    /// # Safety
    ///
    /// The memory is valid, and nothing else uses it.
    pub(super) unsafe fn run(&self, all: &mut Collectives) -> Result<()> {
        let Self { kind, send, recv, count, dtype, op, root } = *self;
        let (bytes, ranks, is_root) = (count * dtype.size(), all.world_size(), all.rank() == root);
        // SAFETY: of the caller.
        let read = |bytes| unsafe { Copied::from(send, bytes) };
        let result = match kind {
            Kind::AllReduce | Kind::Reduce => {
                let mut data = read(bytes);
                all.all_reduce(dtype, op, &mut [data.bytes_mut()])?;
                data
            }
            Kind::Broadcast => {
                let mut data = if is_root { read(bytes) } else { Copied::zeros(bytes) };
                all.broadcast(dtype, root, &mut [data.bytes_mut()])?;
                data
            }
            Kind::ReduceScatter => {
                let mut output = Copied::zeros(bytes);
                all.reduce_scatter(dtype, op, read(bytes * ranks).bytes_mut(), output.bytes_mut())?;
                output
            }
            Kind::AllGather => {
                let mut output = Copied::zeros(bytes * ranks);
                all.all_gather(dtype, read(bytes).bytes_mut(), output.bytes_mut())?;
                output
            }
        };
        if kind != Kind::Reduce || is_root {
            // SAFETY: of the caller.
            unsafe { result.write(recv) };
        }
        Ok(())
    }
}

/// Bytes of a buffer, aligned for every dtype.
struct Copied {
    words: Vec<u64>,
    length: usize,
}

impl Copied {
    fn zeros(length: usize) -> Self {
        Self { words: vec![0; length.div_ceil(8)], length }
    }

    /// # Safety
    ///
    /// There are `length` bytes at `address`.
    unsafe fn from(address: usize, length: usize) -> Self {
        let mut copy = Self::zeros(length);
        // SAFETY: of the caller; a copy overlaps nothing.
        unsafe {
            ptr::copy(ptr::with_exposed_provenance::<u8>(address), copy.words.as_mut_ptr().cast(), length)
        };
        copy
    }

    /// # Safety
    ///
    /// There is room for all of it at `address`.
    unsafe fn write(&self, address: usize) {
        let from = self.words.as_ptr().cast::<u8>();
        // SAFETY: of the caller.
        unsafe { ptr::copy(from, ptr::with_exposed_provenance_mut(address), self.length) };
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `length` bytes were allocated, all of them set.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.length) }
    }
}
