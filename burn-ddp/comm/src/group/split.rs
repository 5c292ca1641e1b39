//! Subgroups: groups whose ranks belong to a larger group.

use std::sync::atomic::Ordering;

use super::{Group, HostEngine, MakeEngine, Setup, Start, host_engine};
use crate::deadline::Deadline;
use crate::environment::RankInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;

impl Group {
    /// Divides the ranks of this group into subgroups. Ranks that give the same `color` form one subgroup; its ranks
    /// are numbered in ascending order of `key`, and those of equal keys in the order of this group. A rank that gives
    /// no color gets `None`. All ranks of this group must call it.
    ///
    /// This group stays usable. Each subgroup has connections, a communication thread and a control thread of its own,
    /// and the failure of one group does not end another.
    ///
    /// # Errors
    /// The first error of this group. If a rank cannot connect to its subgroup, it returns the reason, the others
    /// return `PeerFailed` with the first such rank, and this group ends.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        Ok(self.split_with(color, key, host_engine)?.map(|(group, _)| group))
    }

    /// [`Group::split`] with an engine that `make` provides for the subgroup; see [`Group::with_engine`].
    ///
    /// # Errors
    /// Those of [`Group::split`] and of `make`.
    pub fn split_with<T>(
        &self,
        color: Option<u32>,
        key: i64,
        make: impl FnOnce(Setup, HostEngine) -> Result<(MakeEngine, T)>,
    ) -> Result<Option<(Self, Option<T>)>> {
        let number = self.0.splits.fetch_add(1, Ordering::Relaxed);
        let mut members = Vec::new();
        let all: Vec<(Option<u32>, i64)> = self.exchange("a rank's color in split", &(color, key))?;
        for (rank, (theirs, key)) in all.into_iter().enumerate() {
            if color.is_some() && theirs == color {
                members.push((key, rank));
            }
        }
        let part = color.map(|color| self.connect_part(color, members, number, make)).transpose();
        // Rank 0 serves the store through which subgroups connect, so no rank leaves before all are connected.
        let connected = self.all_gather_bytes(vec![u8::from(part.is_ok())])?;
        let part = part.inspect_err(|error| self.fail(error))?;
        match connected.iter().position(|connected| connected != &[1]).map(Rank) {
            Some(rank) => {
                Err(Error::new(ErrorKind::PeerFailed(rank), format!("{rank} could not join its part")))
            }
            None => Ok(part),
        }
    }

    /// Connects this rank to the subgroup of `members`, each given by its key and its rank in this group.
    fn connect_part<T>(
        &self,
        color: u32,
        mut members: Vec<(i64, usize)>,
        number: usize,
        make: impl FnOnce(Setup, HostEngine) -> Result<(MakeEngine, T)>,
    ) -> Result<(Self, Option<T>)> {
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == self.rank().0).unwrap_or_default();
        let start = Start {
            name: format!("{}.{number}.{color}", self.0.name),
            info: RankInfo { rank: Rank(rank), world_size: members.len(), ..self.0.info.clone() },
            options: self.0.options.clone(),
            backward_users: self.0.backward_users.clone(),
        };
        let Some(connected) = &self.0.connected else { return Ok((start.build(None), None)) };
        let address = connected.peers[self.rank().0].address.ip();
        let deadline = Deadline::after(start.options.rendezvous_timeout);
        start.connect(connected.store.clone(), address, deadline, make)
    }
}
