//! Failures of NCCL, of the device, of a peer, and peers that do not answer: one cause on every rank, soon.

use std::time::{Duration, Instant};

use burn_ddp::{DType, Error, ErrorKind, Rank, RankInfo, ReduceOp, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_nccl::library::RawStream;
use burn_ddp_nccl::{NcclComm, Span, Stream};
use rustix::process::Signal;

use super::node::{Buffer, LIMIT, Node};
use crate::fake::{self, FakeStream, Script, Step};
use crate::harness::{Case, Launch, Outcome, Ranks, argument, mark, tell};

pub const CASES: &[(&str, Case)] = &[
    ("scripted", scripted),
    ("aborted elsewhere", aborted_elsewhere),
    ("explained late", explained_late),
    ("stuck in finalize", stuck_in_finalize),
    ("stream fails", stream_fails),
    ("misuse", misuse),
];

/// Time that a rank may take after its limit, or after the death of a peer.
const GRACE: Duration = Duration::from_secs(2);

/// The script of this rank from the argument: seconds, the name of the step, and an outcome for each rank.
fn read_argument() -> (Duration, Script) {
    let text = argument();
    let words: Vec<&str> = text.split(' ').collect();
    let rank = RankInfo::from_env().unwrap().rank.0;
    let code = |word: &str| word.trim_start_matches(char::is_alphabetic).parse().unwrap();
    let step = match words[2 + rank] {
        "ends" => Step::Ends,
        "never" => Step::Never,
        "exits" => Step::Exits,
        word if word.starts_with("fails") => Step::Fails(code(word)),
        word => Step::Refuses(code(word)),
    };
    let mut script = Script { busy: 2, ..Script::default() };
    match words[1] {
        "init" => script.init = step,
        "call" => script.call = step,
        "group_end" => script.group_end = step,
        "collective" => script.collective = step,
        other => panic!("a script for {other}"),
    }
    (Duration::from_secs(words[0].parse().unwrap()), script)
}

fn all_reduce(comm: &mut NcclComm, data: &mut Buffer) -> Result<()> {
    let span = Span { send: data.pointer(), recv: data.pointer(), count: 2000 };
    // SAFETY: the data is not touched before the wait.
    unsafe { comm.start_all_reduce(&[span], DType::F32, ReduceOp::Sum) }
}

/// Connects, runs one all_reduce, after which all are known to have connected, and another one by the script.
fn scripted() -> Result<String> {
    let (limit, script) = read_argument();
    let node = Node::connect_tcp()?;
    fake::play(Script { init: script.init, busy: script.busy, ..Script::default() });
    mark("joined");
    let start = Instant::now();
    let connected = node.connect(limit);
    assert!(!fake::group_is_open(), "a group is left open");
    let mut comm = connected.inspect_err(|_| {
        assert!(start.elapsed() < limit + GRACE, "connect took {:?}", start.elapsed());
        // A peer may have failed before this rank came to it.
        let log = fake::log();
        let begun = log.contains(&"init") && !matches!(script.init, Step::Refuses(_));
        assert_eq!(freed(&log), (usize::from(begun), 0));
    })?;
    let mut data = Buffer::new(&[0; 8000]);
    let outcome = all_reduce(&mut comm, &mut data).and_then(|()| comm.wait(Deadline::after(LIMIT)));
    fake::play(script);
    let start = Instant::now();
    let outcome = outcome.and_then(|()| all_reduce(&mut comm, &mut data)).and_then(|()| {
        mark("started");
        comm.wait(Deadline::after(limit))
    });
    let Err(error) = outcome else { return Ok(String::new()) };
    assert!(start.elapsed() < limit + GRACE, "the wait took {:?}", start.elapsed());
    assert!(!fake::group_is_open(), "a group is left open");
    // All later calls return the same error, and nothing is freed twice.
    let same = |other: Error| assert_eq!(other.to_string(), error.to_string());
    same(comm.wait(Deadline::after(limit)).unwrap_err());
    same(all_reduce(&mut comm, &mut data).unwrap_err());
    comm.abort();
    same(comm.error().unwrap());
    comm.abort();
    same(comm.finish().unwrap_err());
    drop(comm);
    assert_eq!(freed(&fake::log()), (1, 0));
    Err(error)
}

/// Number of aborts and of destroys in `log`.
pub fn freed(log: &[&str]) -> (usize, usize) {
    let count = |name: &str| log.iter().filter(|event| **event == name).count();
    (count("abort"), count("destroy"))
}

/// Fails the test unless this rank returned an error of one line with all of `words`.
fn failed(outcome: &Outcome, words: &[&str]) {
    outcome.failed_saying(words);
    assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
    let lines = outcome.stderr.lines().filter(|line| !line.starts_with("fake: ")).count();
    assert_eq!(lines, 1, "{outcome:?}");
}

#[test]
fn a_deadline_ends_every_wait() {
    let rows = [
        ("1 init never never never", "connect on"),
        ("1 group_end never never never", "all_reduce on"),
        ("1 collective never never never", "all_reduce on"),
        ("1 collective ends never ends", "all_reduce on"),
        ("1 collective never", "all_reduce on"),
    ];
    for (script, what) in rows {
        let outcomes = Launch::new("scripted", script.split(' ').count() - 2).argument(script).run();
        for (rank, outcome) in outcomes.iter().enumerate() {
            failed(outcome, &[&format!("{what} rank {rank}")]);
        }
        let late = |outcome: &Outcome| outcome.stderr.contains("has not ended within 1s");
        assert!(outcomes.iter().all(late), "{script}: {}", tell(&outcomes));
    }
}

#[test]
fn an_error_of_nccl_is_the_cause_on_all_ranks() {
    let rows = [
        ("20 init refuses1 never never", 0, "connect", "ncclUnhandledCudaError (code 1)"),
        ("20 init never never fails2", 2, "connect", "ncclSystemError (code 2)"),
        ("20 init never fails99", 1, "connect", "code 99"),
        ("20 call ends refuses4 ends", 1, "all_reduce", "ncclInvalidArgument (code 4)"),
        ("20 group_end refuses3 ends", 0, "all_reduce", "ncclInternalError (code 3)"),
        ("20 group_end ends fails1", 1, "all_reduce", "ncclUnhandledCudaError (code 1)"),
        ("20 collective ends ends fails1", 2, "all_reduce", "ncclUnhandledCudaError (code 1)"),
        ("20 collective never fails6", 1, "all_reduce", "ncclRemoteError (code 6)"),
        ("20 collective fails2", 0, "all_reduce", "ncclSystemError (code 2)"),
    ];
    for (script, guilty, what, code) in rows {
        let world_size = script.split(' ').count() - 2;
        for (rank, outcome) in Launch::new("scripted", world_size).argument(script).run().iter().enumerate() {
            let own = format!("{what} on rank {rank}");
            let cause = format!("{what} on rank {guilty} failed: {code}");
            failed(outcome, &[&own, &cause, "the fake's last words,; in two lines"]);
        }
    }
}

/// Kills rank 1 when all ranks have made the mark `at`; the others must name it within two seconds.
fn kill_one(ranks: Ranks, at: &str, what: &str) {
    [0, 1, 2].into_iter().for_each(|rank| ranks.wait_for_mark(rank, at));
    ranks.signal(1, Signal::KILL);
    outlived(ranks, what);
}

fn outlived(mut ranks: Ranks, what: &str) {
    for rank in [0, 2] {
        assert!(ranks.time_until_end_of(rank) < GRACE);
    }
    let outcomes = ranks.wait();
    for rank in [0, 2] {
        failed(&outcomes[rank], &[&format!("{what} on rank {rank}"), "rank 1"]);
        let told = ["is lost", "rank 1 failed"].iter().any(|word| outcomes[rank].stderr.contains(word));
        assert!(told, "{}", tell(&outcomes));
    }
}

#[test]
fn a_peer_killed_in_connect_is_named() {
    kill_one(Launch::new("scripted", 3).argument("20 init never never never").start(), "joined", "connect");
}

/// FIELD-REPORTS F5: the data plane of the others does not notice the death.
#[test]
fn a_peer_killed_in_a_collective_is_named() {
    let launch = Launch::new("scripted", 3).argument("20 collective never never never");
    kill_one(launch.start(), "started", "all_reduce");
}

/// Here the data plane notices the death, but has no name for the peer.
#[test]
fn a_remote_error_of_nccl_gets_the_name_of_the_peer() {
    let launch = Launch::new("scripted", 3).argument("20 collective ends never ends");
    kill_one(launch.start(), "started", "all_reduce");
}

/// FIELD-REPORTS F8.
#[test]
fn a_peer_that_exits_in_connect_is_named() {
    let mut ranks = Launch::new("scripted", 3).argument("20 init never exits never").start();
    ranks.time_until_end_of(1);
    outlived(ranks, "connect");
}

/// Another thread of rank 0 ends the group while rank 0 is blocked in NCCL.
fn aborted_elsewhere() -> Result<String> {
    let node = Node::connect_tcp()?;
    fake::play(Script { collective: Step::Never, ..Script::default() });
    let mut comm = node.connect(LIMIT)?;
    let mut data = Buffer::new(&[0; 8000]);
    all_reduce(&mut comm, &mut data)?;
    let liveness = node.liveness.clone();
    let is_root = node.rank.is_root();
    let other = std::thread::spawn(move || {
        if is_root {
            // Long enough for rank 0 to be blocked; the test holds without it, too.
            std::thread::sleep(Duration::from_millis(100));
            liveness.fail(Error::new(ErrorKind::Aborted, "the user pressed stop"));
        }
        Instant::now()
    });
    let outcome = comm.wait(Deadline::after(LIMIT));
    let ended = other.join().unwrap();
    if is_root {
        assert!(ended.elapsed() < GRACE, "took {:?}", ended.elapsed());
    }
    outcome.map(|()| String::new())
}

#[test]
fn an_abort_by_another_thread_ends_all_ranks() {
    let mut ranks = Launch::new("aborted elsewhere", 3).start();
    ranks.time_until_end_of(0);
    for rank in 1..3 {
        assert!(ranks.time_until_end_of(rank) < GRACE);
    }
    for (rank, outcome) in ranks.wait().iter().enumerate() {
        failed(outcome, &[&format!("all_reduce on rank {rank}"), "the user pressed stop"]);
    }
}

/// The control channel reports the cause after NCCL, or the deadline, has ended the wait.
fn explained_late() -> Result<String> {
    let node = Node::connect_tcp()?;
    let mut data = Buffer::new(&[0; 8000]);
    for collective in [Step::Never, Step::Fails(6)] {
        fake::play(Script { collective, ..Script::default() });
        let liveness = Liveness::new(1);
        let mut comm = node.connect_in(liveness.clone(), Box::new(FakeStream::new()), LIMIT)?;
        all_reduce(&mut comm, &mut data)?;
        let control = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            liveness.fail(Error::new(ErrorKind::PeerLost(Rank(7)), "rank 7 is lost"))
        });
        let error = comm.wait(Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert!(control.join().unwrap(), "{collective:?}: not the first cause");
        assert_eq!(error.to_string(), "all_reduce on rank 0: rank 7 is lost");
        assert_eq!(error.kind(), ErrorKind::PeerLost(Rank(7)));
    }
    Ok(String::new())
}

