//! Speed of the loops: `cargo test -p burn-ddp-comm --release --lib -- --ignored --nocapture speed_of_the_loops`.

use std::time::Instant;

use super::tree::{reduce_in_place, tree_reduce};
use crate::dtype::{DType, ReduceOp};

/// Gigabytes of one operand that are reduced per second, the best of some runs.
fn speed(dtype: DType, op: ReduceOp, world: usize, bytes: usize) -> f64 {
    // Ones of every type are finite after any number of runs of a mean.
    let one: &[u8] = match dtype {
        DType::F16 => &0x3C00u16.to_ne_bytes(),
        DType::BF16 => &0x3F80u16.to_ne_bytes(),
        DType::F32 => &1f32.to_ne_bytes(),
        DType::F64 => &1f64.to_ne_bytes(),
        DType::I32 => &1i32.to_ne_bytes(),
        DType::I64 => &1i64.to_ne_bytes(),
        DType::U8 => &[1],
    };
    let piece = || {
        let mut words = vec![0u64; bytes / 8];
        let ones = bytemuck::cast_slice_mut::<u64, u8>(&mut words);
        ones.chunks_exact_mut(one.len()).for_each(|element| element.copy_from_slice(one));
        words
    };
    let mut data = piece();
    let others: Vec<Vec<u64>> = (1..world).map(|_| piece()).collect();
    let others: Vec<&[u8]> = others.iter().map(|other| bytemuck::cast_slice(other)).collect();
    let mut best = f64::INFINITY;
    for _ in 0..7 {
        let repeats = ((16 << 20) / bytes).max(1);
        let began = Instant::now();
        for _ in 0..repeats {
            reduce_in_place(op, dtype, 0, &others, bytemuck::cast_slice_mut(&mut data))
                .expect("equal lengths");
        }
        best = best.min(began.elapsed().as_secs_f64() / repeats as f64);
    }
    let mut check = piece();
    let pieces: Vec<&[u8]> = std::iter::once(bytemuck::cast_slice(&data)).chain(others).collect();
    tree_reduce(op, dtype, &pieces, bytemuck::cast_slice_mut(&mut check)).expect("equal lengths");
    assert_eq!(check, data, "a mean of ones is one");
    bytes as f64 / best / 1e9
}

#[test]
#[ignore = "a measurement"]
fn speed_of_the_loops() {
    println!(
        "GB/s of one operand, mean\n{:<6}{:>6}{:>10}{:>10}{:>10}",
        "dtype", "ranks", "64 KiB", "1 MiB", "16 MiB"
    );
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I32] {
        for world in [2, 3, 4, 8] {
            let speeds =
                [64 << 10, 1 << 20, 16 << 20].map(|bytes| speed(dtype, ReduceOp::Mean, world, bytes));
            let [small, middle, large] = speeds;
            println!("{:<6}{world:>6}{small:>10.1}{middle:>10.1}{large:>10.1}", dtype.to_string());
        }
    }
}
