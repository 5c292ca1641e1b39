//! Collective operations over a wire, a host's shared memory, or both.
//!
//! The algorithms stand between the transport, which moves frames and knows no arithmetic, and the communicators, which
//! know tensors and no peers. They see bytes, a [`DType`] and a [`ReduceOp`](crate::dtype::ReduceOp), so they serve
//! every binding and every transport.
//!
//! ```text
//! Collectives::all_reduce(..)          checks its arguments, makes the header
//!   Collectives::run(header, ..)       sequence number, deadline, choice of the route; keeps the first error
//!     Route::SharedMemory              all ranks on one host: steps in shared memory      shared.rs
//!     Route::Wire                      no two ranks on one host: rounds of frames         all_reduce.rs, halving.rs ..
//!     Route::Hierarchical              several hosts: memory inside, frames between       hierarchical.rs
//! ```
//!
//! With `N` ranks and a buffer of `n` bytes, over a wire:
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
//! cost ([`Algorithm`]) and never of the result: a rank that has the data of all ranks for an element combines it in
//! the one fixed order ([`reduction`](crate::reduction)), and what halving combines earlier is a node of that tree.
//!
//! Ranks that are in different operations learn it within the operation. Every pair of ranks exchanges headers; in
//! halving and over several hosts only some pairs do, and every rank waits for every other through a chain of such
//! pairs. Where the chains close to a ring in which no two ranks that disagree face each other, the transport finds out
//! within a second by looking at the frames that others have sent.
//!
//! # Adding a collective
//!
//! docs/architecture.md has the same steps with all file names; these are the rules of each.
//!
//! 1. A variant of [`Operation`]: its name, its reduction and root if it has them, and its number in frames.
//! 2. An algorithm for the wire: a function over `&mut Exchange`, made of `rounds` and `swap`. In one phase every rank
//!    sends one frame to every other, if only an empty one; each phase has a number of its own.
//! 3. An algorithm for shared memory as a method of `ShmExchange` (`shared.rs`): `begin` in its first step, then
//!    `write` and `read`. All ranks take the same number of steps for the same header.
//! 4. A method of [`Collectives`] in the file of step 2: `check`, refuse wrong arguments before anything is sent, make
//!    the header, then call `run_flat` with a closure that has an arm for each of the two algorithms. An operation with
//!    an algorithm of its own over several hosts calls `run` instead, as `all_reduce` does.
//! 5. An arm in each engine that matches on [`Operation`]: the host engine and that of burn-ddp-nccl.
//! 6. The methods of the groups that programs call.
//! 7. Tests: values, disagreement, and the loss of a rank.
//! 8. A row in the table above.

use std::time::Duration;

use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::rank::Rank;
use crate::reduction::is_aligned;
use crate::topology::Topology;
use crate::transport::exchange::Exchange;
use crate::transport::{Header, Transport};

mod all_gather;
mod all_reduce;
mod announce;
mod barrier;
mod broadcast;
mod chunk;
mod cost;
mod halving;
mod hierarchical;
mod reduce_scatter;
mod scratch;
mod segments;
mod shared;
mod wire;

pub use chunk::chunk;
pub use cost::Algorithm;

use scratch::Scratch;
use shared::ShmExchange;

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
    topology: Topology,
    timeout: Duration,
    sequence: u64,
    scratch: Scratch,
    algorithm: Option<Algorithm>,
    failed: Option<Error>,
}

impl Collectives {
    /// Operations over `transport` between ranks on the hosts of `topology`, each of which may last `timeout`.
    pub fn new(transport: Box<dyn Transport>, topology: Topology, timeout: Duration) -> Self {
        Self {
            transport,
            topology,
            timeout,
            sequence: 0,
            scratch: Scratch::default(),
            algorithm: None,
            failed: None,
        }
    }

    /// The same with one algorithm for every `all_reduce` over a wire that connects all ranks, whatever it costs;
    /// `None` chooses by cost again. All ranks must have the same. Ranks that share memory do not use it.
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

    fn header(&self, operation: Operation, dtype: DType, count: usize) -> Header {
        Header::new(operation, self.sequence, dtype, count)
    }

    /// Runs one operation over the route that the topology gives: one sequence number, one deadline, and poison if it
    /// fails.
    fn run<T>(
        &mut self,
        header: Header,
        operation: impl FnOnce(Route<'_, '_>, &mut Scratch) -> Result<T>,
    ) -> Result<T> {
        self.sequence = self.sequence.wrapping_add(1);
        let deadline = Deadline::after(self.timeout);
        let mut exchange = Exchange { transport: self.transport.as_mut(), header, deadline };
        let shares_memory = self.topology.shares_memory();
        let Topology { hosts, region } = &mut self.topology;
        let local = region.as_mut().map(|region| ShmExchange { region, header, deadline });
        let route = match local {
            Some(shared) if hosts.len() == 1 => Route::SharedMemory(shared),
            local if shares_memory => Route::Hierarchical { hosts, local, exchange: &mut exchange },
            _ => Route::Wire(&mut exchange),
        };
        let result = operation(route, &mut self.scratch);
        if let (Err(error), Some(region)) = (&result, &self.topology.region) {
            // Whatever the error is, peers wait in shared memory for a step that does not come.
            region.fail(error.clone());
        }
        self.failed = result.as_ref().err().cloned();
        result
    }

    /// Like [`run`](Self::run) for an operation that treats several hosts like none: all ranks use the wire, once the
    /// ranks of each host have agreed on the operation. A rank that waits for a peer of its own host in shared memory
    /// would otherwise not learn over the wire that another rank is in another operation.
    fn run_flat<T>(
        &mut self,
        header: Header,
        operation: impl FnOnce(FlatRoute<'_, '_>, &mut Scratch) -> Result<T>,
    ) -> Result<T> {
        self.run(header, |route, scratch| match route {
            Route::SharedMemory(shared) => operation(FlatRoute::SharedMemory(shared), scratch),
            Route::Wire(exchange) => operation(FlatRoute::Wire(exchange), scratch),
            Route::Hierarchical { local, exchange, .. } => {
                if let Some(mut local) = local {
                    local.agree(0)?;
                }
                operation(FlatRoute::Wire(exchange), scratch)
            }
        })
    }
}

/// The means by which an operation reaches the peers.
enum Route<'a, 't> {
    /// All ranks share memory.
    SharedMemory(ShmExchange<'a>),
    /// No two ranks share memory.
    Wire(&'a mut Exchange<'t>),
    /// Some ranks share memory: several hosts.
    Hierarchical {
        hosts: &'a [Vec<Rank>],
        /// The memory of this rank's host, unless this rank is alone there.
        local: Option<ShmExchange<'a>>,
        /// A wire between all ranks.
        exchange: &'a mut Exchange<'t>,
    },
}

/// A [`Route`] on which all ranks are reached by the same means.
enum FlatRoute<'a, 't> {
    SharedMemory(ShmExchange<'a>),
    Wire(&'a mut Exchange<'t>),
}

/// Number of elements in `data`, the argument that `name` names.
fn element_count(name: &str, dtype: DType, data: &[u8]) -> Result<usize> {
    if data.len().is_multiple_of(dtype.size()) {
        return Ok(data.len() / dtype.size());
    }
    Err(Error::config(format!(
        "{name} has {} bytes, which is no multiple of the {} bytes of {dtype}",
        data.len(),
        dtype.size()
    )))
}

/// Like [`element_count`], for an argument that takes part in arithmetic where it is.
fn aligned_element_count(name: &str, dtype: DType, data: &[u8]) -> Result<usize> {
    let count = element_count(name, dtype, data)?;
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
