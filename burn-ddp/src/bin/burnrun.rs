//! Starts one process per rank.

fn main() {}
