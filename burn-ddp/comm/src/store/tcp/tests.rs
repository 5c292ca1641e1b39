//! The store over real sockets. Ports are 0: rank 0 binds a free one and the others are told.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::*;
use crate::rank::Rank;

const LONG: Duration = Duration::from_secs(20);

fn info(rank: usize, port: u16) -> RankInfo {
    let master = Some(("127.0.0.1".into(), port));
    RankInfo { rank: Rank(rank), world_size: 3, local_world_size: 3, master, ..RankInfo::solo() }
}

/// A process of another pid on this host, as far as the store can tell.
fn join_as(pid: u32, info: &RankInfo, timeout: Duration) -> Result<TcpStore> {
    TcpStore::connect(info, Claim { pid, ..Claim::of(info) }, timeout)
}

fn serve() -> (TcpStore, u16) {
    let store = join_as(100, &info(0, 0), LONG).unwrap();
    let port = store.server_addr().port();
    (store, port)
}

/// A port that nobody listens on. No other test uses this address, so none can take the port meanwhile.
fn free(host: &str, rank: usize) -> RankInfo {
    let port = TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
    RankInfo { master: Some((host.into(), port)), ..info(rank, port) }
}

fn refused<T>(result: Result<T>, kind: ErrorKind, words: &[&str]) {
    let error = result.map(drop).expect_err("must be refused");
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} lacks {word}");
    }
}

#[test]
fn a_value_set_by_one_rank_is_read_by_all() {
    let (zero, port) = serve();
    let one = TcpStore::from_rank_info(&info(1, port), LONG).unwrap();
    let big: Vec<u8> = (0..3 << 20).map(|at| (at % 251) as u8).collect();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.get("big", LONG));
        zero.set("big", &big).unwrap();
        assert!(waiting.join().unwrap().unwrap() == big);
    });
    zero.set("big", b"").unwrap();
    assert_eq!(one.get("big", Duration::ZERO).unwrap(), b"");
    assert!(one.local_addr().ip().is_loopback());
}

#[test]
fn a_waiting_get_does_not_hold_up_the_set_of_another_thread() {
    let (zero, _port) = serve();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| zero.get("key", LONG))).collect();
        zero.add("go", 1).unwrap();
        zero.set("key", b"value").unwrap();
        for thread in waiting {
            assert_eq!(thread.join().unwrap().unwrap(), b"value");
        }
    });
}

#[test]
fn eight_threads_count_together() {
    let (zero, port) = serve();
    let one = TcpStore::from_rank_info(&info(1, port), LONG).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let store = if thread % 2 == 0 { &zero } else { &one };
            scope.spawn(|| (0..50).for_each(|_| assert!(store.add("n", 2).unwrap() > 0)));
        }
    });
    assert_eq!(zero.add("n", -1).unwrap(), 799);
}

#[test]
fn a_missing_key_is_named_with_the_time() {
    let (zero, _port) = serve();
    refused(zero.get("key", Duration::from_millis(50)), ErrorKind::Timeout, &["'key'", "0.05 s"]);
    refused(zero.get("key", Duration::ZERO), ErrorKind::Timeout, &["'key'"]);
    refused(zero.set(&"k".repeat(5000), b""), ErrorKind::Config, &["5000 bytes", "4096"]);
    refused(zero.set("key", &vec![0; protocol::VALUE_LIMIT + 1]), ErrorKind::Config, &["67108865 bytes"]);
    zero.set("key", b"still works").unwrap();
}

#[test]
fn garbage_closes_its_connection_and_nothing_else() {
    let (zero, port) = serve();
    // A value of 64 MiB is promised, and enough comes to see that it is not waited for.
    let endless = [&b"BDDP"[..], &[2, 0, 9, 0, 0, 0, 0, 4], &[0; 64]].concat();
    let before_hello = protocol::encode(&Request::Add { key: "n".into(), delta: 1 }, 0).unwrap();
    for garbage in [b"GET / HTTP/1.1\r\n\r\n", &endless[..], &before_hello, &[0xFF; 100_000]] {
        let start = Instant::now();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        // The server may close before it has read everything.
        let _ = stream.write_all(garbage);
        assert!(matches!(stream.read(&mut [0; 16]), Ok(0) | Err(_)), "the server must close");
        assert!(start.elapsed() < Duration::from_secs(4), "it is closed for what it sent, not for silence");
    }
    assert_eq!(zero.add("n", 1).unwrap(), 1);
}

#[test]
fn rank_0_taken_twice_fails_both() {
    let (zero, port) = serve();
    let one = TcpStore::from_rank_info(&info(1, port), LONG).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.get("never", LONG));
        let second = join_as(200, &info(0, port), LONG);
        refused(second, ErrorKind::Config, &["rank 0 already taken by pid 100 on host", "pid 200"]);
        let words = ["rank 0 claimed twice", "pid 100", "pid 200"];
        refused(waiting.join().unwrap(), ErrorKind::Config, &words);
        refused(zero.get("never", LONG), ErrorKind::Config, &words);
        refused(one.set("key", b""), ErrorKind::Config, &words);
        refused(TcpStore::from_rank_info(&info(2, port), LONG), ErrorKind::Config, &words);
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
}

