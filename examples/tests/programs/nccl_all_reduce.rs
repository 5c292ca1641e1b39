//! The program `nccl_all_reduce`, as far as it goes without a GPU.

#[path = "../../src/bin/nccl_all_reduce/table.rs"]
mod table;

use std::time::Duration;

use table::{Row, bytes, head, sizes};

fn row(bytes: usize, world_size: usize, micros: u64) -> String {
    let nccl = Duration::from_micros(micros);
    Row { bytes, world_size, nccl, group: 2 * nccl }.to_string()
}

#[test]
fn a_row_has_bandwidths_as_nccl_tests_count_them() {
    let numbers =
        |row: String| -> Vec<f64> { row.split_whitespace().map(|number| number.parse().unwrap()).collect() };
    // A megabyte in 10 us is 100 GB/s; on four ranks each link carries 2 * 3 / 4 of that.
    assert_eq!(numbers(row(1_000_000, 4, 10)), [1e6, 10.0, 100.0, 150.0, 20.0]);
    assert_eq!(numbers(row(1_000_000, 2, 10)), [1e6, 10.0, 100.0, 100.0, 20.0]);
    assert_eq!(numbers(row(1_000_000, 1, 10))[3], 0.0);
    assert_eq!(row(8, 8, 3).len(), head().len());
}

#[test]
fn sizes_double_up_to_the_largest() {
    assert_eq!(sizes(8, 64).collect::<Vec<_>>(), [8, 16, 32, 64]);
    assert_eq!(sizes(12, 100).collect::<Vec<_>>(), [12, 24, 48, 96]);
    assert_eq!(sizes(usize::MAX - 3, usize::MAX).count(), 1);
    assert_eq!(sizes(8, 4).count(), 0);
}

#[test]
fn bytes_are_read_with_their_unit() {
    for (text, expected) in [("8", 8), ("64K", 65_536), ("128M", 134_217_728), ("1g", 1_073_741_824)] {
        assert_eq!(bytes(text), Ok(expected));
    }
    for text in ["", "0", "6", "K", "8T", "-8", "1.5M", "99999999999G", "8é"] {
        assert!(bytes(text).unwrap_err().contains("multiple of 4"), "{text}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn without_a_device_it_ends_in_one_line() {
    use crate::process::{assert_refused, command, run};

    let program = env!("CARGO_BIN_EXE_nccl_all_reduce");
    assert_refused(&run(command(program, "--nproc 0")), &["--nproc 0"]);
    assert_refused(&run(command(program, "--repetitions 0")), &["--repetitions 0"]);
    assert_refused(&run(command(program, "--min-bytes 1M --max-bytes 1K")), &["--max-bytes 1024", "1048576"]);
    let mut hidden = command(program, "");
    hidden.env("CUDA_VISIBLE_DEVICES", "");
    assert_refused(&run(hidden), &["CUDA driver"]);
}
