//! Starts one process per rank and looks after them; see the library of the same name.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use burnrun::Args;
use clap::Parser;

/// How long the last words may wait for a reader of standard error.
const LAST_WORDS: Duration = Duration::from_secs(5);

fn main() {
    let outcome = Args::parse().launcher().and_then(|launcher| launcher.run());
    let Err(error) = outcome else { return };
    let code = error.exit_code();
    let (done, written) = mpsc::channel();
    std::thread::spawn(move || {
        // A closed stderr must not turn the ranks' exit code into that of a panic.
        let _ = std::io::stderr().write_all(format!("burnrun: {error}\n").as_bytes());
        let _ = done.send(());
    });
    let _ = written.recv_timeout(LAST_WORDS);
    std::process::exit(code);
}