#[test]
fn rank_1_taken_twice_fails_all() {
    let (zero, port) = serve();
    let one = join_as(300, &info(1, port), LONG).unwrap();
    let _again = join_as(300, &info(1, port), LONG).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| zero.get("never", LONG));
        let second = join_as(400, &info(1, port), LONG);
        refused(second, ErrorKind::Config, &["rank 1 already taken by pid 300"]);
        refused(waiting.join().unwrap(), ErrorKind::Config, &["rank 1 claimed twice", "pid 300", "pid 400"]);
    });
    refused(one.add("n", 1), ErrorKind::Config, &["rank 1 claimed twice"]);
}

#[test]
fn another_run_is_refused_and_harms_nobody() {
    let (zero, port) = serve();
    for rank in [0, 1] {
        let other = RankInfo { run_id: "other".into(), ..info(rank, port) };
        refused(TcpStore::from_rank_info(&other, LONG), ErrorKind::Config, &["'none'", "'other'", "pid 100"]);
        let other = RankInfo { restart_count: 4, ..info(rank, port) };
        refused(TcpStore::from_rank_info(&other, LONG), ErrorKind::Config, &["TORCHELASTIC_RESTART_COUNT=4"]);
    }
    refused(TcpStore::from_rank_info(&info(7, port), LONG), ErrorKind::Config, &["RANK=7", "WORLD_SIZE=3"]);
    zero.set("key", b"still works").unwrap();
    let words = ["'never'", "refused: rank 7 (pid", "because RANK=7 is outside", "'other'"];
    refused(zero.get("never", Duration::from_millis(50)), ErrorKind::Timeout, &words);
}

#[test]
fn another_world_size_fails_all() {
    let (zero, port) = serve();
    let other = RankInfo { world_size: 2, ..info(1, port) };
    let words = ["WORLD_SIZE=2", "WORLD_SIZE=3", "rank 1 (pid"];
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| zero.get("never", LONG));
        refused(TcpStore::from_rank_info(&other, LONG), ErrorKind::Config, &words);
        refused(waiting.join().unwrap(), ErrorKind::Config, &words);
    });
}

#[test]
fn a_port_of_another_program_is_named_within_seconds() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let start = Instant::now();
    let words = [&format!("{address} is in use by another program"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"];
    refused(TcpStore::from_rank_info(&info(0, address.port()), LONG), ErrorKind::Io, &words);
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
}

#[test]
fn an_unreachable_rank_0_is_named_with_the_limit() {
    let one = free("127.0.0.3", 1);
    let words = ["127.0.0.3:", "within 0.3 s", "MASTER_ADDR", "rank 1"];
    let limit = Duration::from_millis(300);
    refused(TcpStore::from_rank_info(&one, limit), ErrorKind::Timeout, &words);
    let long = RankInfo { run_id: "r".repeat(513), ..one.clone() };
    refused(
        TcpStore::from_rank_info(&long, limit),
        ErrorKind::Config,
        &["TORCHELASTIC_RUN_ID has 513 bytes"],
    );
    let nowhere = RankInfo { master: None, ..info(1, 1) };
    refused(TcpStore::from_rank_info(&nowhere, limit), ErrorKind::Config, &["MASTER_ADDR"]);
}

/// A program that answers its first caller with `words` and later ones, as long as the listener lives, with
/// silence.
fn answering(words: &'static [u8]) -> (TcpListener, RankInfo) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepting = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut first = accepting.accept().unwrap().0;
        // Bytes that nobody has read would turn the end of the connection into a reset.
        let _ = first.read(&mut [0; 4096]).unwrap();
        first.write_all(words).unwrap();
    });
    (listener, info(1, port))
}

#[test]
fn the_most_telling_obstacle_is_named() {
    let limit = Duration::from_millis(500);
    let (_listener, http) = answering(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let words = ["within 0.5 s", "does not speak the protocol"];
    refused(TcpStore::from_rank_info(&http, limit), ErrorKind::Timeout, &words);
    // It hangs up at once, which says more than the short silence after it.
    let (_listener, closing) = answering(b"");
    let error = TcpStore::from_rank_info(&closing, limit).map(drop).expect_err("no store");
    assert!(!error.to_string().contains("no answer"), "{error}");
}

#[test]
fn rank_0_may_come_last() {
    let info = free("127.0.0.4", 1);
    std::thread::scope(|scope| {
        let one = scope.spawn(|| TcpStore::from_rank_info(&info, LONG));
        let zero = RankInfo { rank: Rank(0), ..info.clone() };
        let zero = TcpStore::from_rank_info(&zero, LONG).unwrap();
        let one = one.join().unwrap().unwrap();
        zero.set("key", b"value").unwrap();
        assert_eq!(one.get("key", LONG).unwrap(), b"value");
    });
}

#[test]
fn the_end_of_rank_0_reaches_waiting_and_later_calls() {
    let (zero, port) = serve();
    let one = TcpStore::from_rank_info(&info(1, port), LONG).unwrap();
    let finished = ErrorKind::PeerFinished(Rank(0));
    let words = ["rank 0, which serves the store, has already finished"];
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.get("never", LONG));
        zero.set("key", b"value").unwrap();
        drop(zero);
        refused(waiting.join().unwrap(), finished, &words);
    });
    refused(one.get("key", LONG), finished, &words);
    refused(one.set("key", b""), finished, &words);
    TcpListener::bind(("127.0.0.1", port)).expect("the port is free again");
}