#[test]
fn a_cause_that_comes_late_is_waited_for() {
    Launch::new("explained late", 1).succeed();
}

/// A drop gives NCCL five seconds and then aborts; the group does not fail.
fn stuck_in_finalize() -> Result<String> {
    let node = Node::connect_tcp()?;
    let comm = node.connect(LIMIT)?;
    fake::play(Script { finalize: Step::Never, ..Script::default() });
    let start = Instant::now();
    drop(comm);
    let took = start.elapsed();
    assert!((Duration::from_secs(5)..Duration::from_secs(7)).contains(&took), "{took:?}");
    assert!(node.liveness.cause().is_none());
    fake::play(Script { finalize: Step::Refuses(3), ..Script::default() });
    let error = node.connect(LIMIT)?.finish().unwrap_err();
    assert!(error.to_string().starts_with("finalize on rank 0 failed: ncclInternalError"), "{error}");
    assert_eq!(freed(&fake::log()), (2, 0));
    Ok(String::new())
}

#[test]
fn a_drop_ends_though_finalize_does_not() {
    Launch::new("stuck in finalize", 1).succeed();
}

/// A stream of a device that fails when the event is recorded or when it is polled.
struct Broken {
    stream: FakeStream,
    at_record: bool,
}

impl Stream for Broken {
    fn raw(&self) -> RawStream {
        self.stream.raw()
    }

