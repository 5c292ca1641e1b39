//! Threads as ranks over real sockets.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::dtype::DType;
use crate::dtype::ReduceOp;
use crate::operation::Operation;
use crate::rendezvous::PeerInfo;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn listeners(world: usize, address: IpAddr) -> (Vec<Listener>, Vec<PeerInfo>) {
    let listeners: Vec<Listener> = (0..world).map(|_| Listener::bind(address).unwrap()).collect();
    let info = |(rank, listener): (usize, &Listener)| {
        PeerInfo::new(Rank(rank), "here", std::process::id(), listener.address().unwrap())
    };
    let peers = listeners.iter().enumerate().map(info).collect();
    (listeners, peers)
}

fn connect(listeners: Vec<Listener>, peers: &[PeerInfo]) -> Vec<Mesh> {
    let call = |(rank, listener): (usize, Listener)| listener.connect(Rank(rank), "test", peers, soon());
    thread::scope(|scope| {
        let ranks: Vec<_> =
            listeners.into_iter().enumerate().map(|entry| scope.spawn(move || call(entry))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

/// The connections of `world` ranks on this host.
pub(crate) fn meshes(world: usize) -> Vec<Mesh> {
    let (listeners, peers) = listeners(world, LOCAL);
    connect(listeners, &peers)
}

/// Runs `rank` once for each of `world` ranks, at the same time; the results by rank.
pub(crate) fn ranks<T: Send>(world: usize, rank: impl Fn(Rank, Mesh, Liveness) -> T + Sync) -> Vec<T> {
    let rank = &rank;
    thread::scope(|scope| {
        let start = |(me, mesh)| scope.spawn(move || rank(Rank(me), mesh, Liveness::new(world)));
        let threads: Vec<_> = meshes(world).into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn wires<T: Send>(world: usize, rank: impl Fn(Rank, TcpTransport) -> T + Sync) -> Vec<T> {
    ranks(world, |me, mesh, liveness| rank(me, TcpTransport::new(me, mesh.data, liveness).unwrap()))
}

pub(crate) fn frame(kind: Operation, sequence: u64, bytes: usize) -> Header {
    Header::new(kind, sequence, DType::U8, bytes).with_body(0, bytes)
}

/// Every rank sends `bytes` to the next one and receives as many from the one before, all at once.
fn ring(world: usize, bytes: usize) {
    wires(world, |me, mut wire| {
        let (next, last) = (Rank((me.0 + 1) % world), Rank((me.0 + world - 1) % world));
        let pattern = |rank: Rank| {
            // No power of two, so that a block in the wrong place shows.
            let block: Vec<u8> = (0..251).map(|index| index + rank.0 as u8).collect();
            let mut all = block.repeat(bytes / 251 + 1);
            all.truncate(bytes);
            all
        };
        let (out, expected, mut into) = (pattern(me), pattern(last), vec![0; bytes]);
        for sequence in 0..3 {
            into.fill(0);
            let header = frame(Operation::AllReduce(ReduceOp::Sum), sequence, bytes);
            wire.send_recv(next, &header, &[&out], last, &header, &mut [&mut into], soon()).unwrap();
            assert!(into == expected, "frame {sequence} of {last} came in another form");
        }
    });
}

#[test]
fn large_frames_go_both_ways_at_once() {
    ring(2, 64 << 20);
}

#[test]
fn a_ring_in_which_everybody_sends_first() {
    ring(4, 64 << 20);
}

#[test]
fn frames_around_the_limits_of_one_read() {
    for bytes in [0, 1, HEAD - Header::SIZE - 1, HEAD - Header::SIZE, HEAD - Header::SIZE + 1, HEAD * 3] {
        ring(3, bytes);
    }
}

/// Cuts `bytes` into buffers of a few bytes, some of them empty.
fn crumbs(bytes: &mut [u8], step: usize) -> Vec<&mut [u8]> {
    bytes
        .chunks_mut(step)
        .enumerate()
        .flat_map(|(index, crumb)| {
            let (first, second) = crumb.split_at_mut(index % (step + 1) % crumb.len());
            [first, second]
        })
        .collect()
}

#[test]
fn bodies_of_many_buffers_are_cut_anew_on_arrival() {
    for bytes in [1, 500, HEAD - Header::SIZE, HEAD, 100_000] {
        wires(2, |me, mut wire| {
            let (peer, header) = (Rank(1 - me.0), frame(Operation::AllReduce(ReduceOp::Sum), 0, bytes));
            let pattern = |rank: Rank| (0..bytes).map(|at| (at % 251 + rank.0) as u8).collect::<Vec<u8>>();
            let (mut out, mut into) = (pattern(me), vec![0; bytes]);
            let sent: Vec<&[u8]> = crumbs(&mut out, 7).into_iter().map(|part| &*part).collect();
            let mut received = crumbs(&mut into, 11);
            wire.send_recv(peer, &header, &sent, peer, &header, &mut received, soon()).unwrap();
            assert!(into == pattern(peer), "{bytes} bytes");
        });
    }
}

#[test]
fn frames_that_were_sent_earlier_wait_in_order() {
    wires(2, |me, mut wire| {
        let peer = Rank(1 - me.0);
        for (sequence, body) in [(0, &b""[..]), (1, b"abc"), (2, b""), (3, &[7; 9000])] {
            wire.send(peer, &frame(Operation::Broadcast(Rank(0)), sequence, body.len()), &[body], soon())
                .unwrap();
        }
        for (sequence, body) in [(0, &b""[..]), (1, b"abc"), (2, b""), (3, &[7; 9000])] {
            let mut into = vec![0; body.len()];
            wire.recv(
                peer,
                &frame(Operation::Broadcast(Rank(0)), sequence, body.len()),
                &mut [&mut into],
                soon(),
            )
            .unwrap();
            assert_eq!(into, body);
        }
    });
}

#[test]
fn ipv6_is_a_wire_too() {
    // Some containers have no IPv6 at all.
    if Listener::bind(Ipv6Addr::LOCALHOST.into()).is_err() {
        eprintln!("skipped: this machine has no IPv6");
        return;
    }
    let (listeners, peers) = listeners(2, Ipv6Addr::LOCALHOST.into());
    assert!(peers[0].address.is_ipv6());
    assert!(connect(listeners, &peers)[0].data[1].is_some());
}

#[test]
fn a_mismatch_names_both_operations_and_leaves_the_buffer_alone() {
    let started = Instant::now();
    let errors = wires(2, |me, mut wire| {
        let peer = Rank(1 - me.0);
        let kind = [Operation::AllReduce(ReduceOp::Sum), Operation::Broadcast(Rank(0))][me.0];
        let header = frame(kind, 5, 1000);
        let mut into = vec![0; 1000];
        let error = wire
            .send_recv(peer, &header, &[&[1; 1000]], peer, &header, &mut [&mut into], soon())
            .unwrap_err();
        assert_eq!(into, [0; 1000]);
        // What is left on the connection is no frame, so nothing is read any more.
        let again = wire.send(peer, &header, &[&[1; 1000]], soon()).unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
        // Keeps the connection open until the other side has seen its own error.
        (wire, error)
    });
    for (_wire, error) in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        for name in ["all_reduce #5", "broadcast #5", "rank 0", "rank 1"] {
            assert!(error.to_string().contains(name), "{error} lacks {name}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn the_deadline_names_peer_operation_and_direction() {
    wires(2, |me, mut wire| {
        let peer = Rank(1 - me.0);
        let deadline = Deadline::after(Duration::from_millis(100));
        let huge = 256 << 20;
        let error = if me.is_root() {
            wire.recv(peer, &frame(Operation::AllGather, 9, 4), &mut [&mut [0; 4]], deadline).unwrap_err()
        } else {
            wire.send(peer, &frame(Operation::AllGather, 9, huge), &[&vec![0; huge]], deadline).unwrap_err()
        };
        // Rank 0 sees the wrong size at once.
        let kind = if me.is_root() { ErrorKind::Mismatch } else { ErrorKind::Timeout };
        assert_eq!(error.kind(), kind, "{error}");
        if !me.is_root() {
            for word in ["rank 1 in all_gather #9", "100ms", "to send to rank 0"] {
                assert!(error.to_string().contains(word), "{error} lacks {word}");
            }
        }
        // Keeps the connection open until the other side has seen its own error.
        (wire, error)
    });
}

#[test]
fn a_receiver_times_out_by_name() {
    wires(2, |me, mut wire| {
        let deadline = Deadline::after(Duration::from_millis(100));
        let header = frame(Operation::Barrier, 2, 8);
        let error = wire.recv(Rank(1 - me.0), &header, &mut [&mut [0; 8]], deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let direction = format!("to receive from rank {} (0 of 40 bytes", 1 - me.0);
        for word in [&format!("{me} in barrier #2"), "100ms", &direction] {
            assert!(error.to_string().contains(word), "{error} lacks {word}");
        }
        (wire, error)
    });
}

#[test]
fn giving_up_ends_a_wait_at_once() {
    ranks(2, |me, mut mesh, liveness| {
        let data = std::mem::take(&mut mesh.data);
        let mut wire = TcpTransport::new(me, data, liveness.clone()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| liveness.fail(Error::new(ErrorKind::Aborted, "enough")));
            let error =
                wire.recv(Rank(1 - me.0), &frame(Operation::Barrier, 0, 0), &mut [], soon()).unwrap_err();
            assert_eq!(error.to_string(), "enough");
        });
    });
}

#[test]
fn wrong_arguments_change_nothing() {
    wires(2, |me, mut wire| {
        let peer = Rank(1 - me.0);
        let header = frame(Operation::Barrier, 0, 0);
        for (to, header, body) in [
            (me, header, &[][..]),
            (Rank(2), header, &[]),
            (peer, header, &[1]),
            (peer, frame(Operation::Barrier, 0, 1), &[]),
        ] {
            let error = wire.send(to, &header, &[body], soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        }
        wire.send_recv(peer, &header, &[], peer, &header, &mut [], soon()).unwrap();
    });
}

#[test]
fn strangers_do_not_delay_the_members() {
    let (listeners, peers) = listeners(3, LOCAL);
    let mut strangers = Vec::new();
    for peer in &peers {
        let call = || TcpStream::connect(peer.address).unwrap();
        // For rank 0 more than it keeps, so that the silent ones are also seen to give way.
        strangers.extend((0..if peer.rank.is_root() { 100 } else { 5 }).map(|_| call()));
        for words in [&b"GET / HTTP/1.0\r\n\r\n"[..], &hello::hello("other", Rank(2), hello::Purpose::Data)] {
            let mut stranger = call();
            stranger.write_all(words).unwrap();
            strangers.push(stranger);
        }
        // A member's greeting that stops in the middle, and one with a rank that nobody has.
        let mut half = call();
        half.write_all(&hello::hello("test", Rank(2), hello::Purpose::Data)[..9]).unwrap();
        let mut nobody = call();
        nobody.write_all(&hello::hello("test", Rank(77), hello::Purpose::Data)).unwrap();
        strangers.extend([half, nobody]);
        drop(call());
    }
    let started = Instant::now();
    let meshes = connect(listeners, &peers);
    assert!(started.elapsed() < Duration::from_secs(1));
    assert_eq!(meshes[1].data.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
}

#[test]
fn missing_peers_are_named() {
    let (mut listeners, peers) = listeners(3, LOCAL);
    let deadline = Deadline::after(Duration::from_millis(100));
    // Ranks 0 and 2 exist but never answer.
    let error = listeners.remove(1).connect(Rank(1), "test", &peers, deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    for word in ["connect: rank 1", "rank 0 (127.0.0.1", "rank 2 (127.0.0.1", "100ms"] {
        assert!(error.to_string().contains(word), "{error} lacks {word}");
    }
}

#[test]
fn a_dead_address_is_an_error_at_once() {
    let (mut listeners, peers) = listeners(2, LOCAL);
    let last = listeners.pop().unwrap();
    drop(listeners);
    let error = last.connect(Rank(1), "test", &peers, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost(Rank(0)));
    assert!(error.to_string().contains(&peers[0].address.to_string()), "{error}");
}

#[test]
fn a_list_out_of_order_is_refused() {
    let (mut listeners, mut peers) = listeners(2, LOCAL);
    peers.swap(0, 1);
    let error = listeners.remove(0).connect(Rank(0), "test", &peers, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}