#[test]
fn an_idle_client_hears_of_the_end_at_its_next_call() {
    let (zero, port) = serve();
    let one = TcpStore::from_rank_info(&info(1, port), LONG).unwrap();
    drop(zero);
    refused(one.set("key", &[0; 1 << 20]), ErrorKind::PeerFinished(Rank(0)), &["has already finished"]);
}

#[test]
fn a_name_serves_as_well_as_an_address() {
    let host = crate::net::host::host_name();
    for name in ["localhost", "127.0.0.2", "::1", "[::1]", &host] {
        if client::resolve(name, 1).is_err() || (name.contains(':') && TcpListener::bind("[::1]:0").is_err())
        {
            continue;
        }
        let at = |rank: usize, port: u16| RankInfo { master: Some((name.into(), port)), ..info(rank, port) };
        let zero = TcpStore::from_rank_info(&at(0, 0), LONG).unwrap();
        let one = TcpStore::from_rank_info(&at(1, zero.server_addr().port()), LONG).unwrap();
        one.set("key", name.as_bytes()).unwrap();
        assert_eq!(zero.get("key", LONG).unwrap(), name.as_bytes(), "{name}");
    }
}

#[test]
fn a_rank_that_ends_without_a_goodbye_fails_everybody_at_once() {
    let (zero, port) = serve();
    let two = join_as(102, &info(2, port), LONG).unwrap();
    let claim = Claim { pid: 101, ..Claim::of(&info(1, port)) };
    let hello = Request::Hello { claim, client: 0, serves: false };
    let one =
        client_connection::ClientConnection::open(zero.server_addr(), &hello, Deadline::after(LONG)).unwrap();
    let start = Instant::now();
    let (kind, words) = (ErrorKind::PeerLost(Rank(1)), ["rank 1 (pid 101 on host", "ended during start-up"]);
    std::thread::scope(|scope| {
        let waiting = [&zero, &two].map(|store| scope.spawn(|| store.get("never", LONG)));
        // Its process dies.
        drop(one);
        for thread in waiting {
            refused(thread.join().unwrap(), kind, &words);
        }
    });
    refused(two.set("key", b""), kind, &words);
    refused(join_as(101, &info(1, port), LONG), kind, &words);
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
}

#[test]
fn a_rank_that_finishes_or_panics_is_told_apart() {
    let (zero, port) = serve();
    drop(join_as(101, &info(1, port), LONG).unwrap());
    zero.set("key", b"still works").unwrap();
    let panicked = std::thread::spawn(move || {
        let _one = join_as(101, &info(1, port), LONG).unwrap();
        panic!("of the test");
    });
    panicked.join().expect_err("it panics");
    refused(zero.get("never", LONG), ErrorKind::PeerLost(Rank(1)), &["rank 1 (pid 101"]);
}

#[test]
fn a_client_whose_answer_is_late_is_not_lost() {
    let (zero, port) = serve();
    let one = join_as(101, &info(1, port), LONG).unwrap();
    let never = Request::Get { key: "never".into(), wait_ms: 20_000 };
    let late = one.client.call_until(&never, &[], Deadline::after(Duration::from_millis(50)));
    refused(late, ErrorKind::Timeout, &["did not answer"]);
    zero.set("key", b"still works").unwrap();
    assert_eq!(one.get("key", LONG).unwrap(), b"still works");
    drop(one);
    zero.set("key", b"still works").unwrap();
}

#[test]
fn an_address_keeps_its_scope() {
    assert!(client::is_address("fe80::1%eth0") && client::is_address("[fe80::1%eth0]"));
    assert!(!client::is_address("host%eth0") && !client::is_address("127.0.0.1%eth0"));
    if TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    // The first interface of a host is its loopback, called lo.
    let resolved = client::resolve("fe80::1%lo", 7).unwrap();
    let scopes: Vec<_> = resolved.iter().map(|address| address.to_string()).collect();
    assert_eq!(scopes, ["[fe80::1%1]:7"]);
    let interfaces = if_addrs::get_if_addrs().unwrap();
    for link_local in
        interfaces.iter().filter(|one| one.is_oper_up() && one.is_link_local() && one.ip().is_ipv6())
    {
        let at = |rank: usize, port: u16| RankInfo {
            master: Some((format!("{}%{}", link_local.ip(), link_local.name), port)),
            ..info(rank, port)
        };
        let zero = TcpStore::from_rank_info(&at(0, 0), LONG).unwrap();
        let one = TcpStore::from_rank_info(&at(1, zero.server_addr().port()), LONG).unwrap();
        zero.set("key", b"value").unwrap();
        assert_eq!(one.get("key", LONG).unwrap(), b"value");
    }
}
