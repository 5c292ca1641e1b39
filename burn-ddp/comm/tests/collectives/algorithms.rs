//! Every algorithm of `all_reduce` over every wire, on lists that each rank cuts in its own way.

use std::time::{Duration, Instant};

use burn_ddp_comm::collective::{Algorithm, Collectives};
use burn_ddp_comm::dtype::{DType, ReduceOp};
use burn_ddp_comm::reduction::tree_reduce;
use burn_ddp_comm::topology::Topology;
use burn_ddp_comm::{Error, ErrorKind, Operation, Rank, Result};
use half::f16;

use crate::reference::{Buffer, input, reference};
use crate::threads::{Wires, launch, launch_with, outcomes_with, over_loopback, over_tcp};

const WIRES: [Wires; 2] = [over_loopback, over_tcp];
const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// The choice by cost, and each algorithm that `world` ranks can have.
fn algorithms(world: usize) -> impl Iterator<Item = Option<Algorithm>> {
    let forced = Algorithm::ALL.into_iter().filter(move |algorithm| algorithm.works_for(world));
    std::iter::once(None).chain(forced.map(Some))
}

/// Cuts `data` into many small segments, some of them empty, and a large one; `seed` says how.
fn cut(dtype: DType, data: &mut [u8], seed: usize) -> Vec<&mut [u8]> {
    let count = data.len() / dtype.size();
    let large = count / 2;
    let mut lengths: Vec<usize> = (0..).map(|index| (index * 5 + seed) % 7 % 4).take(count / 3 + 2).collect();
    lengths.insert(seed % lengths.len(), large);
    let mut rest = data;
    let mut list = Vec::new();
    for length in lengths {
        let (here, behind) = rest.split_at_mut((length * dtype.size()).min(rest.len()));
        list.push(here);
        rest = behind;
    }
    list.push(rest);
    list
}

fn all_reduced_in_segments(
    ranks: &mut Collectives,
    dtype: DType,
    op: ReduceOp,
    mut data: Buffer,
) -> Result<Buffer> {
    let seed = ranks.rank().0 * 3 + 1;
    ranks.all_reduce(dtype, op, &mut cut(dtype, data.bytes_mut(), seed))?;
    Ok(data)
}

