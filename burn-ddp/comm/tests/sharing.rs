//! Ranks that share memory, all of them or those of each of several hosts, against the same plain fold as the wires;
//! and the errors when one of them disagrees, leaves, or gets no memory.
#![cfg(target_os = "linux")]

mod reference;
#[allow(dead_code, reason = "each test binary uses a part of this module")]
mod threads;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn_ddp_comm::collective::{Collectives, chunk};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::dtype::{DType, ReduceOp};
use burn_ddp_comm::topology::{ShmOptions, Topology};
use burn_ddp_comm::transport::{Liveness, Transport};
use burn_ddp_comm::{ErrorKind, Rank, Result, TransportKind};
use reference::{Buffer, input, reference};
use threads::{TIMEOUT, launch, launch_over, outcomes_over, over_loopback, over_tcp};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];

fn sharing(host: impl Into<String>) -> ShmOptions {
    ShmOptions { transport: TransportKind::Auto, host: host.into(), limit: None, compute: Default::default() }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// The collectives of a rank that shares memory as `options` say.
fn discover(mut wire: Box<dyn Transport>, options: &ShmOptions, liveness: &Liveness) -> Result<Collectives> {
    let topology = Topology::discover(&mut *wire, options, liveness, soon())?;
    Ok(Collectives::new(wire, topology, TIMEOUT))
}

/// The collectives of a rank on the host with the given number, out of `hosts[rank]`.
fn share(wire: Box<dyn Transport>, hosts: &[usize]) -> Result<Collectives> {
    let liveness = Liveness::new(wire.world_size());
    let host = hosts[wire.rank().0];
    discover(wire, &sharing(format!("host {host}")), &liveness)
}

/// Hosts by rank: one for all, subtrees of the tree, and divisions that are none.
const WORLDS: [&[usize]; 11] = [
    &[0, 0],
    &[0, 0, 0],
    &[0, 0, 0, 0, 0],
    &[0, 0, 1],
    &[0, 1, 1],
    &[0, 0, 1, 1],
    &[0, 1, 0, 1],
    &[0, 1, 1, 0],
    &[0, 0, 0, 1],
    &[0, 0, 1, 1, 2, 2],
    &[0, 1, 1, 1, 2, 0, 2],
];

/// Large ones, which take a while, for one operation only.
fn counts(op: ReduceOp, world: usize) -> &'static [usize] {
    match op {
        ReduceOp::Mean if world <= 4 => &[0, 1, 7, 1000, 4097, 70_003],
        ReduceOp::Mean => &[0, 1, 7, 4097],
        _ => &[5, 1000],
    }
}

