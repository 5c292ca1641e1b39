//! What the store knows and decides, without a socket.
//!
//! The server feeds it what connections say and asks it what to answer. All of the store's rules (who may
//! join, what ends the store, which get is answered) are here, where a test needs no network.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::protocol::{KEY_LIMIT, REMARKS, Request, Response, remark, shortened};
use crate::rank::Rank;
use crate::store::Claim;

/// Names a connection; never reused.
pub(super) type ConnectionId = u64;

/// An answer with the value that goes with it.
pub(super) type Answer = (Response, Arc<[u8]>);

/// What to do about a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Answer, and keep the connection.
    Answer(Response),
    /// Answer, then close the connection.
    Dismiss(Response),
    /// Answer when [`Board::look`] has an answer, or with `NotSet` after so many milliseconds.
    Wait { key: String, wait_ms: u64 },
    /// Close without an answer: this is no client of ours.
    Close,
}

/// The store's content and its members.
pub(super) struct Board {
    owner: Claim,
    members: BTreeMap<ConnectionId, Member>,
    values: BTreeMap<String, Arc<[u8]>>,
    counters: BTreeMap<String, i64>,
    failure: Option<Failure>,
    /// Ranks that have introduced themselves at some time.
    seen: BTreeSet<Rank>,
    remarks: Vec<String>,
}

/// Who has introduced itself on a connection.
struct Member {
    claim: Claim,
    client: u64,
}

/// Why the store is of no further use.
#[derive(Clone)]
struct Failure {
    text: String,
    lost: Option<Rank>,
}

impl Board {
    /// The empty store of the run that `owner` belongs to, who serves it.
    pub(super) fn new(owner: Claim) -> Self {
        Self {
            owner,
            members: BTreeMap::new(),
            values: BTreeMap::new(),
            counters: BTreeMap::new(),
            failure: None,
            seen: BTreeSet::new(),
            remarks: Vec::new(),
        }
    }

    /// What to do about `request` with `value`, said by connection `id`.
    pub(super) fn handle(&mut self, id: ConnectionId, request: Request, value: Vec<u8>) -> Verdict {
        let joined = self.members.contains_key(&id);
        let key = match request {
            Request::Hello { .. } if joined => return Verdict::Close,
            Request::Hello { claim, client, serves } => return self.admit(id, claim, client, serves),
            Request::Bye => return self.take_leave(id),
            Request::Remarks if joined => return Verdict::Answer(Response::Remarks(self.remarks.clone())),
            Request::Remarks => return Verdict::Close,
            Request::Set { ref key } | Request::Get { ref key, .. } | Request::Add { ref key, .. } => key,
        };
        if !joined || key.len() > KEY_LIMIT {
            return Verdict::Close;
        }
        if let Some(failure) = self.failure() {
            return Verdict::Answer(failure);
        }
        match request {
            Request::Hello { .. } | Request::Remarks | Request::Bye => Verdict::Close,
            Request::Set { key } => {
                self.values.insert(key, value.into());
                Verdict::Answer(Response::Done)
            }
            Request::Get { key, wait_ms } => Verdict::Wait { key, wait_ms },
            Request::Add { key, delta } => {
                let counter = self.counters.entry(key).or_default();
                *counter = counter.wrapping_add(delta);
                Verdict::Answer(Response::Count(*counter))
            }
        }
    }

    /// The answer for whoever waits for `key`, once there is one.
    pub(super) fn look(&self, key: &str) -> Option<Answer> {
        if let Some(failure) = self.failure() {
            return Some((failure, Arc::default()));
        }
        self.values.get(key).map(|value| (Response::Value, value.clone()))
    }

    /// Connection `id` is closed. A process whose last connection goes without a goodbye has ended: whoever
    /// waits for it would wait in vain, so the store ends for all.
    pub(super) fn leave(&mut self, id: ConnectionId) {
        let Some(Member { claim, .. }) = self.members.remove(&id) else { return };
        if self.members.values().any(|other| other.claim.is_of(&claim)) {
            return;
        }
        self.fail(
            format!("{} ({}) is lost: its process ended during start-up", claim.rank, claim.process()),
            Some(claim.rank),
        );
    }

    /// The client of connection `id` needs none of its connections any more.
    fn take_leave(&mut self, id: ConnectionId) -> Verdict {
        let Some(gone) = self.members.remove(&id) else { return Verdict::Close };
        let claim = gone.claim;
        self.members.retain(|_, other| other.client != gone.client || !other.claim.is_of(&claim));
        if !self.members.values().any(|other| other.claim.is_of(&claim)) {
            self.note(format!("gone in good order: {} ({})", claim.rank, claim.process()));
        }
        Verdict::Dismiss(Response::Done)
    }

