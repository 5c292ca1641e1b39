//! The rules of the store, one by one.

use super::*;
use crate::rank::Rank;

fn claim(rank: usize, pid: u32) -> Claim {
    Claim::new(Rank(rank), 3, "run", 0, "here", pid)
}

fn hello(registry: &mut Registry, id: ConnectionId, claim: Claim) -> Action {
    registry.handle(id, Request::Hello { claim, client: 0, serves: false }, Vec::new())
}

fn refused(action: Action, words: &[&str]) {
    let Action::AnswerAndClose(Response::Refused(text)) = action else { panic!("{action:?} is no refusal") };
    for word in words {
        assert!(text.contains(word), "{text} lacks {word}");
    }
}

#[test]
fn strangers_are_refused_and_change_nothing() {
    let mut registry = Registry::new(claim(0, 10));
    refused(hello(&mut registry, 1, Claim { run_id: "other".into(), ..claim(1, 11) }), &["'run'", "'other'"]);
    refused(
        hello(&mut registry, 2, Claim { restart_count: 1, ..claim(1, 11) }),
        &["TORCHELASTIC_RESTART_COUNT=1", "but 0 on rank 0", "pid 10"],
    );
    refused(hello(&mut registry, 3, claim(3, 11)), &["RANK=3", "WORLD_SIZE=3"]);
    assert_eq!(registry.handle(4, Request::Add { key: "n".into(), delta: 1 }, vec![]), Action::Close);
    assert_eq!(registry.last_response(), Response::Finished);
    assert_eq!(hello(&mut registry, 5, claim(1, 11)), Action::Answer(Response::Done));
    assert_eq!(
        registry.handle(5, Request::Remarks, vec![]),
        Action::Answer(Response::Remarks(vec![
            "refused: rank 1 (pid 11 on host here) because its run is 'other' and this one 'run'".into(),
            "refused: rank 1 (pid 11 on host here) because TORCHELASTIC_RESTART_COUNT=1 there and 0 here"
                .into(),
            "refused: rank 3 (pid 11 on host here) because RANK=3 is outside of WORLD_SIZE=3".into(),
        ]))
    );
}

#[test]
fn another_world_size_ends_the_store_until_all_ranks_have_come() {
    let other = || Claim { world_size: 2, ..claim(1, 99) };
    let words =
        ["rank 1 (pid 99 on host here) has WORLD_SIZE=2", "rank 0 (pid 10 on host here) has WORLD_SIZE=3"];
    for missing in 0..3 {
        let mut registry = Registry::new(claim(0, 10));
        for rank in (0..3).filter(|rank| *rank != missing) {
            hello(&mut registry, rank as u64, claim(rank, 10 + rank as u32));
        }
        refused(hello(&mut registry, 9, other()), &words);
        let Response::Failed { text, lost: None } = registry.last_response() else {
            panic!("rank {missing} is missing")
        };
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
    let mut registry = Registry::new(claim(0, 10));
    for rank in 0..3 {
        hello(&mut registry, rank as u64, claim(rank, 10 + rank as u32));
    }
    refused(hello(&mut registry, 9, other()), &words);
    assert_eq!(registry.last_response(), Response::Finished);
}

#[test]
fn remarks_are_few_and_fit_into_an_answer() {
    let mut registry = Registry::new(claim(0, 10));
    hello(&mut registry, 1, claim(1, 11));
    for pid in 0..100 {
        hello(&mut registry, 2, Claim { run_id: "é".repeat(2000), ..claim(2, pid) });
    }
    let Action::Answer(answer) = registry.handle(1, Request::Remarks, vec![]) else {
        panic!("a member asks")
    };
    super::super::protocol::encode(&answer, 0).unwrap();
}

#[test]
fn a_rank_taken_twice_ends_the_store_for_all() {
    let mut registry = Registry::new(claim(0, 10));
    for (id, claim) in [(1, claim(0, 10)), (2, claim(1, 11)), (3, claim(1, 11))] {
        assert_eq!(hello(&mut registry, id, claim), Action::Answer(Response::Done));
    }
    refused(hello(&mut registry, 4, claim(1, 12)), &["rank 1 already taken by pid 11 on host here"]);
    let Some((Response::Failed { text, lost: None }, _)) = registry.answer_to_get("any") else {
        panic!("the store must have failed")
    };
    assert!(text.starts_with("rank 1 claimed twice: by pid 11 on host here and by pid 12"), "{text}");
    let later = registry.handle(1, Request::Add { key: "n".into(), delta: 1 }, vec![]);
    assert_eq!(later, Action::Answer(Response::Failed { text: text.clone(), lost: None }));
    assert_eq!(
        hello(&mut registry, 5, claim(2, 13)),
        Action::AnswerAndClose(Response::Failed { text, lost: None })
    );
}

#[test]
fn a_second_server_is_a_second_rank_0_even_with_the_same_pid() {
    let mut registry = Registry::new(claim(0, 1));
    let action = registry.handle(1, Request::Hello { claim: claim(0, 1), client: 0, serves: true }, vec![]);
    refused(action, &["rank 0 already taken by pid 1"]);
}

#[test]
fn a_rank_is_free_when_its_process_has_taken_leave() {
    let mut registry = Registry::new(claim(0, 10));
    hello(&mut registry, 1, claim(1, 11));
    hello(&mut registry, 2, claim(1, 11));
    assert_eq!(registry.handle(1, Request::Bye, vec![]), Action::AnswerAndClose(Response::Done));
    // The other connection was the same client's, so its end says nothing new.
    registry.connection_closed(2);
    registry.connection_closed(1);
    assert_eq!(registry.last_response(), Response::Finished);
    assert_eq!(hello(&mut registry, 3, claim(1, 12)), Action::Answer(Response::Done));
}

#[test]
fn a_client_takes_leave_for_itself_alone() {
    let mut registry = Registry::new(claim(0, 10));
    hello(&mut registry, 1, claim(1, 11));
    registry.handle(2, Request::Hello { claim: claim(1, 11), client: 1, serves: false }, vec![]);
    registry.handle(1, Request::Bye, vec![]);
    registry.connection_closed(1);
    let add = registry.handle(2, Request::Add { key: "n".into(), delta: 1 }, vec![]);
    assert_eq!(add, Action::Answer(Response::Count(1)));
}

#[test]
fn the_last_connection_without_a_goodbye_ends_the_store() {
    let mut registry = Registry::new(claim(0, 10));
    hello(&mut registry, 1, claim(1, 11));
    hello(&mut registry, 2, claim(1, 11));
    hello(&mut registry, 3, claim(2, 12));
    registry.connection_closed(1);
    assert_eq!(registry.answer_to_get("any"), None);
    registry.connection_closed(2);
    registry.connection_closed(3);
    let Some((Response::Failed { text, lost }, _)) = registry.answer_to_get("any") else {
        panic!("the store must have failed")
    };
    assert_eq!(text, "rank 1 (pid 11 on host here) is lost: its process ended during start-up");
    assert_eq!(lost, Some(Rank(1)));
}

#[test]
fn keys_over_the_limit_close_the_connection() {
    let mut registry = Registry::new(claim(0, 10));
    hello(&mut registry, 1, claim(1, 11));
    let key = "k".repeat(KEY_LIMIT + 1);
    assert_eq!(registry.handle(1, Request::Set { key }, vec![]), Action::Close);
}
