//! The program `all_reduce`, run as users run it.

use crate::process::{assert_refused, command, run, stdout};

const PROGRAM: &str = env!("CARGO_BIN_EXE_all_reduce");

#[test]
fn ranks_say_who_they_are_in_order_and_add_up() {
    let cases = [
        ("", 1, "[1.0, 2.0, 3.0, 4.0]", "all_reduce: 1 call(s), 0 bytes"),
        ("--nproc 3", 3, "[6.0, 12.0, 18.0, 24.0]", "all_reduce: 1 call(s), 16 bytes"),
    ];
    for (args, world_size, sum, stats) in cases {
        let text = stdout(&run(command(PROGRAM, args)));
        let places: Vec<_> = (0..world_size)
            .map(|rank| text.find(&format!("rank {rank} of {world_size} on host ")).expect("every rank"))
            .collect();
        assert!(places.is_sorted(), "{text}");
        assert!(text.contains(sum) && text.contains(stats), "{text}");
    }
}

#[test]
fn wrong_input_is_one_line() {
    assert_refused(&run(command(PROGRAM, "--nproc 0")), &["--nproc 0"]);
    let mut half = command(PROGRAM, "");
    half.env("RANK", "0");
    assert_refused(&run(half), &["WORLD_SIZE"]);
    let mut other = command(PROGRAM, "--nproc 3");
    other.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")]);
    assert_refused(&run(other), &["--nproc 3", "2"]);
}
