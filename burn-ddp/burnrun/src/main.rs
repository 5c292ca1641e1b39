//! The command `burnrun`; see the library of the same name.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use burnrun::Args;
use clap::Parser;

/// Longest time for which the launcher waits, before it exits, until its last message is read.
const STDERR_TIMEOUT: Duration = Duration::from_secs(5);

fn main() {
    let outcome = Args::parse().launcher().and_then(|launcher| launcher.run());
    let Err(error) = outcome else { return };
    let code = error.exit_code();
    let (done, written) = mpsc::channel();
    std::thread::spawn(move || {
        // `eprintln!` panics if standard error is closed, and the exit code would be that of the panic.
        let _ = std::io::stderr().write_all(format!("burnrun: {error}\n").as_bytes());
        let _ = done.send(());
    });
    let _ = written.recv_timeout(STDERR_TIMEOUT);
    std::process::exit(code);
}
