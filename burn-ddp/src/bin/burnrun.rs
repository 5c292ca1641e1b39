//! Starts one process per rank and looks after them; see `burn_ddp::launch`.

use std::io::Write;

use burn_ddp::launch::Args;
use clap::Parser;

fn main() {
    let outcome = Args::parse().launcher().and_then(|launcher| launcher.run());
    let Err(error) = outcome else { return };
    // A closed stderr must not turn the ranks' exit code into that of a panic.
    let _ = writeln!(std::io::stderr(), "burnrun: {error}");
    std::process::exit(error.exit_code());
}