#[test]
fn all_reduce_is_the_reference_tree_bit_for_bit() {
    for hosts in WORLDS {
        let world = hosts.len();
        let results = launch_over(over_loopback(world), move |wire| {
            let ranks = &mut share(wire, hosts)?;
            let mut results = Vec::new();
            for dtype in DType::ALL {
                for op in OPS {
                    for &count in counts(op, world) {
                        let mut data = input(dtype, count, ranks.rank().0);
                        ranks.all_reduce(dtype, op, &mut [data.bytes_mut()])?;
                        results.push(data);
                    }
                }
            }
            Ok(results)
        });
        let mut results: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
        for dtype in DType::ALL {
            for op in OPS {
                for &count in counts(op, world) {
                    let inputs: Vec<Buffer> = (0..world).map(|rank| input(dtype, count, rank)).collect();
                    let expected = reference(op, dtype, &inputs);
                    for (rank, results) in results.iter_mut().enumerate() {
                        let got = results.next().expect("one result for each case");
                        let difference = got.bytes().iter().zip(&expected).position(|(a, b)| a != b);
                        assert!(
                            difference.is_none(),
                            "{count} x {dtype}, {op}, rank {rank} of {hosts:?}: differs at byte {difference:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Several blocks of a shared region and several blocks of a hierarchical group, in lists that are cut anywhere.
#[test]
fn large_lists_are_the_same_bits_as_one_segment_over_a_wire() {
    const COUNT: usize = 1_300_003;
    let values = |rank: usize| -> Vec<f32> {
        (0..COUNT).map(|at| ((at * 7919 + rank * 104_729) % 10_007) as f32 / 97.0 - 51.3).collect()
    };
    let cuts = [0, 1, 1, 700, 65_536, 65_537, 300_000, 1_299_999, COUNT];
    for hosts in [&[0, 0][..], &[0, 0, 0], &[0, 0, 1, 1], &[0, 1, 0]] {
        let expected = launch(over_loopback(hosts.len()), move |ranks| {
            let mut data = values(ranks.rank().0);
            ranks.all_reduce(DType::F32, ReduceOp::Mean, &mut [bytemuck::cast_slice_mut(&mut data)])?;
            Ok(data)
        });
        let shared = launch_over(over_loopback(hosts.len()), move |wire| {
            let ranks = &mut share(wire, hosts)?;
            let data = values(ranks.rank().0);
            let mut lists: Vec<Vec<f32>> = cuts.windows(2).map(|cut| data[cut[0]..cut[1]].to_vec()).collect();
            let mut parts: Vec<&mut [u8]> =
                lists.iter_mut().map(|list| bytemuck::cast_slice_mut(list.as_mut_slice())).collect();
            ranks.all_reduce(DType::F32, ReduceOp::Mean, &mut parts)?;
            Ok(lists.concat())
        });
        for (rank, (shared, expected)) in shared.iter().zip(&expected).enumerate() {
            let differs = shared.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differs, None, "rank {rank} of {hosts:?}");
        }
    }
}

#[test]
fn the_other_collectives_do_what_they_do_over_a_wire() {
    for hosts in WORLDS {
        let world = hosts.len();
        launch_over(over_loopback(world), move |wire| {
            let ranks = &mut share(wire, hosts)?;
            assert_eq!(ranks.sequence(), 0, "meeting is no operation of the user's");
            let me = ranks.rank().0;
            for count in [0, 1, 5, 1000, 200_001] {
                let inputs: Vec<Buffer> = (0..world).map(|rank| input(DType::F32, count, rank)).collect();
                let mut all = vec![0; world * count * 4];
                ranks.all_gather(DType::F32, inputs[me].bytes(), &mut all)?;
                assert!(all == inputs.iter().flat_map(|input| input.bytes()).copied().collect::<Vec<_>>());

                let whole = reference(ReduceOp::Mean, DType::F32, &inputs);
                let own = chunk(count, world, me);
                let mut output = Buffer::zeroed(own.len() * 4);
                ranks.reduce_scatter(DType::F32, ReduceOp::Mean, inputs[me].bytes(), output.bytes_mut())?;
                assert!(output.bytes() == &whole[own.start * 4..own.end * 4], "reduce_scatter of {count}");

                for root in 0..world {
                    let mut data = inputs[me].clone();
                    let (left, right) = data.bytes_mut().split_at_mut(count / 3 * 4);
                    ranks.broadcast(DType::F32, Rank(root), &mut [left, right])?;
                    assert!(data.bytes() == inputs[root].bytes(), "broadcast of {count} from {root}");
                }
            }
            let text = |rank: usize| vec![rank as u8; [0, 700_000, 1, 7, 300, 0, 9][rank]];
            let everything: Vec<_> = (0..world).map(text).collect();
            assert_eq!(ranks.all_gather_bytes(&text(me))?, everything);
            for root in 0..world {
                let gathered = ranks.gather_bytes(Rank(root), &text(me))?;
                assert_eq!(gathered, if root == me { everything.clone() } else { Vec::new() });
            }
            for _ in 0..50 {
                ranks.barrier()?;
            }
            ranks.announce(burn_ddp_comm::Operation::AllReduce(ReduceOp::Sum), DType::F32, 3, 9)
        });
    }
}

/// horovod/horovod#1699: sums of halves overflow before they are divided, and divided first they vanish.
#[test]
fn half_precision_means_neither_overflow_nor_vanish() {
    use half::f16;
    for hosts in [&[0, 0][..], &[0, 0, 1, 1]] {
        for value in [f16::from_f32(40000.0), f16::from_bits(1)] {
            for count in [3, 5000, 200_000] {
                launch_over(over_loopback(hosts.len()), move |wire| {
                    let ranks = &mut share(wire, hosts)?;
                    let mut data = vec![value; count];
                    ranks.all_reduce(
                        DType::F16,
                        ReduceOp::Mean,
                        &mut [bytemuck::cast_slice_mut(&mut data)],
                    )?;
                    assert!(data.iter().all(|mean| *mean == value), "{count} of {value}");
                    Ok(())
                });
            }
        }
    }
}

/// tracel-ai/burn#3553: the second of two reductions in a row blocked.
#[test]
fn two_hundred_all_reduces_in_a_row() {
    for hosts in [&[0, 0, 0, 0][..], &[0, 0, 1, 1]] {
        let began = Instant::now();
        launch_over(over_loopback(4), move |wire| {
            let ranks = &mut share(wire, hosts)?;
            for step in 0..200usize {
                let count = [1, 7, 1000][step % 3];
                let mut data: Vec<f32> =
                    (0..count).map(|at| (ranks.rank().0 * 1000 + at + step) as f32).collect();
                ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [bytemuck::cast_slice_mut(&mut data)])?;
                let expected: Vec<f32> = (0..count).map(|at| (6000 + 4 * (at + step)) as f32).collect();
                assert_eq!(data, expected, "step {step}");
            }
            Ok(())
        });
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

type Call = fn(&mut Collectives) -> Result<()>;

const CALLS: [(&str, Call); 5] = [
    ("all_reduce #1 (sum, 6 x f32)", |ranks| {
        ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [Buffer::zeroed(24).bytes_mut()])
    }),
    ("all_reduce #1 (sum, 900000 x f32)", |ranks| {
        ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [Buffer::zeroed(3_600_000).bytes_mut()])
    }),
    ("broadcast #1 (root 0, 6 x f32)", |ranks| ranks.broadcast(DType::F32, Rank(0), &mut [&mut [0; 24]])),
    ("all_gather #1 (0 x u8)", |ranks| ranks.all_gather_bytes(&[1, 2, 3]).map(drop)),
    ("barrier #1 (0 x u8)", |ranks| ranks.barrier()),
];

#[test]
fn ranks_in_different_operations_are_told_of_both() {
    for hosts in [&[0, 0][..], &[0, 0, 0], &[0, 0, 1]] {
        for (name, call) in CALLS {
            for (other_name, other_call) in CALLS.into_iter().filter(|(other, _)| *other != name) {
                // Each rank's own knowledge, as that of processes; the control channel spreads the first cause.
                let group = Liveness::new(hosts.len());
                let outcomes = outcomes_over(over_loopback(hosts.len()), move |wire| {
                    let host = sharing(format!("host {}", hosts[wire.rank().0]));
                    let ranks = &mut discover(wire, &host, &group)?;
                    ranks.barrier()?;
                    if ranks.rank() == Rank(1) { call(ranks) } else { other_call(ranks) }
                });
                for outcome in outcomes.iter().take(2) {
                    let error = outcome.as_ref().expect_err(name);
                    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                    for name in [name, other_name] {
                        assert!(error.to_string().contains(name), "{name} is not in: {error}");
                    }
                }
                assert!(outcomes.iter().all(Result::is_err), "{name} against {other_name} on {hosts:?}");
            }
        }
    }
}

/// All ranks of one host call one operation and all of the other another one. Over the wire they would wait for each
/// other in a ring in which no two that disagree face each other.
#[test]
fn hosts_in_different_operations_are_told() {
    let hosts: [&[usize]; 2] = [&[0, 0, 0, 1, 1, 1], &[0, 0, 0, 0, 1, 1, 1]];
    for hosts in hosts {
        for (one, other) in [(4, 0), (0, 4), (4, 1), (2, 1)] {
            let began = Instant::now();
            let group = Liveness::new(hosts.len());
            let outcomes = outcomes_over(over_loopback(hosts.len()), move |wire| {
                let host = hosts[wire.rank().0];
                let ranks = &mut discover(wire, &sharing(format!("host {host}")), &group)?;
                ranks.barrier()?;
                (CALLS[if host == 0 { one } else { other }].1)(ranks)
            });
            assert!(outcomes.iter().all(Result::is_err), "{one} {other}: {outcomes:?}");
            let told = outcomes.iter().flat_map(|outcome| outcome.as_ref().err());
            assert!(
                told.map(burn_ddp_comm::Error::kind).any(|kind| kind == ErrorKind::Mismatch),
                "{outcomes:?}"
            );
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline() {
    let outcomes = outcomes_over(over_loopback(2), |wire| {
        let ranks = &mut share(wire, &[0, 0])?;
        if ranks.rank() == Rank(1) {
            return Ok(());
        }
        ranks.within(Duration::from_millis(50), Collectives::barrier)
    });
    let error = outcomes[0].as_ref().expect_err("no rank came");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    for words in ["rank 0 in barrier #0", "waited 50ms for rank 1"] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn an_abort_ends_a_wait_within_tens_of_milliseconds() {
    let group = Liveness::new(2);
    let began = Arc::new(Mutex::new(Instant::now()));
    let (aborted, times) = (group.clone(), began.clone());
    let outcomes = outcomes_over(over_loopback(2), move |wire| {
        let ranks = &mut discover(wire, &sharing("one"), &group)?;
        ranks.barrier()?;
        if ranks.rank() == Rank(0) {
            return ranks.barrier();
        }
        *times.lock().expect("no panic") = Instant::now();
        aborted.fail(burn_ddp_comm::Error::new(ErrorKind::Aborted, "enough"));
        Ok(())
    });
    assert_eq!(outcomes[0].as_ref().expect_err("aborted").kind(), ErrorKind::Aborted);
    let took = began.lock().expect("no panic").elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// NVIDIA/nccl#342: a container without room for shared memory.
#[test]
fn without_room_for_shared_memory_all_ranks_talk_over_tcp() {
    launch_over(over_tcp(2), |wire| {
        let little = ShmOptions { limit: Some(4096), ..sharing("small") };
        let ranks = &mut discover(wire, &little, &Liveness::new(2))?;
        let mut data = vec![ranks.rank().0 as f32 + 1.0; 1 << 20];
        ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [bytemuck::cast_slice_mut(&mut data)])?;
        assert!(data.iter().all(|sum| *sum == 3.0));
        Ok(())
    });
    let outcomes = outcomes_over(over_tcp(2), |wire| {
        let required = ShmOptions { transport: TransportKind::Shm, limit: Some(4096), ..sharing("small") };
        discover(wire, &required, &Liveness::new(2)).map(drop)
    });
    for outcome in outcomes {
        let text = outcome.expect_err("shared memory was asked for").to_string();
        for words in ["shares no memory with", "4096 are allowed", "BURN_DDP_TRANSPORT=auto"] {
            assert!(text.contains(words), "{text}");
        }
    }
}
