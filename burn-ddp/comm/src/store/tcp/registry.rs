//! Members, values and rules of the store, without a socket.
//!
//! The server passes each request to the [`Registry`] and executes the [`Action`] that it returns. All rules of the
//! store are here, where tests need no network: which process may join, which event ends the store, which get has an
//! answer.
//!
//! ```text
//!   serving ──────────────────────────────> failed (every member gets the first cause)
//!     a rank is claimed by two processes,
//!     a member's process ends without a bye,
//!     a process of this run has another world size while a rank is missing
//! ```
//!
//! Processes of another run, attempt or rank range are refused and change nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::protocol::{KEY_LIMIT, REMARKS, Request, Response, cut_remark, cut_text};
use crate::rank::Rank;
use crate::store::claim::Claim;

/// Number of a connection; never reused.
pub(super) type ConnectionId = u64;

/// An answer with the value that goes with it.
pub(super) type Answer = (Response, Arc<[u8]>);

/// Reaction of the server to a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Answer, and keep the connection.
    Answer(Response),
    /// Answer, then close the connection.
    AnswerAndClose(Response),
    /// Answer when [`Registry::answer_to_get`] has an answer, or with `NotSet` after `wait_ms` milliseconds.
    Wait { key: String, wait_ms: u64 },
    /// Close without an answer: the sender is no client of this store.
    Close,
}

/// Content and members of the store.
pub(super) struct Registry {
    /// The process that serves the store.
    owner: Claim,
    members: BTreeMap<ConnectionId, MemberConnection>,
    values: BTreeMap<String, Arc<[u8]>>,
    counters: BTreeMap<String, i64>,
    failure: Option<Failure>,
    /// Ranks that have joined at some time.
    seen: BTreeSet<Rank>,
    remarks: Vec<String>,
}

/// A connection whose hello was accepted.
struct MemberConnection {
    claim: Claim,
    client: u64,
}

/// The first cause of the store's end.
#[derive(Clone)]
struct Failure {
    text: String,
    lost: Option<Rank>,
}

impl Registry {
    /// An empty store for the run of `owner`, the process that serves it.
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

    /// Executes `request` with `value` of connection `id`.
    pub(super) fn handle(&mut self, id: ConnectionId, request: Request, value: Vec<u8>) -> Action {
        let joined = self.members.contains_key(&id);
        let key = match request {
            Request::Hello { .. } if joined => return Action::Close,
            Request::Hello { claim, client, serves } => return self.admit(id, claim, client, serves),
            Request::Bye => return self.handle_bye(id),
            Request::Remarks if joined => return Action::Answer(Response::Remarks(self.remarks.clone())),
            Request::Remarks => return Action::Close,
            Request::Set { ref key } | Request::Get { ref key, .. } | Request::Add { ref key, .. } => key,
        };
        if !joined || key.len() > KEY_LIMIT {
            return Action::Close;
        }
        if let Some(failure) = self.failure() {
            return Action::Answer(failure);
        }
        match request {
            Request::Hello { .. } | Request::Remarks | Request::Bye => Action::Close,
            Request::Set { key } => {
                self.values.insert(key, value.into());
                Action::Answer(Response::Done)
            }
            Request::Get { key, wait_ms } => Action::Wait { key, wait_ms },
            Request::Add { key, delta } => {
                let counter = self.counters.entry(key).or_default();
                *counter = counter.wrapping_add(delta);
                Action::Answer(Response::Count(*counter))
            }
        }
    }

    /// The answer to a get of `key`, if there is one yet.
    pub(super) fn answer_to_get(&self, key: &str) -> Option<Answer> {
        if let Some(failure) = self.failure() {
            return Some((failure, Arc::default()));
        }
        self.values.get(key).map(|value| (Response::Value, value.clone()))
    }

    /// Removes connection `id`, which is closed. A process whose last connection closes without a bye has ended, and no
    /// wait for it can succeed, so the store fails.
    pub(super) fn connection_closed(&mut self, id: ConnectionId) {
        let Some(MemberConnection { claim, .. }) = self.members.remove(&id) else { return };
        if self.is_member(&claim) {
            return;
        }
        self.fail(
            format!("{} ({}) is lost: its process ended during start-up", claim.rank, claim.process()),
            Some(claim.rank),
        );
    }

