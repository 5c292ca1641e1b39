//! Collective operations over a wire, a host's shared memory, or both.
//!
//! The algorithms stand between the wire, which moves frames and knows no arithmetic, and the communicator,
//! which knows tensors and no peers. They see bytes, a [`DType`] and a [`ReduceOp`](crate::dtype::ReduceOp), so they serve every
//! binding and every transport.
//!
//! With `N` ranks and a buffer of `n` bytes:
//!
//! | operation | rounds | bytes sent by a rank |
//! |---|---|---|
//! | `all_reduce`, whole | N-1 | n (N-1) |
//! | `all_reduce`, direct | 2 (N-1) | 2 n (N-1)/N |
//! | `all_reduce`, halving | 2 log2 N | 2 n (N-1)/N, more for types that are combined in a larger one |
//! | `reduce_scatter` | N-1 | n (N-1)/N |
//! | `all_gather`, n per rank | N-1 | n (N-1) |
//! | `gather`, n per rank | N-1 | root: 0, others: n |
//! | `broadcast` | 2 (N-1) | root: 2 n (N-1)/N, others: n (N-2)/N |
//! | `broadcast` up to 4 KiB or between two | N-1 | root: n (N-1), others: 0 |
//! | `barrier` | N-1 | 0 |
//!
//! Large data takes that many rounds for each block of a few MiB. Which algorithm an `all_reduce` uses is a matter of
//! cost ([`Algorithm`]) and never of the result: whoever has the data of all ranks for an element combines it in the one
//! fixed order ([`reduction`](crate::reduction)), and what halving combines earlier is a node of that tree. A ring's order starts elsewhere in
//! each chunk, so there is none.
//!
//! Ranks that disagree on what they are doing learn it in the operation where they do: every pair of ranks exchanges
//! headers in it, or, in halving and over several hosts, every rank waits for every other through a chain of ranks that do.
//! Where such chains close to a ring in which no two ranks that disagree ever face each other, the wire finds out within
//! a second by looking at the frames that others have sent.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::reduction::is_aligned;
use crate::transport::{Header, OpKind, Transport};

mod all_gather;
mod all_reduce;
mod barrier;
mod broadcast;
mod chunk;
mod cost;
mod exchange;
mod halving;
mod hierarchical;
mod hosts;
mod reduce_scatter;
mod scratch;
mod segments;
mod shared;

pub use chunk::chunk;
pub use cost::Algorithm;
pub use hosts::Sharing;

use exchange::Exchange;
use hosts::Hosts;
use scratch::Scratch;
use shared::Shared;

/// The collective operations of one rank.
///
/// All ranks must call the same methods in the same order with the same counts, types and roots; a call that
/// does not match is an error on every rank involved. After an error of the wire this value is poisoned and
/// each later call returns that first error. Wrong arguments ([`ErrorKind::Config`]) are found before anything
/// is sent and poison nothing, but the call has then not taken part in the operation.
///
/// Buffers are bytes in the machine's byte order. Those of reductions must be aligned to their elements.
///
/// [`ErrorKind::Config`]: crate::error::ErrorKind::Config
pub struct Collectives {
    transport: Box<dyn Transport>,
    /// `None` while no two ranks share memory.
    hosts: Option<Hosts>,
    timeout: Duration,
    sequence: u64,
    scratch: Scratch,
    algorithm: Option<Algorithm>,
    failed: Option<Error>,
}

impl Collectives {
    /// Operations over `transport`, each of which may last `timeout`.
    pub fn new(transport: Box<dyn Transport>, timeout: Duration) -> Self {
        Self {
            transport,
            hosts: None,
            timeout,
            sequence: 0,
            scratch: Scratch::default(),
            algorithm: None,
            failed: None,
        }
    }

    /// The same with one algorithm for every `all_reduce` over a wire that connects all ranks, whatever it costs; `None`
    /// chooses by cost again. All ranks must have the same. Ranks that share memory have a way of their own.
    ///
    /// # Errors
    /// `Config` for an algorithm that is not defined for this number of ranks.
    pub fn with_algorithm(self, algorithm: Option<Algorithm>) -> Result<Self> {
        match algorithm.filter(|algorithm| !algorithm.works_for(self.world_size())) {
            None => Ok(Self { algorithm, ..self }),
            Some(algorithm) => Err(Error::config(format!(
                "{algorithm:?} needs a number of ranks that is a power of two, and the group has {}: choose another \
                 algorithm or none",
                self.world_size()
            ))),
        }
    }

