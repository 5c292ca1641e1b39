//! What the store knows and decides, without a socket.
//!
//! The server feeds it what connections say and asks it what to answer. All of the store's rules (who may
//! join, what ends the store, which get is answered) are here, where a test needs no network.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::protocol::{KEY_LIMIT, Request, Response, shortened};
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
    claims: BTreeMap<ConnectionId, Claim>,
    values: BTreeMap<String, Arc<[u8]>>,
    counters: BTreeMap<String, i64>,
    failure: Option<String>,
}

impl Board {
    /// The empty store of the run that `owner` belongs to, who serves it.
    pub(super) fn new(owner: Claim) -> Self {
        Self {
            owner,
            claims: BTreeMap::new(),
            values: BTreeMap::new(),
            counters: BTreeMap::new(),
            failure: None,
        }
    }

    /// What to do about `request` with `value`, said by connection `id`.
    pub(super) fn handle(&mut self, id: ConnectionId, request: Request, value: Vec<u8>) -> Verdict {
        let joined = self.claims.contains_key(&id);
        let key = match request {
            Request::Hello { .. } if joined => return Verdict::Close,
            Request::Hello { claim, serves } => return self.admit(id, claim, serves),
            Request::Set { ref key } | Request::Get { ref key, .. } | Request::Add { ref key, .. } => key,
        };
        if !joined || key.len() > KEY_LIMIT {
            return Verdict::Close;
        }
        if let Some(failure) = self.failure() {
            return Verdict::Answer(failure);
        }
        match request {
            Request::Hello { .. } => Verdict::Close,
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

    /// Connection `id` is closed; its rank is free again once the process has no other.
    pub(super) fn leave(&mut self, id: ConnectionId) {
        self.claims.remove(&id);
    }

    /// The last message to everybody.
    pub(super) fn farewell(&self) -> Response {
        self.failure().unwrap_or(Response::Finished)
    }

    fn failure(&self) -> Option<Response> {
        self.failure.clone().map(Response::Failed)
    }

    fn admit(&mut self, id: ConnectionId, claim: Claim, serves: bool) -> Verdict {
        if let Some(reason) = self.objection(&claim) {
            return Verdict::Dismiss(Response::Refused(shortened(reason)));
        }
        // Who wanted to serve is another process than the owner, whatever its pid is called in its container.
        let holder = [&self.owner].into_iter().chain(self.claims.values());
        let taken = holder
            .into_iter()
            .find(|other| other.rank == claim.rank && (serves || !other.same_process(&claim)));
        if let Some(holder) = taken {
            let (first, second, rank) = (holder.process(), claim.process(), claim.rank);
            // The first pair is the cause; a third process only follows from it.
            self.failure.get_or_insert_with(|| {
                shortened(format!(
                    "{rank} claimed twice: by {first} and by {second}; give every process a RANK of its own"
                ))
            });
            return Verdict::Dismiss(Response::Refused(shortened(format!(
                "{rank} already taken by {first}; this is {second}: give every process a RANK of its own"
            ))));
        }
        if let Some(failure) = self.failure() {
            return Verdict::Dismiss(failure);
        }
        self.claims.insert(id, claim);
        Verdict::Answer(Response::Done)
    }

    /// Why `claim` does not belong here at all. Such a process says nothing about ours, so the store goes on.
    fn objection(&self, claim: &Claim) -> Option<String> {
        let owner = &self.owner;
        if claim.run_id != owner.run_id {
            return Some(format!(
                "MASTER_PORT is in use by the run '{}' ({} is {}), and this process belongs to the run '{}': \
                 give each run a port of its own, or all processes of one run the same TORCHELASTIC_RUN_ID",
                owner.run_id,
                owner.rank,
                owner.process(),
                claim.run_id
            ));
        }
        if claim.world_size != owner.world_size {
            return Some(format!(
                "WORLD_SIZE={} on {}, but WORLD_SIZE={} on {} ({}): all processes of a run need the same",
                claim.world_size,
                claim.rank,
                owner.world_size,
                owner.rank,
                owner.process(),
            ));
        }
        (claim.rank.0 >= owner.world_size).then(|| {
            format!(
                "RANK={} is outside of WORLD_SIZE={}: ranks go from 0 to {}",
                claim.rank.0,
                owner.world_size,
                owner.world_size - 1
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::Rank;

    fn claim(rank: usize, pid: u32) -> Claim {
        Claim::new(Rank(rank), 3, "run", "here", pid)
    }

    fn hello(board: &mut Board, id: ConnectionId, claim: Claim) -> Verdict {
        board.handle(id, Request::Hello { claim, serves: false }, Vec::new())
    }

    fn refused(verdict: Verdict, words: &[&str]) {
        let Verdict::Dismiss(Response::Refused(text)) = verdict else { panic!("{verdict:?} is no refusal") };
        for word in words {
            assert!(text.contains(word), "{text} lacks {word}");
        }
    }

    #[test]
    fn strangers_are_refused_and_change_nothing() {
        let mut board = Board::new(claim(0, 10));
        refused(
            hello(&mut board, 1, Claim { run_id: "other".into(), ..claim(1, 11) }),
            &["'run'", "'other'"],
        );
        refused(
            hello(&mut board, 2, Claim { world_size: 2, ..claim(1, 11) }),
            &["WORLD_SIZE=2", "WORLD_SIZE=3", "pid 10"],
        );
        refused(hello(&mut board, 3, claim(3, 11)), &["RANK=3", "WORLD_SIZE=3"]);
        assert_eq!(board.handle(4, Request::Add { key: "n".into(), delta: 1 }, vec![]), Verdict::Close);
        assert_eq!(board.farewell(), Response::Finished);
        assert_eq!(hello(&mut board, 5, claim(1, 11)), Verdict::Answer(Response::Done));
    }

    #[test]
    fn a_rank_taken_twice_ends_the_store_for_all() {
        let mut board = Board::new(claim(0, 10));
        for (id, claim) in [(1, claim(0, 10)), (2, claim(1, 11)), (3, claim(1, 11))] {
            assert_eq!(hello(&mut board, id, claim), Verdict::Answer(Response::Done));
        }
        refused(hello(&mut board, 4, claim(1, 12)), &["rank 1 already taken by pid 11 on host here"]);
        let Some((Response::Failed(text), _)) = board.look("any") else {
            panic!("the store must have failed")
        };
        assert!(text.starts_with("rank 1 claimed twice: by pid 11 on host here and by pid 12"), "{text}");
        let later = board.handle(1, Request::Add { key: "n".into(), delta: 1 }, vec![]);
        assert_eq!(later, Verdict::Answer(Response::Failed(text.clone())));
        assert_eq!(hello(&mut board, 5, claim(2, 13)), Verdict::Dismiss(Response::Failed(text)));
    }

    #[test]
    fn a_second_server_is_a_second_rank_0_even_with_the_same_pid() {
        let mut board = Board::new(claim(0, 1));
        let verdict = board.handle(1, Request::Hello { claim: claim(0, 1), serves: true }, vec![]);
        refused(verdict, &["rank 0 already taken by pid 1"]);
    }

    #[test]
    fn a_rank_is_free_when_its_process_has_left() {
        let mut board = Board::new(claim(0, 10));
        hello(&mut board, 1, claim(1, 11));
        board.leave(1);
        assert_eq!(hello(&mut board, 2, claim(1, 12)), Verdict::Answer(Response::Done));
    }

    #[test]
    fn keys_over_the_limit_close_the_connection() {
        let mut board = Board::new(claim(0, 10));
        hello(&mut board, 1, claim(1, 11));
        let key = "k".repeat(KEY_LIMIT + 1);
        assert_eq!(board.handle(1, Request::Set { key }, vec![]), Verdict::Close);
    }
}
