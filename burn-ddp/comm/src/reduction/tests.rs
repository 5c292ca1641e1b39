//! The loops against the definition, and the definition against examples.

use bytemuck::Pod;
use half::{bf16, f16};

use super::element::{Accumulator, Element, with_element};
use super::fold::BLOCK;
use super::*;
use crate::dtype::{DType, ReduceOp};

fn reduced<T: Pod>(op: ReduceOp, dtype: DType, pieces: &[Vec<T>]) -> Vec<T> {
    let mut out = pieces[0].clone();
    let pieces: Vec<&[u8]> = pieces.iter().map(|piece| bytemuck::cast_slice(piece)).collect();
    tree_reduce(op, dtype, &pieces, bytemuck::cast_slice_mut(&mut out)).unwrap();
    out
}

/// The fold of one element after the other, as a definition and not for speed.
fn defined<T: Element>(op: ReduceOp, pieces: &[Vec<T>]) -> Vec<T> {
    let combined = |left: T::Acc, right: T::Acc| match op {
        ReduceOp::Sum | ReduceOp::Mean => left.add(right),
        ReduceOp::Min => left.least(right),
        ReduceOp::Max => left.greatest(right),
    };
    let element = |at: usize| {
        let values: Vec<T::Acc> = pieces.iter().map(|piece| piece[at].wide()).collect();
        let value = pairwise(&values, &combined).unwrap();
        T::narrowed(if op == ReduceOp::Mean { value.divided(pieces.len()) } else { value }.canonical())
    };
    if let [only] = pieces { only.clone() } else { (0..pieces[0].len()).map(element).collect() }
}

/// Elements of all bit patterns, among them NaN, infinities and subnormals more often than by chance.
fn elements_of<T: Pod>(dtype: DType, count: usize, seed: usize) -> Vec<T> {
    let mut state = seed as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state ^ (state >> 29)
    };
    let mut bytes = Vec::with_capacity(count * size_of::<T>());
    for _ in 0..count {
        let (bits, kind) = (next(), next() >> 60);
        let value = match (dtype, kind) {
            (_, 0) => 0,
            // Signed zeros, infinities, NaN and subnormals by their exponents.
            (DType::F16, 1..4) => bits & 0x83FF,
            (DType::F16, 4) => bits & 0xFC00 | 0x7C00,
            (DType::BF16, 1..4) => bits & 0x807F,
            (DType::BF16, 4) => bits & 0xFF80 | 0x7F80,
            (DType::F32, 1..4) => bits & 0x807F_FFFF,
            (DType::F32, 4) => bits & 0xFF80_0000 | 0x7F80_0000,
            (DType::F64, 1..4) => bits & 0x800F_FFFF_FFFF_FFFF,
            (DType::F64, 4) => bits & 0xFFF0_0000_0000_0000 | 0x7FF0_0000_0000_0000,
            _ => bits,
        };
        bytes.extend_from_slice(&value.to_le_bytes()[..size_of::<T>()]);
    }
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Every way to reduce `pieces`, each from buffers that begin one element later than memory does.
fn check<T: Element>(op: ReduceOp, dtype: DType, pieces: &[Vec<T>]) {
    let expected: Vec<u8> = bytemuck::cast_slice(&defined(op, pieces)).to_vec();
    let shifted: Vec<Vec<T>> = pieces
        .iter()
        .map(|piece| std::iter::once(T::zeroed()).chain(piece.iter().copied()).collect())
        .collect();
    let bytes = |rank: usize| -> &[u8] { bytemuck::cast_slice(&shifted[rank][1..]) };
    let world = pieces.len();
    let context = || format!("{} x {dtype}, {op} of {world}", pieces[0].len());
    for own in 0..world {
        let others: Vec<&[u8]> = (0..world).filter(|rank| *rank != own).map(bytes).collect();
        let mut data = shifted[own].clone();
        reduce_in_place(op, dtype, own, &others, bytemuck::cast_slice_mut(&mut data[1..])).unwrap();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&data[1..]), expected, "{} at {own}", context());
        let (mut data, mut copy) = (shifted[own].clone(), pieces[own].clone());
        let copy: &mut [u8] = bytemuck::cast_slice_mut(&mut copy);
        reduce_in_place_and(op, dtype, own, &others, bytemuck::cast_slice_mut(&mut data[1..]), copy).unwrap();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&data[1..]), expected, "{} at {own}", context());
        assert_eq!(copy, expected, "the copy of {} at {own}", context());
    }
    if world == 1 {
        return;
    }
    // Ranks dealt to one, two or three hosts, in turn and in runs; each host folds what nodes it has.
    for hosts in 1..=3 {
        for host_of in [|rank: usize, hosts, _| rank % hosts, |rank, hosts, world| rank * hosts / world] {
            let mut nodes: Vec<Node> = Vec::new();
            for host in 0..hosts {
                let members: Vec<usize> =
                    (0..world).filter(|rank| host_of(*rank, hosts, world) == host).collect();
                nodes.extend(nodes_within(world, &members));
            }
            nodes.sort_by_key(|node| node.start);
            let size = pieces[0].len() * partial_size(dtype);
            let mut memory = vec![vec![0u128; size.div_ceil(16)]; nodes.len()];
            for (node, memory) in nodes.iter().zip(&mut memory) {
                let out = &mut bytemuck::cast_slice_mut(memory)[..size];
                reduce_node(op, dtype, node.clone(), &bytes, out).unwrap();
            }
            let memory: Vec<&[u8]> =
                memory.iter().map(|memory| &bytemuck::cast_slice(memory)[..size]).collect();
            let partials: Vec<(Node, &[u8])> = nodes.iter().cloned().zip(memory).collect();
            let mut out = shifted[0].clone();
            complete(op, dtype, world, &partials, bytemuck::cast_slice_mut(&mut out[1..])).unwrap();
            assert_eq!(bytemuck::cast_slice::<T, u8>(&out[1..]), expected, "{} on {hosts} hosts", context());
        }
    }
}