    fn record(&mut self) -> Result<()> {
        if self.at_record {
            return Err(Error::new(ErrorKind::Device, "the device fell off the bus"));
        }
        self.stream.record()
    }

    fn is_reached(&mut self) -> Result<bool> {
        Err(Error::new(ErrorKind::Device, "the device fell off the bus"))
    }
}

fn stream_fails() -> Result<String> {
    let node = Node::connect_tcp()?;
    let stream = Broken { stream: FakeStream::new(), at_record: argument() == "record" };
    let mut comm = if node.rank == Rank(1) {
        node.connect_in(node.liveness.clone(), Box::new(stream), LIMIT)?
    } else {
        fake::play(Script { collective: Step::Never, ..Script::default() });
        node.connect(LIMIT)?
    };
    let mut data = Buffer::new(&[0; 8000]);
    all_reduce(&mut comm, &mut data)?;
    comm.wait(Deadline::after(LIMIT)).map(|()| String::new())
}

#[test]
fn a_device_that_fails_ends_all_ranks() {
    for at in ["record", "poll"] {
        for (rank, outcome) in Launch::new("stream fails", 2).argument(at).run().iter().enumerate() {
            let own = format!("all_reduce on rank {rank}");
            failed(outcome, &[&own, "all_reduce on rank 1: the device fell off the bus"]);
        }
    }
}