#[test]
fn segments_reduce_to_the_bits_of_one_buffer_with_every_algorithm() {
    let cases = |wire: usize, world: usize| {
        // Sockets need no more than to show that they are a wire like the other.
        let dtypes = if wire == 0 { &DType::ALL[..] } else { &[DType::BF16, DType::F32] };
        let counts = [0, 1, 2, world + 1, 1000, 5001];
        let ops = [ReduceOp::Mean, ReduceOp::Min];
        dtypes.iter().flat_map(move |dtype| {
            counts.into_iter().flat_map(move |count| ops.map(|op| (*dtype, count, op)))
        })
    };
    for (wire, wires) in WIRES.into_iter().enumerate() {
        for world in WORLDS {
            let expected: Vec<Vec<u8>> = cases(wire, world)
                .map(|(dtype, count, op)| {
                    let inputs: Vec<Buffer> = (0..world).map(|rank| input(dtype, count, rank)).collect();
                    if world == 1 { inputs[0].bytes().to_vec() } else { reference(op, dtype, &inputs) }
                })
                .collect();
            for algorithm in algorithms(world) {
                let results = launch_with(algorithm, wires(world), move |ranks| {
                    let rank = ranks.rank().0;
                    cases(wire, world)
                        .map(|(dtype, count, op)| {
                            all_reduced_in_segments(ranks, dtype, op, input(dtype, count, rank))
                        })
                        .collect::<Result<Vec<Buffer>>>()
                });
                for (rank, results) in results.iter().enumerate() {
                    for ((case, got), expected) in cases(wire, world).zip(results).zip(&expected) {
                        assert!(
                            got.bytes() == expected,
                            "{case:?} with {algorithm:?}, rank {rank} of {world}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn several_blocks_are_reduced_like_one() {
    // A little more than two blocks of 4 MiB, with an end that no world divides evenly.
    const COUNT: usize = (9 << 20) / 4 + 5;
    let value = |rank: usize, at: usize| ((at * 31 + rank * 1009) % 4093) as f32 / 7.0;
    for (world, wires) in [(2, WIRES[1]), (3, WIRES[0]), (4, WIRES[0]), (4, WIRES[1])] {
        let inputs: Vec<Vec<f32>> =
            (0..world).map(|rank| (0..COUNT).map(|at| value(rank, at)).collect()).collect();
        let pieces: Vec<&[u8]> = inputs.iter().map(|input| bytemuck::cast_slice(input)).collect();
        let mut expected = vec![0f32; COUNT];
        tree_reduce(ReduceOp::Mean, DType::F32, &pieces, bytemuck::cast_slice_mut(&mut expected))
            .expect("lengths are equal");
        for algorithm in algorithms(world).filter(|algorithm| *algorithm != Some(Algorithm::Whole)) {
            let (inputs, expected) = (inputs.clone(), expected.clone());
            launch_with(algorithm, wires(world), move |ranks| {
                let mut data = inputs[ranks.rank().0].clone();
                let (first, second) = bytemuck::cast_slice_mut(&mut data).split_at_mut(4 * (COUNT / 3));
                ranks.all_reduce(DType::F32, ReduceOp::Mean, &mut [first, second])?;
                assert!(data == expected, "{algorithm:?}, {} of {world}", ranks.rank());
                let part = burn_ddp_comm::collective::chunk(COUNT, world, ranks.rank().0);
                let mut output = vec![0f32; part.len()];
                let input = bytemuck::cast_slice(&inputs[ranks.rank().0]);
                let op = ReduceOp::Mean;
                ranks.reduce_scatter(DType::F32, op, input, bytemuck::cast_slice_mut(&mut output))?;
                assert!(output == expected[part], "reduce_scatter, {} of {world}", ranks.rank());
                Ok(())
            });
        }
    }
}

#[test]
fn broadcast_fills_segments_that_are_cut_elsewhere() {
    for wires in WIRES {
        for world in WORLDS {
            launch(wires(world), move |ranks| {
                for (root, count) in [(0, 10), (world - 1, 3000), (world / 2, 0)] {
                    let mut data = input(DType::F32, count, ranks.rank().0);
                    let seed = ranks.rank().0 * 3 + 1;
                    ranks.broadcast(DType::F32, Rank(root), &mut cut(DType::F32, data.bytes_mut(), seed))?;
                    assert!(data.bytes() == input(DType::F32, count, root).bytes());
                }
                Ok(())
            });
        }
    }
}

#[test]
fn half_precision_means_neither_overflow_nor_vanish() {
    for wires in WIRES {
        for world in [2, 4] {
            for algorithm in algorithms(world) {
                launch_with(algorithm, wires(world), move |ranks| {
                    for value in [f16::from_f32(40000.0), f16::from_bits(1)] {
                        for count in [3, 5000] {
                            let mut data = vec![value; count];
                            let list = &mut [bytemuck::cast_slice_mut(&mut data)];
                            ranks.all_reduce(DType::F16, ReduceOp::Mean, list)?;
                            assert_eq!(data, vec![value; count]);
                        }
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn two_hundred_all_reduces_in_a_row() {
    let began = Instant::now();
    for wires in WIRES {
        for algorithm in algorithms(4) {
            launch_with(algorithm, wires(4), |ranks| {
                for step in 0..200usize {
                    let count = [1, 7, 1000][step % 3];
                    let mut data: Vec<f32> =
                        (0..count).map(|at| (ranks.rank().0 * 1000 + at + step) as f32).collect();
                    let list = &mut [bytemuck::cast_slice_mut(&mut data)];
                    ranks.all_reduce(DType::F32, ReduceOp::Sum, list)?;
                    let expected: Vec<f32> = (0..count).map(|at| (6000 + 4 * (at + step)) as f32).collect();
                    assert_eq!(data, expected, "step {step}");
                }
                assert_eq!(ranks.sequence(), 200);
                Ok(())
            });
        }
    }
    assert!(began.elapsed() < Duration::from_secs(8 * 10));
}

#[test]
fn halving_finds_one_rank_in_another_operation() {
    let calls: [fn(&mut Collectives) -> Result<()>; 3] = [
        |ranks| ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [Buffer::zeroed(400).bytes_mut()]),
        |ranks| ranks.barrier(),
        |ranks| ranks.announce(Operation::AllReduce(ReduceOp::Sum), DType::F32, 1000, 1),
    ];
    for call in calls {
        for (world, odd) in [(2, 0), (4, 0), (4, 3), (8, 5)] {
            let outcomes = outcomes_with(Some(Algorithm::Halving), over_loopback(world), move |ranks| {
                if ranks.rank().0 == odd {
                    return call(ranks);
                }
                ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [Buffer::zeroed(4000).bytes_mut()])
            });
            let errors: Vec<_> =
                outcomes.into_iter().map(|outcome| outcome.expect_err("one rank is elsewhere")).collect();
            let told = errors.iter().filter(|error| error.kind() == ErrorKind::Mismatch).count();
            assert!(told >= 1, "{odd} of {world}: {errors:?}");
            for error in errors {
                let known = matches!(error.kind(), ErrorKind::Mismatch | ErrorKind::PeerLost(_));
                assert!(known, "{odd} of {world}: {error}");
            }
        }
    }
}

#[test]
fn an_algorithm_that_the_world_cannot_have_is_refused_by_name() {
    let mut wires = over_loopback(3);
    let ranks = Collectives::new(wires.remove(0), Topology::separate(3), Duration::from_secs(1));
    let error = ranks.with_algorithm(Some(Algorithm::Halving)).err().expect("three ranks do not halve");
    assert_eq!(error.kind(), ErrorKind::Config);
    for word in ["Halving", "power of two", "has 3"] {
        assert!(error.to_string().contains(word), "{error} lacks {word}");
    }
}

/// Prints the times to which the constants of the cost model are fitted: the medians of some rounds, of which each is a
/// barrier and then several operations.
#[test]
#[ignore = "a measurement"]
fn times_of_the_algorithms_over_sockets() {
    const SIZES: [usize; 10] =
        [4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
    for (world, dtype) in [(2, DType::F32), (4, DType::F32), (8, DType::F32), (4, DType::BF16)] {
        println!("{world} ranks, {dtype}; microseconds");
        let columns: Vec<Vec<f64>> = Algorithm::ALL
            .into_iter()
            .map(|algorithm| {
                let times = launch_with(Some(algorithm), over_tcp(world), move |ranks| {
                    SIZES
                        .into_iter()
                        .map(|bytes| {
                            let mut data = Buffer::zeroed(bytes);
                            let repeats = ((1 << 20) / bytes).clamp(1, 50);
                            let mut times = Vec::new();
                            if algorithm == Algorithm::Whole && bytes > 1 << 20 {
                                return Ok(f64::NAN);
                            }
                            for _ in 0..7 {
                                ranks.barrier()?;
                                let began = Instant::now();
                                for _ in 0..repeats {
                                    ranks.all_reduce(dtype, ReduceOp::Mean, &mut [data.bytes_mut()])?;
                                }
                                times.push(began.elapsed().as_secs_f64() * 1e6 / repeats as f64);
                            }
                            assert!(data.bytes().iter().all(|byte| *byte == 0), "a mean of zeros is zero");
                            times.sort_by(f64::total_cmp);
                            Ok(times[times.len() / 2])
                        })
                        .collect::<Result<Vec<f64>>>()
                });
                times.into_iter().next().expect("rank 0")
            })
            .collect();
        println!("{:>10}{:>12}{:>12}{:>12}", "bytes", "whole", "direct", "halving");
        for (index, bytes) in SIZES.into_iter().enumerate() {
            println!(
                "{bytes:>10}{:>12.1}{:>12.1}{:>12.1}",
                columns[0][index], columns[1][index], columns[2][index]
            );
        }
    }
}

/// With recursive halving they would wait for each other in a ring in which no two that disagree face each other.
#[test]
fn halves_of_the_world_in_different_operations_are_told() {
    for wires in WIRES {
        let began = Instant::now();
        let outcomes = outcomes_with(Some(Algorithm::Halving), wires(8), |ranks| {
            if ranks.rank().0 >= 4 {
                return ranks.barrier();
            }
            ranks.all_reduce(DType::F32, ReduceOp::Sum, &mut [Buffer::zeroed(36_000).bytes_mut()])
        });
        assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
        let told = outcomes.iter().flat_map(|outcome| outcome.as_ref().err());
        assert!(told.map(Error::kind).any(|kind| kind == ErrorKind::Mismatch), "{outcomes:?}");
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    }
}