    /// The last message to everybody.
    pub(super) fn farewell(&self) -> Response {
        self.failure().unwrap_or(Response::Finished)
    }

    fn failure(&self) -> Option<Response> {
        self.failure.clone().map(|Failure { text, lost }| Response::Failed { text, lost })
    }

    fn note(&mut self, text: String) {
        let text = remark(text);
        if self.remarks.len() < REMARKS && !self.remarks.contains(&text) {
            self.remarks.push(text);
        }
    }

    /// Ends the store. The first cause stays: whatever comes later may only follow from it.
    fn fail(&mut self, text: String, lost: Option<Rank>) {
        self.failure.get_or_insert_with(|| Failure { text: shortened(text), lost });
    }

    fn admit(&mut self, id: ConnectionId, claim: Claim, client: u64, serves: bool) -> Verdict {
        if let Some(Objection { reason, in_short }) = self.objection(&claim) {
            self.note(format!("refused: {} ({}) because {in_short}", claim.rank, claim.process()));
            return Verdict::Dismiss(Response::Refused(shortened(reason)));
        }
        if claim.world_size != self.owner.world_size {
            return self.refuse_world(&claim);
        }
        // Who wanted to serve is another process than the owner, whatever its pid is called in its container.
        let holders = [&self.owner].into_iter().chain(self.members.values().map(|member| &member.claim));
        let taken = holders
            .into_iter()
            .find(|other| other.rank == claim.rank && (serves || !other.same_process(&claim)));
        if let Some(holder) = taken {
            let (first, second, rank) = (holder.process(), claim.process(), claim.rank);
            self.fail(
                format!(
                    "{rank} claimed twice: by {first} and by {second}; give every process a RANK of its own"
                ),
                None,
            );
            return Verdict::Dismiss(Response::Refused(shortened(format!(
                "{rank} already taken by {first}; this is {second}: give every process a RANK of its own"
            ))));
        }
        if let Some(failure) = self.failure() {
            return Verdict::Dismiss(failure);
        }
        self.seen.insert(claim.rank);
        self.members.insert(id, Member { claim, client });
        Verdict::Answer(Response::Done)
    }

    /// Turns away a process of this run that believes in another number of processes. As long as a rank is
    /// missing, this may be it, and nobody else will come in its place.
    fn refuse_world(&mut self, claim: &Claim) -> Verdict {
        let owner = &self.owner;
        let (here, there) = (owner.world_size, claim.world_size);
        let text = format!(
            "{} ({}) has WORLD_SIZE={there}, but {} ({}) has WORLD_SIZE={here}: all processes of a run need the \
             same",
            claim.rank,
            claim.process(),
            owner.rank,
            owner.process(),
        );
        if self.seen.len() < here {
            self.fail(text.clone(), None);
        }
        self.note(format!(
            "refused: {} ({}) because WORLD_SIZE={there} there and {here} here",
            claim.rank,
            claim.process()
        ));
        Verdict::Dismiss(Response::Refused(shortened(text)))
    }

    /// Why `claim` does not belong here at all. Such a process says nothing about ours, so the store goes on.
    fn objection(&self, claim: &Claim) -> Option<Objection> {
        let owner = &self.owner;
        if claim.run_id != owner.run_id {
            return Some(Objection {
                in_short: format!("its run is '{}' and this one '{}'", claim.run_id, owner.run_id),
                reason: format!(
                    "MASTER_PORT is in use by the run '{}' ({} is {}), and this process belongs to the run \
                     '{}': give each run a port of its own, or all processes of one run the same \
                     TORCHELASTIC_RUN_ID",
                    owner.run_id,
                    owner.rank,
                    owner.process(),
                    claim.run_id
                ),
            });
        }
        if claim.restart_count != owner.restart_count {
            let (there, here) = (claim.restart_count, owner.restart_count);
            return Some(Objection {
                in_short: format!("TORCHELASTIC_RESTART_COUNT={there} there and {here} here"),
                reason: format!(
                    "TORCHELASTIC_RESTART_COUNT={there} on {}, but {here} on {} ({}): one of the two is left \
                     over from another attempt of the run",
                    claim.rank,
                    owner.rank,
                    owner.process(),
                ),
            });
        }
        let size = owner.world_size;
        (claim.world_size == size && claim.rank.0 >= size).then(|| Objection {
            in_short: format!("RANK={} is outside of WORLD_SIZE={size}", claim.rank.0),
            reason: format!(
                "RANK={} is outside of WORLD_SIZE={size}: ranks go from 0 to {}",
                claim.rank.0,
                size - 1
            ),
        })
    }
}

/// Why a process is turned away.
struct Objection {
    /// In full, for itself.
    reason: String,
    /// For those who miss it.
    in_short: String,
}

#[cfg(test)]
mod tests;
