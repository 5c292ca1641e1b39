//! Threads as ranks: what a rank learns of the others, and how soon.

use std::io::Read;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use super::*;
use crate::dtype::ReduceOp;
use crate::operation::Operation;
use crate::transport::tcp::TcpTransport;
use crate::transport::tcp::tests::{frame, meshes, ranks, soon};
use crate::transport::{PeerState, Transport};

const LONG: Duration = Duration::from_secs(30);

struct Member {
    me: Rank,
    wire: TcpTransport,
    control: Control,
    liveness: Liveness,
}

impl Member {
    /// Waits for a frame of `from` that will not come.
    fn wait_for(&mut self, from: usize) -> Error {
        self.wire.recv(Rank(from), &frame(Operation::Barrier, 3, 0), &mut [], soon()).unwrap_err()
    }
}

fn members<T: Send>(world: usize, timeout: Duration, member: impl Fn(Member) -> T + Sync) -> Vec<T> {
    ranks(world, |me, mesh, liveness| {
        let wire = TcpTransport::new(me, mesh.data, liveness.clone()).unwrap();
        let control = Control::start(me, mesh.control, liveness.clone(), timeout).unwrap();
        member(Member { me, wire, control, liveness })
    })
}

fn until_cause(liveness: &Liveness) -> Error {
    let (send, receive) = std::sync::mpsc::channel();
    liveness.subscribe(move || send.send(()).unwrap_or_default());
    receive.recv_timeout(LONG).expect("a cause");
    liveness.cause().unwrap()
}

