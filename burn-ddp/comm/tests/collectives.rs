//! Every collective against a plain fold, for every world, type and length that has an edge; and what ranks
//! that disagree are told.

#[path = "collectives/algorithms.rs"]
mod algorithms;
mod reference;
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn_ddp_comm::collective::{Collectives, chunk};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::dtype::{DType, ReduceOp};
use burn_ddp_comm::topology::Topology;
use burn_ddp_comm::transport::{Header, Liveness, Transport, loopback};
use burn_ddp_comm::{Error, ErrorKind, Operation, Rank, Result};
use reference::{Buffer, input, reference};
use threads::{Wires, launch, outcomes, over_loopback, over_tcp};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];
const WORLDS: std::ops::RangeInclusive<usize> = 1..=5;

fn counts(world: usize) -> Vec<usize> {
    vec![0, 1, 2, 3, world - 1, world, world + 1, 1000, 4097, 100_003]
}

type Reduction = fn(&mut Collectives, DType, ReduceOp, &Buffer) -> Result<Buffer>;

fn all_reduced(ranks: &mut Collectives, dtype: DType, op: ReduceOp, input: &Buffer) -> Result<Buffer> {
    let mut data = input.clone();
    ranks.all_reduce(dtype, op, &mut [data.bytes_mut()])?;
    Ok(data)
}

fn reduce_scattered(ranks: &mut Collectives, dtype: DType, op: ReduceOp, input: &Buffer) -> Result<Buffer> {
    let own = chunk(input.bytes / dtype.size(), ranks.world_size(), ranks.rank().0);
    let mut output = Buffer::zeroed(own.len() * dtype.size());
    ranks.reduce_scatter(dtype, op, input.bytes(), output.bytes_mut())?;
    Ok(output)
}