#[test]
fn every_loop_is_the_definition_bit_for_bit() {
    for dtype in DType::ALL {
        for world in 1..=9 {
            for count in [0, 1, 7, 16, 33, BLOCK + 5] {
                with_element!(dtype, T => {
                    let pieces: Vec<Vec<T>> =
                        (0..world).map(|rank| elements_of(dtype, count, rank * 7919 + count)).collect();
                    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
                        check(op, dtype, &pieces);
                    }
                });
            }
        }
    }
}

/// Each rank's value alone, spread over several blocks and an incomplete one.
fn columns<T: Clone>(values: &[T]) -> Vec<Vec<T>> {
    values.iter().map(|value| vec![value.clone(); 2 * BLOCK + 3]).collect()
}

#[test]
fn the_left_part_is_the_larger() {
    let order = |count: usize| {
        let leaves: Vec<String> = (0..count).map(|leaf| leaf.to_string()).collect();
        pairwise(&leaves, &|left, right| format!("({left} {right})")).unwrap()
    };
    assert_eq!(order(2), "(0 1)");
    assert_eq!(order(5), "(((0 1) 2) (3 4))");
    assert_eq!(order(6), "(((0 1) 2) ((3 4) 5))");
    assert_eq!(order(7), "(((0 1) (2 3)) ((4 5) 6))");
    assert_eq!(pairwise(&[] as &[f64], &|left, right| left + right), None);
}

#[test]
fn every_world_size_is_the_pairwise_fold() {
    for ranks in 1..=33 {
        let values: Vec<f32> = (0..ranks).map(|rank| 0.1 + 1e3 / (1 + rank * rank) as f32).collect();
        let expected = pairwise(&values, &|left, right| left + right).unwrap();
        let sums = reduced(ReduceOp::Sum, DType::F32, &columns(&values));
        assert!(sums.iter().all(|sum| sum.to_bits() == expected.to_bits()), "{ranks} ranks");
    }
}

#[test]
fn halves_neither_overflow_nor_underflow_in_a_mean() {
    for value in [f16::from_f32(40000.0), f16::from_bits(1)] {
        assert!(reduced(ReduceOp::Mean, DType::F16, &columns(&[value; 2])).iter().all(|mean| *mean == value));
    }
    let huge = bf16::MAX;
    assert_eq!(reduced(ReduceOp::Max, DType::BF16, &[vec![huge], vec![bf16::ONE]]), [huge]);
}

#[test]
fn integers_are_exact() {
    let pieces = [vec![i64::MAX, -7, 1], vec![i64::MAX, 0, 1], vec![i64::MAX, 0, 1]];
    assert_eq!(reduced(ReduceOp::Mean, DType::I64, &pieces), [i64::MAX, -2, 1]);
    assert_eq!(reduced(ReduceOp::Sum, DType::I64, &pieces), [i64::MAX - 2, -7, 3]);
    assert_eq!(reduced(ReduceOp::Sum, DType::U8, &[vec![200u8], vec![100]]), [44]);
    assert_eq!(reduced(ReduceOp::Mean, DType::U8, &[vec![200u8], vec![101]]), [150]);
}

#[test]
fn the_own_piece_may_stand_anywhere() {
    let pieces: Vec<Vec<f32>> = columns(&[1.0e8, 1.0, -1.0e8, 3.0, 0.5]);
    let expected = reduced(ReduceOp::Sum, DType::F32, &pieces);
    for own in 0..pieces.len() {
        let mut data = pieces[own].clone();
        let others: Vec<&[u8]> = (0..pieces.len())
            .filter(|rank| *rank != own)
            .map(|rank| bytemuck::cast_slice(&pieces[rank]))
            .collect();
        reduce_in_place(ReduceOp::Sum, DType::F32, own, &others, bytemuck::cast_slice_mut(&mut data))
            .unwrap();
        assert_eq!(data, expected, "own {own}");
    }
}

#[test]
fn wrong_slices_are_refused() {
    let good = [0.0f32; 4];
    let bytes: &[u8] = bytemuck::cast_slice(&good);
    let refused = |pieces: &[&[u8]], out: &mut [u8]| {
        let error = tree_reduce(ReduceOp::Sum, DType::F32, pieces, out).unwrap_err();
        assert_eq!(error.kind(), crate::error::ErrorKind::Config);
    };
    let mut out = [0.0f32; 4];
    let out: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
    refused(&[], &mut out[..]);
    refused(&[bytes, &bytes[..12]], &mut out[..]);
    refused(&[&bytes[1..13], &bytes[..12]], &mut out[1..13]);
    refused(&[&bytes[..7], &bytes[..7]], &mut out[..7]);
}