#[test]
fn a_peer_that_dies_is_named_to_whoever_waits() {
    let (listening, started) = (Barrier::new(2), Instant::now());
    let mut all = meshes(2);
    let (other, mine) = (all.pop().unwrap(), all.pop().unwrap());
    let liveness = Liveness::new(2);
    let mut wire = TcpTransport::new(Rank(0), mine.data, liveness.clone()).unwrap();
    let _control = Control::start(Rank(0), mine.control, liveness, LONG).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            listening.wait();
            drop(other);
        });
        listening.wait();
        let error = wire.recv(Rank(1), &frame(Operation::Barrier, 0, 0), &mut [], soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost(Rank(1)), "{error}");
        assert!(error.to_string().contains("its process ended"), "{error}");
    });
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn everyone_hears_of_a_dead_peer_also_who_waits_for_another() {
    let mut all = meshes(3);
    drop(all.pop());
    let wait = |(me, mesh): (usize, crate::transport::tcp::Mesh)| {
        let liveness = Liveness::new(3);
        let mut wire = TcpTransport::new(Rank(me), mesh.data, liveness.clone()).unwrap();
        let control = Control::start(Rank(me), mesh.control, liveness, LONG).unwrap();
        let error = wire.recv(Rank(1 - me), &frame(Operation::Barrier, 0, 0), &mut [], soon()).unwrap_err();
        (error, wire, control)
    };
    let ends: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            all.into_iter().enumerate().map(|rank| scope.spawn(move || wait(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (error, ..) in &ends {
        assert_eq!(error.kind(), ErrorKind::PeerLost(Rank(2)), "{error}");
    }
}

#[test]
fn a_peer_that_has_finished_is_not_called_dead() {
    members(2, LONG, |mut member| {
        if member.me.is_root() {
            let error = member.wait_for(1);
            assert_eq!(error.kind(), ErrorKind::PeerFinished(Rank(1)), "{error}");
        }
    });
}

#[test]
fn an_abort_reaches_a_blocked_receiver_with_its_cause() {
    let aborted = Barrier::new(3);
    let ends = members(3, LONG, |mut member| {
        let end = if member.me.0 == 1 {
            aborted.wait();
            let now = Instant::now();
            member.control.abort(&Error::config("lr is NaN"));
            member.control.abort(&Error::config("a later one"));
            assert!(now.elapsed() < Duration::from_millis(400));
            assert_eq!(member.liveness.cause().unwrap().to_string(), "lr is NaN");
            None
        } else {
            aborted.wait();
            let now = Instant::now();
            // Each waits for a rank that has done nothing wrong.
            let error = member.wait_for(2 - member.me.0);
            Some((error, now.elapsed()))
        };
        (end, member)
    });
    for (error, waited) in ends.into_iter().filter_map(|(end, _)| end) {
        assert_eq!(error.kind(), ErrorKind::PeerFailed(Rank(1)));
        assert_eq!(error.to_string(), "rank 1 failed: lr is NaN");
        assert!(waited < Duration::from_millis(100), "{waited:?}");
    }
}

#[test]
fn a_mismatch_that_one_rank_finds_is_everyones() {
    let ends = members(3, LONG, |mut member| {
        let header = frame(Operation::AllReduce(ReduceOp::Sum), 4, 1);
        let error = match member.me.0 {
            0 => member.wire.recv(Rank(1), &header, &mut [&mut [0]], soon()).unwrap_err(),
            1 => {
                member
                    .wire
                    .send(Rank(0), &frame(Operation::Broadcast(Rank(0)), 4, 1), &[&[0]], soon())
                    .unwrap();
                member.wait_for(2)
            }
            _ => member.wait_for(1),
        };
        (error, member)
    });
    assert_eq!(ends[0].0.kind(), ErrorKind::Mismatch);
    for (error, member) in &ends {
        for word in ["all_reduce #4", "broadcast #4"] {
            assert!(error.to_string().contains(word), "{}: {error}", member.me);
        }
    }
    assert_eq!(ends[1].0.kind(), ErrorKind::PeerFailed(Rank(0)));
}

#[test]
fn ranks_may_leave_in_any_order() {
    let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2], [0, 0, 1, 1], [0, 0, 0, 0]];
    for order in orders {
        let steps: Vec<Barrier> = (0..4).map(|_| Barrier::new(4)).collect();
        members(4, LONG, |mut member| {
            let me = member.me.0;
            for (step, barrier) in steps.iter().enumerate() {
                barrier.wait();
                if order[me] == step {
                    let now = Instant::now();
                    member.control.finish();
                    assert!(now.elapsed() < Duration::from_secs(1), "{order:?}: {:?}", now.elapsed());
                    member.control.finish();
                }
            }
            for peer in (0..4).filter(|peer| *peer != me) {
                let left = matches!(member.liveness.peer(Rank(peer)), PeerState::Finished);
                assert!(left || order[peer] >= order[me], "{order:?}: {me} did not hear of {peer}");
            }
            assert!(member.liveness.cause().is_none(), "{order:?} {:?}", member.liveness.cause());
        });
    }
}

#[test]
fn a_group_that_goes_away_at_once_says_nothing_wrong() {
    for member in members(4, LONG, |member| {
        let liveness = member.liveness.clone();
        drop(member);
        liveness
    }) {
        assert!(member.cause().is_none(), "{:?}", member.cause());
    }
}

#[test]
fn a_silent_peer_is_lost_after_the_timeout_and_a_busy_one_is_not() {
    let timeout = Duration::from_secs(1);
    let mut all = meshes(3);
    // Rank 2 keeps its connections open and says nothing, as a stopped process does.
    let silent = all.pop().unwrap();
    let started = Instant::now();
    let watch = |(me, mesh): (usize, crate::transport::tcp::Mesh)| {
        let liveness = Liveness::new(3);
        let control = Control::start(Rank(me), mesh.control, liveness.clone(), timeout).unwrap();
        // Ranks 0 and 1 do nothing either, but their control channels beat.
        (until_cause(&liveness), started.elapsed(), control)
    };
    let ends: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            all.into_iter().enumerate().map(|rank| scope.spawn(move || watch(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (error, waited, _control) in &ends {
        assert_eq!(error.kind(), ErrorKind::PeerLost(Rank(2)), "{error}");
        assert!(error.to_string().starts_with("rank 2 is lost: no heartbeat for 1."), "{error}");
        assert!(*waited > timeout && *waited < 3 * timeout, "{waited:?}");
    }
    // When it goes on, it finds out what the others think of it.
    let mut heard = Vec::new();
    drop(ends);
    let _ = silent.control[0].as_ref().unwrap().read_to_end(&mut heard);
    assert!(String::from_utf8_lossy(&heard).contains("rank 2 is lost"), "{heard:?}");
}

#[test]
fn leaving_does_not_wait_for_ever_for_a_silent_peer() {
    let mut all = meshes(2);
    let _silent = all.pop().unwrap();
    let mesh = all.pop().unwrap();
    let timeout = Duration::from_millis(500);
    let mut control = Control::start(Rank(0), mesh.control, Liveness::new(2), timeout).unwrap();
    let now = Instant::now();
    control.finish();
    assert!(now.elapsed() < Duration::from_secs(2), "{:?}", now.elapsed());
}

#[test]
fn a_panic_is_told_and_not_taken_for_a_goodbye() {
    let ends = members(2, LONG, |mut member| {
        if member.me.is_root() {
            return Some(member.wait_for(1));
        }
        let quiet = thread::Builder::new().spawn(move || {
            let _member = member;
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        assert!(quiet.unwrap().join().is_err());
        None
    });
    let error = ends[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::PeerFailed(Rank(1)), "{error}");
    assert!(error.to_string().contains("rank 1 panicked"), "{error}");
}

#[test]
fn wrong_arguments_are_refused() {
    let mut mesh = meshes(2).remove(0);
    let short = Control::start(Rank(0), std::mem::take(&mut mesh.control), Liveness::new(2), Duration::ZERO);
    assert_eq!(short.err().unwrap().kind(), ErrorKind::Config);
    let wrong = Control::start(Rank(1), mesh.data, Liveness::new(2), LONG);
    assert_eq!(wrong.err().unwrap().kind(), ErrorKind::Config);
}

#[test]
fn a_world_of_one_has_nobody_to_part_from() {
    let mut control = Control::start(Rank(0), vec![None], Liveness::new(1), LONG).unwrap();
    let now = Instant::now();
    control.finish();
    assert!(now.elapsed() < Duration::from_secs(1));
}
