//! One operation in progress over a transport: the pairs of ranks that talk to each other, and their header.
//!
//! Every operation is made of rounds. In round `s` a rank sends to the rank `s` places after it and receives from the
//! rank `s` places before it, both at once, so the load is even and no two ranks can wait for each other:
//!
//! ```text
//! round 1   0 ─▶ 1 ─▶ 2 ─▶ 3 ─▶ 0        round 2   0 ◀─▶ 2, 1 ◀─▶ 3        round 3   0 ─▶ 3 ─▶ 2 ─▶ 1 ─▶ 0
//! ```
//!
//! The rounds of one phase together bring one frame from every rank to every other, if only an empty one. A rank that
//! is in another operation is therefore found within this one.

use super::{Header, Transport};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;

pub(crate) struct Exchange<'a> {
    pub(crate) transport: &'a mut dyn Transport,
    pub(crate) header: Header,
    pub(crate) deadline: Deadline,
}

impl Exchange<'_> {
    pub(crate) fn rank(&self) -> Rank {
        self.transport.rank()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    /// For each round, the rank to send to and the rank to receive from.
    pub(crate) fn rounds(&self) -> impl Iterator<Item = (Rank, Rank)> + use<> {
        let (rank, world_size) = (self.rank().0, self.world_size());
        (1..world_size).map(move |step| {
            (Rank((rank + step) % world_size), Rank((rank + world_size - step) % world_size))
        })
    }

    /// Runs one round of phase `phase`: sends `body` to `to` while `into` is filled by `from`.
    pub(crate) fn swap(
        &mut self,
        phase: u8,
        (to, from): (Rank, Rank),
        body: &[&[u8]],
        into: &mut [&mut [u8]],
    ) -> Result<()> {
        let header = self.header.with_body(phase, body.iter().map(|part| part.len()).sum());
        let expect = self.header.with_body(phase, into.iter().map(|part| part.len()).sum());
        self.transport.send_recv(to, &header, body, from, &expect, into, self.deadline)
    }

    /// Runs phase 0 without data: returns when all ranks have come to it.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        self.rounds().try_for_each(|round| self.swap(0, round, &[], &mut []))
    }

    /// Runs phase 0: fills `output` with all ranks' `input`, which is equally long on all of them.
    pub(crate) fn all_gather(&mut self, input: &[u8], output: &mut [u8]) -> Result<()> {
        let range = |rank: usize| rank * input.len()..(rank + 1) * input.len();
        output[range(self.rank().0)].copy_from_slice(input);
        for (to, from) in self.rounds() {
            self.swap(0, (to, from), &[input], &mut [&mut output[range(from.0)]])?;
        }
        Ok(())
    }

    /// Runs phases 0 and 1: all ranks' `input`, of any lengths, in rank order. With a root only the root gets them, and
    /// the other ranks get nothing.
    pub(crate) fn gather_bytes(&mut self, root: Option<Rank>, input: &[u8]) -> Result<Vec<Vec<u8>>> {
        let receives = |rank: Rank| root.is_none_or(|root| root == rank);
        // The count of a header is the same on all ranks, and no length is: lengths travel as data.
        let mut lengths = vec![0u64; self.world_size()];
        let own = input.len() as u64;
        self.all_gather(bytemuck::bytes_of(&own), bytemuck::cast_slice_mut(&mut lengths))?;
        let rank = self.rank();
        if !receives(rank) {
            lengths.fill(0);
        }
        let mut gathered = lengths.into_iter().enumerate().map(allocate).collect::<Result<Vec<Vec<u8>>>>()?;
        if receives(rank) {
            gathered[rank.0].copy_from_slice(input);
        }
        for (to, from) in self.rounds() {
            let body = if receives(to) { input } else { &[] };
            self.swap(1, (to, from), &[body], &mut [&mut gathered[from.0]])?;
        }
        Ok(if receives(rank) { gathered } else { Vec::new() })
    }
}

/// Allocates memory for what a rank announced. The length comes from another process, so a failed allocation is an
/// error and does not end this process.
fn allocate((rank, length): (usize, u64)) -> Result<Vec<u8>> {
    let mut memory = Vec::new();
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    memory.try_reserve_exact(length).map_err(|error| {
        let message = format!("no memory for the {length} bytes that rank {rank} gives to all_gather");
        Error::with_source(ErrorKind::Io, message, error)
    })?;
    memory.resize(length, 0);
    Ok(memory)
}
