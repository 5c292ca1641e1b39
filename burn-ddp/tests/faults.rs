//! What is left when a rank dies, stops, errs or calls something else: an error that names it, soon.

use std::time::Duration;

use burn::tensor::{Tensor, TensorData};
use burn_ddp::{Ddp, Error, ProcessGroup, Rank, ReduceOp, Result};
use burn_flex::Flex;
use rustix::process::Signal;

use crate::harness::{Case, Launch, ROADS, argument, mark};

pub const CASES: &[(&str, Case)] = &[
    ("collective", collective),
    ("mixed up", mixed_up),
    ("slow start", slow_start),
    ("panic", panics),
    ("poisoned", poisoned),
    ("nothing", nothing),
    ("reducing", reducing),
];

type B = Ddp<Flex>;

const KINDS: [&str; 6] =
    ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "all_gather_bytes"];

fn group() -> Result<ProcessGroup<B>> {
    ProcessGroup::from_env(&Default::default())
}

fn call(group: &ProcessGroup<B>, kind: &str) -> Result<()> {
    let values = vec![group.rank().0 as f32; 1000];
    let tensor = Tensor::<B, 1>::from_data(TensorData::from(values.as_slice()), group.device());
    match kind {
        "all_reduce" => group.all_reduce(tensor, ReduceOp::Sum).wait().map(drop),
        "reduce_scatter" => group.reduce_scatter(tensor, ReduceOp::Sum).wait().map(drop),
        "all_gather" => group.all_gather(tensor).wait().map(drop),
        "broadcast" => group.broadcast(tensor, Rank(0)).wait().map(drop),
        "barrier" => group.barrier(),
        _ => group.all_gather_bytes(vec![1, 2, 3]).map(drop),
    }
}

/// The last rank does nothing for ever; the others call the collective of the argument.
fn collective() -> Result<String> {
    let group = group()?;
    group.barrier()?;
    mark("connected");
    if group.rank().0 + 1 == group.world_size() {
        loop {
            std::thread::park();
        }
    }
    // Rank 0 as root could leave a broadcast before anybody died; the second call cannot succeed.
    call(&group, &argument()).and_then(|()| call(&group, &argument()))?;
    Ok(String::new())
}

#[test]
fn a_killed_rank_is_named_within_five_seconds_in_every_collective() {
    for kind in KINDS {
        let mut ranks = Launch::new("collective", 3).argument(kind).start();
        (0..3).for_each(|rank| ranks.wait_for_mark(rank, "connected"));
        ranks.signal(2, Signal::KILL);
        for rank in 0..2 {
            assert!(ranks.time_until_end_of(rank) < Duration::from_secs(5), "{kind}");
        }
        for outcome in ranks.wait().iter().take(2) {
            outcome.failed_saying(&["rank 2 is lost"]);
        }
    }
}

/// Reduces 4 MiB for as long as the group stands, and says how much CPU time the last attempt took.
fn reducing() -> Result<String> {
    let cpu_ms = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        time.tv_sec * 1000 + time.tv_nsec / 1_000_000
    };
    let group = group()?;
    group.barrier()?;
    mark("connected");
    loop {
        let tensor = Tensor::<B, 1>::ones([1 << 20], group.device());
        let before = cpu_ms();
        let reduced = group.all_reduce(tensor, ReduceOp::Sum).wait();
        drop(reduced.map_err(|error| error.context(format!("spent {} ms of CPU time", cpu_ms() - before)))?);
    }
}

/// Whether any process holds the anonymous file with this inode.
fn is_held(inode: &str) -> bool {
    let holds = |process: std::path::PathBuf| {
        let Ok(files) = std::fs::read_dir(process.join("fd")) else { return false };
        files.flatten().any(|file| inode_of(&file.path()).is_some_and(|found| found == inode))
    };
    std::fs::read_dir("/proc").expect("Linux").flatten().any(|process| holds(process.path()))
}

fn inode_of(file: &std::path::Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let target = std::fs::read_link(file).ok()?;
    let shared = target.to_string_lossy().contains("memfd:burn-ddp");
    shared.then(|| std::fs::metadata(file).ok().map(|data| data.ino().to_string()))?
}

