//! The engine over this package's own collectives: shared memory within a host, TCP between hosts.

use serde::{Serialize, de::DeserializeOwned};

use super::engine::{Engine, MakeEngine};
use super::memory::{HostMemory, Memory, Segment, Staged, zeroed};
use crate::collective::{Collectives, chunk};
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::net::codec;
use crate::operation::Operation;

/// Runs [`Collectives`] over memory of the host.
pub struct HostEngine {
    collectives: Collectives,
}

/// Host memory and its element type.
type HostSegment = (DType, Box<dyn HostMemory>);

impl HostEngine {
    /// An engine over `collectives`.
    pub fn new(collectives: Collectives) -> Self {
        Self { collectives }
    }

    /// Makes it the engine of its group.
    pub fn into_engine(self) -> MakeEngine {
        Box::new(|| Ok(Box::new(self)))
    }

    /// The values of all ranks, in rank order; `what` names them in errors. All ranks must call it, by `deadline`.
    ///
    /// # Errors
    /// Any error of the collective, and `Mismatch` for a value of another form.
    pub fn exchange<T: Serialize + DeserializeOwned>(
        &mut self,
        what: &str,
        mine: &T,
        deadline: Deadline,
    ) -> Result<Vec<T>> {
        let mine = codec::encode(what, mine)?;
        let all = self.collectives.within(deadline.remaining(), |all| all.all_gather_bytes(&mine))?;
        all.iter().map(|bytes| codec::decode(what, bytes)).collect()
    }

    /// Checks that all ranks start the same `operation` on `count` elements, for an engine that moves them by other
    /// means; see [`Collectives::announce`]. All ranks must call it, by `deadline`.
    ///
    /// # Errors
    /// `Mismatch` naming both ranks, and any error of the collective.
    pub fn announce(
        &mut self,
        operation: Operation,
        dtype: DType,
        count: usize,
        division: u64,
        deadline: Deadline,
    ) -> Result<()> {
        let announce = |all: &mut Collectives| all.announce(operation, dtype, count, division);
        self.collectives.within(deadline.remaining(), announce)
    }
}

impl Engine for HostEngine {
    fn run(&mut self, operation: Operation, staged: Staged) -> Result<Staged> {
        let mut segments = staged.into_iter().map(host).collect::<Result<Vec<_>>>()?;
        let all = &mut self.collectives;
        match operation {
            Operation::AllReduce(op) => {
                with_list(&mut segments, |dtype, data| all.all_reduce(dtype, op, data))?;
            }
            Operation::ReduceGradients(op) => {
                with_list(&mut segments, |dtype, data| all.reduce_gradients(dtype, op, data))?;
            }
            Operation::Broadcast(root) => {
                with_list(&mut segments, |dtype, data| all.broadcast(dtype, root, data))?;
            }
            Operation::ReduceScatter(op) => {
                let (dtype, input) = only(segments)?;
                let count = input.as_bytes().len() / dtype.size();
                let mine = chunk(count, all.world_size(), all.rank().0);
                let mut output = zeroed(dtype, mine.len() * dtype.size());
                all.reduce_scatter(dtype, op, input.as_bytes(), output.as_bytes_mut())?;
                segments = vec![(dtype, output)];
            }
            Operation::AllGather => {
                let (dtype, input) = only(segments)?;
                let mut output = zeroed(dtype, input.as_bytes().len() * all.world_size());
                all.all_gather(dtype, input.as_bytes(), output.as_bytes_mut())?;
                segments = vec![(dtype, output)];
            }
            Operation::AllGatherBytes => {
                segments = byte_segments(all.all_gather_bytes(only(segments)?.1.as_bytes())?);
            }
            Operation::GatherBytes(root) => {
                segments = byte_segments(all.gather_bytes(root, only(segments)?.1.as_bytes())?);
            }
            Operation::Barrier => all.barrier()?,
        }
        Ok(segments
            .into_iter()
            .map(|(dtype, memory)| Segment { dtype, memory: Memory::Host(memory) })
            .collect())
    }
}

/// Calls `run` with all `segments` as one run of elements of one type.
fn with_list(
    segments: &mut [HostSegment],
    run: impl FnOnce(DType, &mut [&mut [u8]]) -> Result<()>,
) -> Result<()> {
    let Some(&(dtype, _)) = segments.first() else {
        return run(DType::U8, &mut []);
    };
    if let Some((other, _)) = segments.iter().find(|(other, _)| *other != dtype) {
        return Err(Error::config(format!(
            "one collective over tensors of {dtype} and of {other}: all must have one dtype"
        )));
    }
    for (_, memory) in segments.iter_mut() {
        // A user may lend memory that begins at any byte; arithmetic needs aligned elements.
        if !(memory.as_bytes().as_ptr() as usize).is_multiple_of(dtype.size()) {
            let mut aligned = zeroed(dtype, memory.as_bytes().len());
            aligned.as_bytes_mut().copy_from_slice(memory.as_bytes());
            *memory = aligned;
        }
    }
    let mut list: Vec<&mut [u8]> = segments.iter_mut().map(|(_, memory)| memory.as_bytes_mut()).collect();
    run(dtype, &mut list)
}

fn byte_segments(all: Vec<Vec<u8>>) -> Vec<HostSegment> {
    all.into_iter().map(|bytes| (DType::U8, Box::new(bytes) as Box<dyn HostMemory>)).collect()
}

fn host(segment: Segment) -> Result<HostSegment> {
    match segment.memory {
        Memory::Host(memory) => Ok((segment.dtype, memory)),
        Memory::Device(memory) => {
            Err(Error::config(format!("device memory {memory:?} given to the host engine")))
        }
    }
}

fn only(mut segments: Vec<HostSegment>) -> Result<HostSegment> {
    match (segments.pop(), segments.len()) {
        (Some(segment), 0) => Ok(segment),
        (segment, others) => {
            let count = others + usize::from(segment.is_some());
            Err(Error::config(format!("this collective takes one tensor, got {count}")))
        }
    }
}