    /// This process.
    pub fn rank(&self) -> Rank {
        self.transport.rank()
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    /// Number of the next operation: how many have been started so far.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Runs `run` with another limit for each operation in it.
    pub fn within<T>(&mut self, timeout: Duration, run: impl FnOnce(&mut Self) -> T) -> T {
        let usual = std::mem::replace(&mut self.timeout, timeout);
        let result = run(self);
        self.timeout = usual;
        result
    }

    /// `Err` with the first error after one.
    fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn header(&self, kind: OpKind, dtype: DType, count: usize) -> Header {
        Header::new(kind, self.sequence, dtype, count)
    }

    /// Runs one operation: one sequence number, one deadline, and poison if it fails. Over several hosts the wire is used
    /// once the ranks of each host have agreed on the operation: a rank that waits for a peer of its own host in shared
    /// memory would not hear of it over the wire.
    fn operation<T>(
        &mut self,
        header: Header,
        run: impl FnOnce(Way<'_, '_>, &mut Scratch) -> Result<T>,
    ) -> Result<T> {
        self.by_road(header, |road, scratch| match road {
            Road::Memory(shared) => run(Way::Memory(shared), scratch),
            Road::Wire(exchange) => run(Way::Wire(exchange), scratch),
            Road::Hosts(hosts, exchange) => {
                if let Some(region) = &mut hosts.region {
                    Shared { region, header, deadline: exchange.deadline }.agree(0)?;
                }
                run(Way::Wire(exchange), scratch)
            }
        })
    }

    /// Like [`operation`](Self::operation), for one that knows what to do with a group over several hosts.
    fn by_road<T>(
        &mut self,
        header: Header,
        run: impl FnOnce(Road<'_, '_>, &mut Scratch) -> Result<T>,
    ) -> Result<T> {
        self.sequence = self.sequence.wrapping_add(1);
        let deadline = Deadline::after(self.timeout);
        let mut exchange = Exchange { transport: self.transport.as_mut(), header, deadline };
        let result = match &mut self.hosts {
            Some(Hosts { table, region: Some(region), .. }) if table.len() == 1 => {
                run(Road::Memory(Shared { region, header, deadline }), &mut self.scratch)
            }
            Some(hosts) => run(Road::Hosts(hosts, &mut exchange), &mut self.scratch),
            None => run(Road::Wire(&mut exchange), &mut self.scratch),
        };
        if let (Err(error), Some(Hosts { region: Some(region), .. })) = (&result, &self.hosts) {
            // Whatever it was, peers wait on the board for a step that does not come.
            region.fail(error.clone());
        }
        self.failed = result.as_ref().err().cloned();
        result
    }
}

/// How an operation reaches its peers.
enum Way<'a, 't> {
    /// All of them share memory.
    Memory(Shared<'a>),
    /// All of them have a wire to all others.
    Wire(&'a mut Exchange<'t>),
}

/// A [`Way`], or a mixture of both.
enum Road<'a, 't> {
    Memory(Shared<'a>),
    Wire(&'a mut Exchange<'t>),
    Hosts(&'a mut Hosts, &'a mut Exchange<'t>),
}

/// Elements in `data`, the argument that `name` names.
fn elements(name: &str, dtype: DType, data: &[u8]) -> Result<usize> {
    if data.len().is_multiple_of(dtype.size()) {
        return Ok(data.len() / dtype.size());
    }
    Err(Error::config(format!(
        "{name} has {} bytes, which is no multiple of the {} bytes of {dtype}",
        data.len(),
        dtype.size()
    )))
}

/// Like [`elements`], for an argument that takes part in arithmetic where it is.
fn aligned_elements(name: &str, dtype: DType, data: &[u8]) -> Result<usize> {
    let count = elements(name, dtype, data)?;
    if is_aligned(dtype, data) {
        return Ok(count);
    }
    Err(Error::config(format!("{name} is not aligned to the {} bytes of {dtype}", dtype.size())))
}

/// Refuses an output of another length than the operation fills.
fn expect_length(name: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::config(format!("{name} has {got} bytes, but the operation fills {expected}")))
}