#[test]
fn a_rank_killed_amid_a_reduction_is_named_and_leaves_no_memory_behind() {
    for road in ROADS {
        let mut ranks = Launch::new("reducing", 3).over(road).start();
        (0..3).for_each(|rank| ranks.wait_for_mark(rank, "connected"));
        let held = ranks.open_files(0).iter().find_map(|file| inode_of(file));
        assert_eq!(held.is_some(), road != "tcp", "{road}");
        ranks.signal(1, Signal::KILL);
        for rank in [0, 2] {
            assert!(ranks.time_until_end_of(rank) < Duration::from_secs(5), "{road}");
        }
        let outcomes = ranks.wait();
        for rank in [0, 2] {
            outcomes[rank].failed_saying(&["rank 1 is lost"]);
        }
        assert!(!held.is_some_and(|inode| is_held(&inode)), "{road}");
    }
}

#[test]
fn a_rank_stopped_amid_a_reduction_is_named_and_nobody_spins() {
    for road in ROADS {
        let mut ranks = Launch::new("reducing", 3).over(road).env("BURN_DDP_PEER_TIMEOUT", "3").start();
        (0..3).for_each(|rank| ranks.wait_for_mark(rank, "connected"));
        ranks.signal(1, Signal::STOP);
        for rank in [0, 2] {
            assert!(ranks.time_until_end_of(rank) < Duration::from_secs(7), "{road}");
        }
        ranks.signal(1, Signal::KILL);
        let outcomes = ranks.wait();
        for rank in [0, 2] {
            outcomes[rank].failed_saying(&["rank 1", "heartbeat"]);
            let words = outcomes[rank].stderr.split("spent ").nth(1).and_then(|rest| rest.split(' ').next());
            let spent: u64 = words.expect("what it spent").parse().expect("milliseconds");
            assert!(spent < 1000, "{road}: {spent} ms of CPU time in three seconds of waiting");
        }
    }
}

