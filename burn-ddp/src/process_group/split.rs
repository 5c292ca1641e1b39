//! Groups inside a group.

use std::sync::atomic::Ordering;

use burn::tensor::backend::Backend;

use super::{ProcessGroup, Unconnected};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::{Rank, RankInfo};

impl<B: Backend> ProcessGroup<B> {
    /// Divides the group: ranks that give the same `color` form a new group, ordered by `key`, then by rank. All
    /// ranks must call it; one that gives no color gets no group. Groups work independently of each other, and
    /// the failure of one does not end another.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let number = self.0.splits.fetch_add(1, Ordering::Relaxed);
        let mine = postcard::to_stdvec(&(color, key))
            .map_err(|error| Error::with_source(ErrorKind::Io, "cannot encode a color", error))?;
        let mut members = Vec::new();
        for (rank, bytes) in self.all_gather_bytes(mine)?.iter().enumerate() {
            let (theirs, key): (Option<u32>, i64) = postcard::from_bytes(bytes).map_err(|error| {
                Error::with_source(ErrorKind::Mismatch, format!("rank {rank} sent no color"), error)
            })?;
            if color.is_some() && theirs == color {
                members.push((key, rank));
            }
        }
        let made = self.part(color, members, number);
        // Nobody leaves before all parts stand: rank 0 serves the store through which they meet.
        let fine = self.all_gather_bytes(vec![u8::from(made.is_ok())])?;
        let group = made.inspect_err(|error| self.fail(error))?;
        match fine.iter().position(|fine| fine != &[1]).map(Rank) {
            Some(rank) => {
                Err(Error::new(ErrorKind::PeerFailed(rank), format!("{rank} could not join its part")))
            }
            None => Ok(group),
        }
    }

    /// This rank's part of the group.
    fn part(
        &self,
        color: Option<u32>,
        mut members: Vec<(i64, usize)>,
        number: usize,
    ) -> Result<Option<Self>> {
        let Some(color) = color else { return Ok(None) };
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == self.rank().0).unwrap_or_default();
        let info = RankInfo { rank: Rank(rank), world_size: members.len(), ..self.0.info.clone() };
        let name = format!("{}.{number}.{color}", self.0.name);
        let group = Unconnected {
            name,
            info,
            options: self.0.options.clone(),
            device: self.0.device.clone(),
            factory: self.0.factory.clone(),
            in_backward: self.0.in_backward.clone(),
        };
        let Some(connected) = &self.0.connected else { return Ok(Some(group.build(None))) };
        let address = connected.peers[self.rank().0].address.ip();
        let deadline = Deadline::after(group.options.rendezvous_timeout);
        group.connect(connected.store.clone(), address, deadline).map(Some)
    }
}