/// Wrong arguments start nothing and end nothing.
fn misuse() -> Result<String> {
    let node = Node::connect_tcp()?;
    let mut comm = node.connect(LIMIT)?;
    let mut data = Buffer::new(&[0; 8000]);
    let refused = |outcome: Result<()>, text: &str| {
        let error = outcome.expect_err("must be refused");
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Config, text));
    };
    // SAFETY: no span, no memory.
    let outcome = unsafe { comm.start_broadcast(&[], DType::F32, Rank(2)) };
    refused(outcome, "the root of broadcast is rank 2, but the group has 2");
    all_reduce(&mut comm, &mut data)?;
    // Other memory: the data is in use until the wait.
    let outcome = all_reduce(&mut comm, &mut Buffer::new(&[0; 8000]));
    refused(outcome, "all_reduce while all_reduce is in flight: wait for it first");
    comm.wait(Deadline::after(LIMIT))?;
    comm.finish()?;
    refused(all_reduce(&mut comm, &mut data), "all_reduce after the communicator was finished");
    assert!(comm.error().is_none());
    assert_eq!(freed(&fake::log()), (0, 1));
    Ok(String::new())
}

#[test]
fn wrong_arguments_are_refused_and_end_nothing() {
    Launch::new("misuse", 2).succeed();
}
