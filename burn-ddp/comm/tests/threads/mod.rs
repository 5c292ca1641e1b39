//! Threads as ranks, for everything below the replica: the same cases run over any wire.
//!
//! A case that hangs must fail the test and not stop it, so the threads are not joined: they report through a channel,
//! and a rank that has not reported in time is named.

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::collective::{Algorithm, Collectives};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::rendezvous::PeerInfo;
use burn_ddp_comm::topology::Topology;
use burn_ddp_comm::transport::tcp::{Listener, TcpTransport};
use burn_ddp_comm::transport::{Liveness, Transport, loopback};
use burn_ddp_comm::{Rank, Result};

/// Makes the wires of a world of the given size, one for each rank in rank order.
pub type Wires = fn(usize) -> Vec<Box<dyn Transport>>;

/// Longest time of one launch.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest time of one operation; shorter, so that an operation that hangs is reported by its own error.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Wires through memory.
pub fn over_loopback(world_size: usize) -> Vec<Box<dyn Transport>> {
    let liveness: Vec<Liveness> = (0..world_size).map(|_| Liveness::new(world_size)).collect();
    loopback(&liveness).into_iter().map(|wire| Box::new(wire) as Box<dyn Transport>).collect()
}

/// Wires through sockets of this host.
pub fn over_tcp(world_size: usize) -> Vec<Box<dyn Transport>> {
    let address = IpAddr::from([127, 0, 0, 1]);
    let listeners: Vec<_> = (0..world_size).map(|_| Listener::bind(address).expect("a listener")).collect();
    let peer = |(rank, listener): (usize, &Listener)| {
        PeerInfo::new(Rank(rank), "here", std::process::id(), listener.address().expect("an address"))
    };
    let peers: Vec<_> = listeners.iter().enumerate().map(peer).collect();
    let connect = |(rank, listener): (usize, Listener)| {
        let peers = peers.clone();
        thread::spawn(move || {
            let mesh =
                listener.connect(Rank(rank), "test", &peers, Deadline::after(TIMEOUT)).expect("a mesh");
            TcpTransport::new(Rank(rank), mesh.data, Liveness::new(world_size)).expect("a transport")
        })
    };
    let threads: Vec<_> = listeners.into_iter().enumerate().map(connect).collect();
    let wires = threads.into_iter().map(|thread| thread.join().expect("no panic"));
    wires.map(|wire| Box::new(wire) as Box<dyn Transport>).collect()
}

/// Runs `body` on every rank and returns the outcomes in rank order. A rank's wires close when its body returns, as
/// those of a process that ends.
pub fn outcomes<T: Send + 'static>(
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(&mut Collectives) -> Result<T> + Send + Sync + 'static,
) -> Vec<Result<T>> {
    outcomes_with(None, wires, body)
}

/// Like [`outcomes`], with one algorithm for every `all_reduce`.
pub fn outcomes_with<T: Send + 'static>(
    algorithm: Option<Algorithm>,
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(&mut Collectives) -> Result<T> + Send + Sync + 'static,
) -> Vec<Result<T>> {
    outcomes_over(wires, separately(algorithm, body))
}

/// Like [`outcomes`], for bodies that make the collectives themselves.
pub fn outcomes_over<T: Send + 'static>(
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(Box<dyn Transport>) -> Result<T> + Send + Sync + 'static,
) -> Vec<Result<T>> {
    let mut outcomes: Vec<Option<Result<T>>> = wires.iter().map(|_| None).collect();
    run(wires, body, |rank, outcome| outcomes[rank.0] = Some(outcome));
    outcomes.into_iter().map(|outcome| outcome.expect("every rank has reported")).collect()
}

/// Like [`outcomes`] for bodies that must succeed: the first error, in time, fails the test.
pub fn launch<T: Send + 'static>(
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(&mut Collectives) -> Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    launch_with(None, wires, body)
}

/// Like [`launch`], with one algorithm for every `all_reduce`.
pub fn launch_with<T: Send + 'static>(
    algorithm: Option<Algorithm>,
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(&mut Collectives) -> Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    launch_over(wires, separately(algorithm, body))
}

/// Like [`launch`], for bodies that make the collectives themselves.
pub fn launch_over<T: Send + 'static>(
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(Box<dyn Transport>) -> Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    let mut values: Vec<Option<T>> = wires.iter().map(|_| None).collect();
    run(wires, body, |rank, outcome| match outcome {
        Ok(value) => values[rank.0] = Some(value),
        Err(error) => panic!("{rank} failed first: {error:?}"),
    });
    values.into_iter().map(|value| value.expect("every rank has reported")).collect()
}

/// Runs `body` with the collectives of ranks that share no memory.
fn separately<T>(
    algorithm: Option<Algorithm>,
    body: impl Fn(&mut Collectives) -> Result<T>,
) -> impl Fn(Box<dyn Transport>) -> Result<T> {
    move |wire| {
        let topology = Topology::separate(wire.world_size());
        body(&mut Collectives::new(wire, topology, TIMEOUT).with_algorithm(algorithm)?)
    }
}

fn run<T: Send + 'static>(
    wires: Vec<Box<dyn Transport>>,
    body: impl Fn(Box<dyn Transport>) -> Result<T> + Send + Sync + 'static,
    mut reported: impl FnMut(Rank, Result<T>),
) {
    let body = Arc::new(body);
    let (report, reports) = mpsc::channel();
    let mut missing: Vec<Rank> = wires.iter().map(|wire| wire.rank()).collect();
    for wire in wires {
        let (body, report) = (body.clone(), report.clone());
        thread::spawn(move || {
            let rank = wire.rank();
            let outcome = catch_unwind(AssertUnwindSafe(|| body(wire)));
            // The receiver is gone when another rank has failed the test.
            let _ = report.send((rank, outcome));
        });
    }
    let end = Instant::now() + LIMIT;
    while !missing.is_empty() {
        match reports.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok((rank, Ok(outcome))) => {
                missing.retain(|other| *other != rank);
                reported(rank, outcome);
            }
            Ok((rank, Err(_))) => panic!("{rank} panicked first (see its message above)"),
            Err(_) => panic!("no report of {missing:?} within {LIMIT:?}"),
        }
    }
}