/// Compares `reduction` with the reference, bit for bit, for every world, type, count and operation; `part`
/// says which elements of the whole a rank has in the end.
fn matches_reference(
    wires: Wires,
    worlds: impl IntoIterator<Item = usize>,
    reduction: Reduction,
    part: fn(count: usize, world: usize, rank: usize) -> std::ops::Range<usize>,
) {
    for world in worlds {
        let results = launch(wires(world), move |ranks| {
            let mut results = Vec::new();
            for dtype in DType::ALL {
                for count in counts(world) {
                    let input = input(dtype, count, ranks.rank().0);
                    for op in OPS {
                        results.push(reduction(ranks, dtype, op, &input)?);
                    }
                }
            }
            Ok(results)
        });
        let mut results: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
        for dtype in DType::ALL {
            for count in counts(world) {
                let inputs: Vec<Buffer> = (0..world).map(|rank| input(dtype, count, rank)).collect();
                for op in OPS {
                    let whole = reference(op, dtype, &inputs);
                    for (rank, results) in results.iter_mut().enumerate() {
                        let part = part(count, world, rank);
                        let expected = &whole[part.start * dtype.size()..part.end * dtype.size()];
                        let got = results.next().expect("one result for each case");
                        let difference = got.bytes().iter().zip(expected).position(|(a, b)| a != b);
                        assert!(
                            got.bytes == expected.len() && difference.is_none(),
                            "{count} x {dtype}, {op}, rank {rank} of {world}: differs at byte {difference:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn all_reduce_is_the_reference_tree_bit_for_bit() {
    matches_reference(over_loopback, WORLDS, all_reduced, |count, _, _| 0..count);
}

#[test]
fn reduce_scatter_is_its_chunk_of_the_reference_tree() {
    matches_reference(over_loopback, WORLDS, reduce_scattered, chunk);
}

#[test]
fn sockets_give_the_same_bits() {
    matches_reference(over_tcp, [3], all_reduced, |count, _, _| 0..count);
}

#[test]
fn all_gather_keeps_rank_order() {
    for world in WORLDS {
        launch(over_loopback(world), move |ranks| {
            for dtype in DType::ALL {
                for count in counts(world) {
                    let inputs: Vec<Buffer> = (0..world).map(|rank| input(dtype, count, rank)).collect();
                    let mut output = vec![0; world * count * dtype.size()];
                    ranks.all_gather(dtype, inputs[ranks.rank().0].bytes(), &mut output)?;
                    let expected: Vec<u8> = inputs.iter().flat_map(|input| input.bytes()).copied().collect();
                    assert!(output == expected, "{count} x {dtype}, {} of {world}", ranks.rank());
                }
            }
            Ok(())
        });
    }
}

#[test]
fn all_gather_bytes_takes_lengths_that_differ() {
    for world in WORLDS {
        launch(over_loopback(world), move |ranks| {
            let text = |rank: usize| vec![rank as u8; [0, 10_000, 1, 7, 300][rank]];
            let gathered = ranks.all_gather_bytes(&text(ranks.rank().0))?;
            assert_eq!(gathered, (0..world).map(text).collect::<Vec<_>>());
            Ok(())
        });
    }
}

#[test]
fn broadcast_brings_the_roots_data_from_any_root() {
    for world in WORLDS {
        launch(over_loopback(world), move |ranks| {
            for root in 0..world {
                for (dtype, count) in
                    DType::ALL.into_iter().flat_map(|d| counts(world).into_iter().map(move |c| (d, c)))
                {
                    let mut data = input(dtype, count, ranks.rank().0);
                    ranks.broadcast(dtype, Rank(root), &mut [data.bytes_mut()])?;
                    let expected = input(dtype, count, root);
                    assert!(data.bytes() == expected.bytes(), "{count} x {dtype}, root {root} of {world}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_arrived() {
    const ROUNDS: usize = 50;
    for world in WORLDS {
        let arrived = Arc::new(AtomicUsize::new(0));
        launch(over_loopback(world), move |ranks| {
            for round in 1..=ROUNDS {
                arrived.fetch_add(1, Ordering::SeqCst);
                ranks.barrier()?;
                assert!(arrived.load(Ordering::SeqCst) >= round * world);
            }
            Ok(())
        });
    }
}

/// Announces an all_reduce of `count` numbers.
fn announce(ranks: &mut Collectives, count: usize) -> Result<()> {
    ranks.announce(Operation::AllReduce(ReduceOp::Sum), DType::F32, count, 1)
}

#[test]
fn announced_operations_are_compared_between_neighbours() {
    for world in WORLDS {
        launch(over_loopback(world), |ranks| {
            (0..20).try_for_each(|count| announce(ranks, count))?;
            assert_eq!(ranks.sequence(), 20);
            ranks.barrier()
        });
    }
    let outcomes = outcomes(over_tcp(3), |ranks| match ranks.rank() {
        Rank(0) => announce(ranks, 6),
        _ => announce(ranks, 7),
    });
    assert!(outcomes[2].is_ok(), "rank 2 hears rank 1: {:?}", outcomes[2]);
    for outcome in &outcomes[..2] {
        let error = outcome.as_ref().expect_err("another count").to_string();
        for words in ["all_reduce #0 (sum, 6 x f32)", "all_reduce #0 (sum, 7 x f32)"] {
            assert!(error.contains(words), "{error}");
        }
    }
}

#[test]
fn an_announced_operation_divides_its_elements_alike() {
    let outcomes = outcomes(over_tcp(2), |ranks| {
        let division = ranks.rank().0 as u64;
        ranks.announce(Operation::AllReduce(ReduceOp::Sum), DType::F32, 8, division)
    });
    for outcome in outcomes {
        let error = outcome.expect_err("another division").to_string();
        for words in ["all_reduce", "rank 0", "rank 1", "8 x f32", "equal sizes"] {
            assert!(error.contains(words), "{error}");
        }
    }
}

#[test]
fn an_announced_operation_is_none_over_the_wire() {
    let calls: [Call; 2] = [|ranks| announce(ranks, 6), |ranks| sum(ranks, DType::F32, ReduceOp::Sum, 6)];
    disagreement(over_loopback, 2, calls[0], calls[1]);
}

type Call = fn(&mut Collectives) -> Result<()>;
type Named = (&'static str, Call);

fn sum(ranks: &mut Collectives, dtype: DType, op: ReduceOp, count: usize) -> Result<()> {
    ranks.all_reduce(dtype, op, &mut [Buffer::zeroed(count * dtype.size()).bytes_mut()])
}

/// Calls that do not match each other, with the words that name each.
const CALLS: [Named; 14] = [
    ("all_reduce #1 (sum, 6 x f32)", |ranks| sum(ranks, DType::F32, ReduceOp::Sum, 6)),
    ("all_reduce #1 (sum, 5 x f32)", |ranks| sum(ranks, DType::F32, ReduceOp::Sum, 5)),
    ("all_reduce #1 (sum, 0 x f32)", |ranks| sum(ranks, DType::F32, ReduceOp::Sum, 0)),
    ("all_reduce #1 (sum, 9000 x f32)", |ranks| sum(ranks, DType::F32, ReduceOp::Sum, 9000)),
    ("all_reduce #1 (sum, 6 x i32)", |ranks| sum(ranks, DType::I32, ReduceOp::Sum, 6)),
    ("all_reduce #1 (mean, 6 x f32)", |ranks| sum(ranks, DType::F32, ReduceOp::Mean, 6)),
    ("reduce_scatter #1 (sum, 6 x f32)", |ranks| {
        reduce_scattered(ranks, DType::F32, ReduceOp::Sum, &Buffer::zeroed(24)).map(drop)
    }),
    ("all_gather #1 (6 x f32)", |ranks| {
        ranks.all_gather(DType::F32, &[0; 24], &mut vec![0; 24 * ranks.world_size()])
    }),
    ("all_gather #1 (0 x u8)", |ranks| ranks.all_gather_bytes(&[1, 2, 3]).map(drop)),
    ("broadcast #1 (root 0, 6 x f32)", |ranks| ranks.broadcast(DType::F32, Rank(0), &mut [&mut [0; 24]])),
    ("broadcast #1 (root 1, 6 x f32)", |ranks| ranks.broadcast(DType::F32, Rank(1), &mut [&mut [0; 24]])),
    ("broadcast #1 (root 0, 9000 x u8)", |ranks| ranks.broadcast(DType::U8, Rank(0), &mut [&mut [0; 9000]])),
    ("broadcast #1 (root 0, 0 x u8)", |ranks| ranks.broadcast(DType::U8, Rank(0), &mut [])),
    ("barrier #1 (0 x u8)", |ranks| ranks.barrier()),
];

/// Rank 0 makes one call and the others another; what each rank came to.
fn disagreement(wires: Wires, world: usize, zero: Call, others: Call) -> Vec<Error> {
    let began = Instant::now();
    let outcomes = outcomes(wires(world), move |ranks| {
        ranks.barrier()?;
        let first = match ranks.rank() {
            Rank(0) => zero(ranks),
            _ => others(ranks),
        };
        // Poisoned: an operation that would have matched returns the same error, and takes no number.
        if let Err(first) = &first {
            let sequence = ranks.sequence();
            let again = ranks.barrier().expect_err("the first error stays");
            assert_eq!((again.to_string(), ranks.sequence()), (first.to_string(), sequence));
        }
        first
    });
    // Two ranks tell each other; a third may have to wait for the wire's grace time.
    let limit = Duration::from_secs(if world == 2 { 1 } else { 5 });
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    outcomes.into_iter().map(|outcome| outcome.expect_err("a call that matches no other")).collect()
}

/// All ordered pairs of different ones of `calls`.
fn pairs(calls: Vec<Named>) -> Vec<(Named, Named)> {
    let different =
        |call: Named| calls.iter().filter(move |other| other.0 != call.0).map(move |other| (call, *other));
    calls.iter().copied().flat_map(different).collect()
}

#[test]
fn two_ranks_in_different_operations_are_both_told_of_both() {
    for ((name, call), (other_name, other_call)) in pairs(CALLS.to_vec()) {
        let over_memory = disagreement(over_loopback, 2, call, other_call);
        for error in over_memory.into_iter().chain(disagreement(over_tcp, 2, call, other_call)) {
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            for name in [name, other_name] {
                assert!(error.to_string().contains(name), "{name} is not in: {error}");
            }
        }
    }
}

#[test]
fn one_of_three_ranks_in_another_operation_is_an_error_on_all() {
    // One call of each kind: what a rank sees of a peer that has left takes the wire's grace time.
    let mut calls = CALLS.to_vec();
    calls.dedup_by_key(|(name, _)| name.split(' ').next());
    for ((name, call), (other_name, other_call)) in pairs(calls) {
        let errors = disagreement(over_loopback, 3, call, other_call);
        // A rank that meets the odd one is told of both calls; the last one may only see the others leave.
        let told = errors.iter().filter(|error| error.kind() == ErrorKind::Mismatch).count();
        assert!(told >= 2, "{name} against {other_name}: {errors:?}");
    }
}

#[test]
fn a_rank_that_leaves_is_an_error_on_the_others() {
    for (name, call) in CALLS {
        let outcomes = outcomes(over_loopback(3), move |ranks| {
            ranks.barrier()?;
            if ranks.rank() == Rank(2) { Ok(()) } else { call(ranks) }
        });
        for (rank, outcome) in outcomes.into_iter().enumerate().take(2) {
            let error = outcome.expect_err(name);
            assert!(matches!(error.kind(), ErrorKind::PeerLost(_)), "{name}, rank {rank}: {error}");
        }
    }
}

#[test]
fn an_abort_ends_a_waiting_operation() {
    let liveness = vec![Liveness::new(2), Liveness::new(2)];
    let mut wires = loopback(&liveness).into_iter();
    let (waiting, _silent) = (wires.next().expect("rank 0"), wires.next().expect("rank 1"));
    let mut ranks = Collectives::new(Box::new(waiting), Topology::separate(2), Duration::from_secs(20));
    let began = Instant::now();
    let waiting = std::thread::spawn(move || ranks.barrier());
    liveness[0].fail(Error::new(ErrorKind::Aborted, "stopped by request"));
    let error = waiting.join().expect("no panic").expect_err("rank 1 never came");
    assert_eq!(error.kind(), ErrorKind::Aborted);
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_silent_peer_is_an_error_at_the_deadline() {
    let mut wires = loopback(&[Liveness::new(2), Liveness::new(2)]).into_iter();
    let (waiting, _silent) = (wires.next().expect("rank 0"), wires.next().expect("rank 1"));
    let mut ranks = Collectives::new(Box::new(waiting), Topology::separate(2), Duration::from_millis(50));
    let error = ranks.all_reduce(DType::U8, ReduceOp::Sum, &mut [&mut [1]]).expect_err("rank 1 never came");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("rank 1 in all_reduce #0"), "{error}");
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_sent() {
    launch(over_loopback(2), |ranks| {
        let refused = |result: Result<()>, part: &str| {
            let error = result.expect_err(part);
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(part), "{part} is not in: {error}");
        };
        let mut buffer = Buffer::zeroed(32);
        let data = buffer.bytes_mut();
        let (sum, f32) = (ReduceOp::Sum, DType::F32);
        // On one rank only: had anything been sent, the other would meet it in the barrier.
        if ranks.rank() == Rank(1) {
            refused(ranks.all_reduce(f32, sum, &mut [&mut data[..7]]), "7 bytes");
            refused(ranks.all_reduce(f32, sum, &mut [&mut data[1..9]]), "not aligned");
            refused(ranks.reduce_scatter(f32, sum, &[0; 6], data), "6 bytes");
            refused(ranks.reduce_scatter(f32, sum, &[0; 12], &mut data[..8]), "fills 4");
            refused(ranks.reduce_scatter(f32, sum, &[0; 12], &mut data[2..6]), "not aligned");
            refused(ranks.all_gather(f32, &[0; 3], data), "3 bytes");
            refused(ranks.all_gather(f32, &[0; 4], data), "fills 8");
            refused(ranks.broadcast(f32, Rank(0), &mut [&mut data[..5]]), "5 bytes");
            refused(ranks.broadcast(f32, Rank(2), &mut [data]), "rank 2, but the group has 2");
        }
        assert_eq!(ranks.sequence(), 0);
        ranks.barrier()
    });
}

#[test]
fn a_world_of_one_keeps_its_data_and_sends_nothing() {
    /// A wire that must not be used.
    struct Cut;
    impl Transport for Cut {
        fn rank(&self) -> Rank {
            Rank(0)
        }
        fn world_size(&self) -> usize {
            1
        }
        fn send(&mut self, _: Rank, _: &Header, _: &[&[u8]], _: Deadline) -> Result<()> {
            panic!("sent")
        }
        fn recv(&mut self, _: Rank, _: &Header, _: &mut [&mut [u8]], _: Deadline) -> Result<()> {
            panic!("received")
        }
        fn send_recv(
            &mut self,
            _: Rank,
            _: &Header,
            _: &[&[u8]],
            _: Rank,
            _: &Header,
            _: &mut [&mut [u8]],
            _: Deadline,
        ) -> Result<()> {
            panic!("exchanged")
        }
    }
    let mut ranks = Collectives::new(Box::new(Cut), Topology::separate(1), Duration::from_secs(1));
    for count in [0, 3, 5000] {
        let input = input(DType::F32, count, 0);
        for op in OPS {
            for reduction in [all_reduced, reduce_scattered] {
                let output = reduction(&mut ranks, DType::F32, op, &input).expect("nothing can fail");
                assert_eq!(output.bytes(), input.bytes());
            }
        }
        let mut output = vec![0; input.bytes];
        ranks.all_gather(DType::F32, input.bytes(), &mut output).expect("nothing can fail");
        ranks.broadcast(DType::F32, Rank(0), &mut [&mut output]).expect("nothing can fail");
        assert_eq!(output, input.bytes());
        assert_eq!(ranks.all_gather_bytes(&output).expect("nothing can fail"), [output]);
    }
    ranks.barrier().expect("nothing can fail");
}