    /// Removes all connections of the client that has connection `id`.
    fn handle_bye(&mut self, id: ConnectionId) -> Action {
        let Some(MemberConnection { claim, client }) = self.members.remove(&id) else { return Action::Close };
        self.members.retain(|_, other| other.client != client || !other.claim.same_member(&claim));
        if !self.is_member(&claim) {
            self.add_remark(format!("finished: {} ({})", claim.rank, claim.process()));
        }
        Action::AnswerAndClose(Response::Done)
    }

    /// True if the process with `claim` still has a connection.
    fn is_member(&self, claim: &Claim) -> bool {
        self.members.values().any(|member| member.claim.same_member(claim))
    }

    /// The last message to all members when the server ends.
    pub(super) fn last_response(&self) -> Response {
        self.failure().unwrap_or(Response::Finished)
    }

    fn failure(&self) -> Option<Response> {
        self.failure.clone().map(|Failure { text, lost }| Response::Failed { text, lost })
    }

    fn add_remark(&mut self, text: String) {
        let text = cut_remark(text);
        if self.remarks.len() < REMARKS && !self.remarks.contains(&text) {
            self.remarks.push(text);
        }
    }

    /// Ends the store for all members. Only the first cause counts, because later ones may follow from it.
    fn fail(&mut self, text: String, lost: Option<Rank>) {
        self.failure.get_or_insert_with(|| Failure { text: cut_text(text), lost });
    }

    fn admit(&mut self, id: ConnectionId, claim: Claim, client: u64, serves: bool) -> Action {
        if let Some(Objection { reason, remark }) = self.objection(&claim) {
            self.add_remark(format!("refused: {} ({}) because {remark}", claim.rank, claim.process()));
            return refuse(reason);
        }
        if claim.world_size != self.owner.world_size {
            return self.refuse_world_size(&claim);
        }
        // A process that tried to serve is not the owner, even if its container gives it the same pid.
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
            return refuse(format!(
                "{rank} already taken by {first}; this is {second}: give every process a RANK of its own"
            ));
        }
        if let Some(failure) = self.failure() {
            return Action::AnswerAndClose(failure);
        }
        self.seen.insert(claim.rank);
        self.members.insert(id, MemberConnection { claim, client });
        Action::Answer(Response::Done)
    }

    /// Refuses a process of this run with another world size. While a rank is missing, this process may be that rank,
    /// and no other will come in its place, so the store fails.
    fn refuse_world_size(&mut self, claim: &Claim) -> Action {
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
        self.add_remark(format!(
            "refused: {} ({}) because WORLD_SIZE={there} there and {here} here",
            claim.rank,
            claim.process()
        ));
        refuse(text)
    }

    /// The reason to refuse a process that does not belong to this attempt of this run. Its mistake says nothing about
    /// the processes that do, so the store goes on.
    fn objection(&self, claim: &Claim) -> Option<Objection> {
        let owner = &self.owner;
        if claim.run_id != owner.run_id {
            return Some(Objection {
                remark: format!("its run is '{}' and this one '{}'", claim.run_id, owner.run_id),
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
                remark: format!("TORCHELASTIC_RESTART_COUNT={there} there and {here} here"),
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
            remark: format!("RANK={} is outside of WORLD_SIZE={size}", claim.rank.0),
            reason: format!(
                "RANK={} is outside of WORLD_SIZE={size}: ranks go from 0 to {}",
                claim.rank.0,
                size - 1
            ),
        })
    }
}

/// Reason for which a process is refused.
struct Objection {
    /// The message to that process.
    reason: String,
    /// The end of a remark to the members that miss it.
    remark: String,
}

fn refuse(reason: String) -> Action {
    Action::AnswerAndClose(Response::Refused(cut_text(reason)))
}

#[cfg(test)]
mod tests;
