//! The collective by itself on the calling thread, without tensors, communication thread and Burn.

use std::sync::Arc;

use burn_ddp::{DType, GroupOptions, Rank, RankInfo, ReduceOp, Result};
use burn_ddp_benches::pattern::Pattern;
use burn_ddp_comm::collective::Collectives;
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::group::{Connection, connect};
use burn_ddp_comm::net::address::local_address;
use burn_ddp_comm::store::{Store, TcpStore};

use crate::AllReduce;

pub(crate) struct Direct {
    // Dropped before the store, which others may need until this rank has said goodbye.
    joined: Connection,
    _store: Arc<dyn Store>,
    segments: usize,
    dtype: DType,
    bytes: usize,
    /// The buffer, of a type that is aligned for every element.
    memory: Vec<f64>,
    one: Vec<f64>,
}

impl Direct {
    pub(crate) fn new(info: RankInfo, segments: usize) -> Result<Self> {
        let options = GroupOptions::from_env()?;
        let deadline = Deadline::after(options.rendezvous_timeout);
        let store = TcpStore::from_rank_info(&info, options.rendezvous_timeout)?;
        let address = local_address(options.interface.as_deref(), store.local_addr().ip())?;
        let store: Arc<dyn Store> = Arc::new(store);
        let joined = connect(&store, "0", &info, &options, address, deadline)?;
        let (dtype, memory) = (DType::U8, Vec::new());
        Ok(Self { joined, _store: store, segments, dtype, bytes: 0, memory, one: vec![0.0] })
    }

    fn data(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.memory)[..self.bytes]
    }

    fn data_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.memory)[..self.bytes]
    }
}

/// The sum of all ranks' `segments`, in place.
fn sum(collectives: &mut Collectives, dtype: DType, segments: &mut [&mut [u8]]) -> Result<()> {
    collectives.all_reduce(dtype, ReduceOp::Sum, segments)
}

impl AllReduce for Direct {
    fn place(&self) -> (Rank, usize) {
        (self.joined.collectives.rank(), self.joined.collectives.world_size())
    }

    fn prepare(&mut self, dtype: DType, bytes: usize) -> Result<()> {
        (self.dtype, self.bytes) = (dtype, bytes);
        self.memory = vec![0.0; bytes.div_ceil(size_of::<f64>())];
        Ok(())
    }

    fn align(&mut self) -> Result<()> {
        let one = &mut bytemuck::cast_slice_mut(&mut self.one)[..4];
        sum(&mut self.joined.collectives, DType::F32, &mut [one])
    }

    fn fill(&mut self, pattern: Option<&Pattern>) -> Result<()> {
        match pattern {
            Some(pattern) => pattern.fill(self.data_mut()),
            None => self.data_mut().fill(0),
        }
        Ok(())
    }

    fn reduce(&mut self) -> Result<()> {
        let dtype = self.dtype;
        let share = (self.bytes / dtype.size()).div_ceil(self.segments).max(1) * dtype.size();
        let data = &mut bytemuck::cast_slice_mut(&mut self.memory)[..self.bytes];
        let mut segments: Vec<_> = data.chunks_mut(share).collect();
        sum(&mut self.joined.collectives, dtype, &mut segments)
    }

    fn check(&self, pattern: &Pattern) -> Result<()> {
        pattern.check(self.data())
    }

    fn finish(self: Box<Self>, outcome: Result<()>) -> Result<()> {
        outcome.inspect_err(|error| self.joined.control.abort(error))
    }
}