#[test]
fn a_stopped_rank_is_named_when_its_heartbeat_is_missing() {
    for kind in ["all_reduce", "barrier"] {
        let mut ranks = Launch::new("collective", 3).argument(kind).env("BURN_DDP_PEER_TIMEOUT", "2").start();
        (0..3).for_each(|rank| ranks.wait_for_mark(rank, "connected"));
        ranks.signal(2, Signal::STOP);
        for rank in 0..2 {
            assert!(ranks.time_until_end_of(rank) < Duration::from_secs(6), "{kind}");
        }
        ranks.signal(2, Signal::KILL);
        for outcome in ranks.wait().iter().take(2) {
            outcome.failed_saying(&["rank 2", "heartbeat"]);
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline_of_every_collective() {
    for kind in KINDS {
        let mut ranks = Launch::new("collective", 2).argument(kind).env("BURN_DDP_TIMEOUT", "1").start();
        ranks.wait_for_mark(0, "connected");
        assert!(ranks.time_until_end_of(0) < Duration::from_secs(4), "{kind}");
        ranks.signal(1, Signal::KILL);
        let name = kind.trim_end_matches("_bytes");
        ranks.wait()[0].failed_saying(&["rank 1", name, "waited 1s"]);
    }
}

/// Ranks call different collectives.
fn mixed_up() -> Result<String> {
    let group = group()?;
    let argument = argument();
    let kinds: Vec<_> = argument.split(' ').collect();
    call(&group, kinds[group.rank().0 % kinds.len()])?;
    Ok(String::new())
}

#[test]
fn different_collectives_are_an_error_on_both_sides() {
    for (a, b) in [("broadcast", "all_reduce"), ("all_gather", "barrier"), ("reduce_scatter", "all_reduce")] {
        for outcome in Launch::new("mixed up", 2).argument(format!("{a} {b}")).run() {
            outcome.failed_saying(&[a, b, "#0", "rank 0", "rank 1"]);
        }
    }
}

/// Rank 0 is busy for longer than the peer timeout, but alive.
fn slow_start() -> Result<String> {
    let group = group()?;
    mark("connected");
    if group.rank().is_root() {
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while std::time::Instant::now() < end {
            std::hint::spin_loop();
        }
    }
    call(&group, "all_reduce")?;
    Ok(String::new())
}

#[test]
fn a_slow_but_living_rank_is_waited_for() {
    Launch::new("slow start", 2).env("BURN_DDP_PEER_TIMEOUT", "2").succeed();
}

fn panics() -> Result<String> {
    let group = group()?;
    call(&group, "all_reduce")?;
    if group.rank().0 == 1 {
        if argument() == "panic" {
            panic!("boom-17");
        }
        return group.finish(Err(Error::config("bad row 13")));
    }
    call(&group, "all_reduce")?;
    Ok(String::new())
}

#[test]
fn the_cause_of_a_failed_rank_reaches_the_others() {
    let outcomes = Launch::new("panic", 3).argument("panic").run();
    outcomes[1].failed_saying(&["boom-17"]);
    outcomes[0].failed_saying(&["rank 1"]);
    outcomes[2].failed_saying(&["rank 1"]);
    let outcomes = Launch::new("panic", 3).argument("abort").run();
    outcomes[0].failed_saying(&["rank 1", "bad row 13"]);
    outcomes[2].failed_saying(&["rank 1", "bad row 13"]);
}

/// After the first error every call names it at once.
fn poisoned() -> Result<String> {
    let group = group()?;
    if group.rank().0 == 1 {
        group.abort("first cause");
    }
    let mut texts = Vec::new();
    for kind in KINDS {
        let start = std::time::Instant::now();
        let error = call(&group, kind).expect_err("the group has failed");
        assert!(start.elapsed() < Duration::from_secs(2), "{kind} took {:?}", start.elapsed());
        texts.push(error.to_string());
    }
    assert!(group.cause().is_some());
    Ok(texts.join("\n"))
}

#[test]
fn every_call_after_the_first_error_names_the_first_cause() {
    for text in Launch::new("poisoned", 2).succeed() {
        assert!(text.lines().all(|line| line.contains("first cause")), "{text}");
    }
}

fn nothing() -> Result<String> {
    group().map(|group| format!("{} of {}", group.rank(), group.world_size()))
}

#[test]
fn a_rank_that_is_taken_twice_fails_both() {
    for outcome in Launch::new("nothing", 2).env("RANK", 0).run() {
        outcome.failed_saying(&["rank 0", "pid"]);
    }
}

#[test]
fn wrong_environments_are_one_line_and_exit_code_two() {
    let table: [(&str, &str, &str); 4] = [
        ("RANK", "2", "RANK=2"),
        ("WORLD_SIZE", "two", "WORLD_SIZE=two"),
        ("MASTER_PORT", "99999", "MASTER_PORT=99999"),
        ("BURN_DDP_TIMEOUT", "soon", "BURN_DDP_TIMEOUT=soon"),
    ];
    for (name, value, word) in table {
        for outcome in Launch::new("nothing", 2).env(name, value).run() {
            outcome.failed_saying(&[word]);
            assert_eq!((outcome.status.code(), outcome.stderr.lines().count()), (Some(2), 1), "{outcome:?}");
        }
    }
    for outcome in Launch::new("nothing", 1).without("WORLD_SIZE").without("MASTER_PORT").run() {
        outcome.failed_saying(&["WORLD_SIZE", "MASTER_PORT"]);
        assert_eq!(outcome.status.code(), Some(2));
    }
}

#[test]
fn an_unreachable_rank_zero_is_an_error_at_the_deadline() {
    let launch = Launch::new("nothing", 1).env("RANK", 1).env("WORLD_SIZE", 2);
    let outcomes = launch.env("LOCAL_WORLD_SIZE", 2).env("BURN_DDP_RENDEZVOUS_TIMEOUT", "1").run();
    outcomes[0].failed_saying(&["127.0.0.1:", "within 1 s"]);
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    let launch = Launch::new("nothing", 1).env("WORLD_SIZE", 3).env("LOCAL_WORLD_SIZE", 3);
    launch.env("BURN_DDP_RENDEZVOUS_TIMEOUT", "1").run()[0].failed_saying(&["rank 1", "rank 2"]);
}

#[test]
fn a_port_in_use_is_said() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = held.local_addr().expect("an address").port();
    let launch = Launch::new("nothing", 1).env("WORLD_SIZE", 2).env("LOCAL_WORLD_SIZE", 2);
    let outcomes = launch.env("MASTER_PORT", port).run();
    outcomes[0].failed_saying(&["in use", &format!("127.0.0.1:{port}")]);
}
