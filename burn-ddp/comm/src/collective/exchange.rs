//! One operation in progress: who talks to whom, and under which header.
//!
//! Every collective is made of rounds. In round `s` a rank sends to the one `s` places after it and receives
//! from the one `s` places before it, both at once, so the load is even and no two ranks can wait for each
//! other. The rounds of one phase together bring one frame from every rank to every other, if only an empty
//! one: so whoever is in another operation is met within this one.

use std::ops::Range;

use super::all_reduce::slot;
use super::chunk::chunk;
use super::scratch::Scratch;
use super::segments::Segments;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::rank::Rank;
use crate::transport::{Header, Transport};

pub(super) struct Exchange<'a> {
    pub(super) transport: &'a mut dyn Transport,
    pub(super) header: Header,
    pub(super) deadline: Deadline,
}

impl Exchange<'_> {
    pub(super) fn rank(&self) -> Rank {
        self.transport.rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    /// For each round, whom to send to and whom to receive from.
    pub(super) fn rounds(&self) -> impl Iterator<Item = (Rank, Rank)> + use<> {
        let (rank, world_size) = (self.rank().0, self.world_size());
        (1..world_size).map(move |step| {
            (Rank((rank + step) % world_size), Rank((rank + world_size - step) % world_size))
        })
    }

    /// One round of phase `phase`: `body` to `to` while `into` is filled by `from`.
    pub(super) fn swap(
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

    /// Phase 0 of a reduction: sends each peer what `body` has for it and returns what all of them have for
    /// this rank, `bytes` each, in rank order without this rank.
    pub(super) fn collect<'s, 'd>(
        &mut self,
        scratch: &'s mut Scratch,
        bytes: usize,
        body: impl Fn(Rank) -> Vec<&'d [u8]>,
    ) -> Result<Vec<&'s [u8]>> {
        let mut pieces = scratch.pieces(self.world_size() - 1, bytes);
        for (to, from) in self.rounds() {
            let slot = slot(self.rank(), from);
            self.swap(0, (to, from), &body(to), &mut [&mut *pieces[slot]])?;
        }
        Ok(pieces.into_iter().map(|piece| &*piece).collect())
    }

    /// Phase 1 of an operation over `data`: each rank has its chunk of it and gets all others. A rank that is
    /// `complete` has them already and is sent none.
    pub(super) fn gather_chunks(
        &mut self,
        data: &mut Segments<'_, '_>,
        element_size: usize,
        complete: Option<Rank>,
    ) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let bytes = data.len();
        let chunk = |rank| byte_chunk(bytes, element_size, world_size, rank);
        for (to, from) in self.rounds() {
            let own = if complete == Some(to) { 0..0 } else { chunk(rank) };
            let theirs = if complete == Some(rank) { 0..0 } else { chunk(from) };
            let (body, mut into) = data.borrow([own], theirs);
            self.swap(1, (to, from), &body, &mut into)?;
        }
        Ok(())
    }
}

/// The bytes of `rank`'s chunk in a buffer of `bytes` bytes.
pub(super) fn byte_chunk(bytes: usize, element_size: usize, world_size: usize, rank: Rank) -> Range<usize> {
    let elements = chunk(bytes / element_size, world_size, rank.0);
    elements.start * element_size..elements.end * element_size
}
