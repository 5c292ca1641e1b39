//! Process tests of the launcher.

fn main() {}
