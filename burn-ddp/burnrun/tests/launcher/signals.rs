//! Signals to the launcher.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::launched::{Launched, command, ignored, sh};

#[test]
fn signals_are_passed_on() {
    for (signal, name, code) in [
        (Signal::TERM, "TERM", 143),
        (Signal::INT, "INT", 130),
        (Signal::HUP, "HUP", 129),
        (Signal::QUIT, "QUIT", 131),
    ] {
        if ignored(signal) {
            eprintln!("skipped: SIG{name} is ignored here, so the launcher leaves it ignored");
            continue;
        }
        let script = format!("trap 'echo got {name}; exit 0' {name}; echo $$; while :; do sleep 0.1; done");
        let mut launched = Launched::start(sh(&["-n", "2"], &script));
        launched.pids(2);
        launched.signal(signal);
        let ended = launched.wait(8);
        ended.expect_code(code);
        for rank in 0..2 {
            assert!(ended.has_line(&format!("[rank {rank}] got {name}")), "{ended}");
        }
        assert!(ended.err.trim_end().ends_with(&format!("(SIG{name})")), "{ended}");
    }
}

#[test]
fn signals_that_a_parent_blocked_are_received() {
    let block = "--block-signal=TERM,CHLD,INT,HUP";
    if !Command::new("env").args([block, "true"]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this env has no --block-signal");
        return;
    }
    let deaf = |script: &str| {
        let mut command = command("env");
        command.args([block, env!("CARGO_BIN_EXE_burnrun"), "-n", "2", "sh", "-c", script]);
        Launched::start(command)
    };
    deaf("exit $RANK").wait(8).expect_code(1);
    // Ranks that are not deaf either end at once, long before SIGKILL.
    let mut launched = deaf("echo $$; exec sleep 600");
    launched.pids(2);
    let begin = Instant::now();
    launched.signal(Signal::TERM);
    launched.wait(8).expect_code(143);
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

#[test]
fn usr1_and_usr2_are_passed_on_and_the_run_goes_on() {
    let script = "trap 'echo one' USR1; trap 'echo two; exit 0' USR2; echo $$; while :; do sleep 0.1; done";
    let mut launched = Launched::start(sh(&["-n", "2"], script));
    launched.pids(2);
    launched.signal(Signal::USR1);
    launched.until_out(5, "[rank 0] one");
    launched.until_out(5, "[rank 1] one");
    launched.signal(Signal::USR2);
    let ended = launched.wait(5);
    ended.expect_code(0);
    assert!(ended.has_line("[rank 0] two") && ended.has_line("[rank 1] two"), "{ended}");
}

#[test]
fn the_second_signal_kills_but_not_a_doubled_one() {
    let script = "trap 'sleep 1; echo saved; exit 0' TERM; echo $$; while :; do sleep 0.1; done";
    let mut launched = Launched::start(sh(&["-n", "1"], script));
    launched.pids(1);
    launched.signal(Signal::TERM);
    launched.signal(Signal::TERM);
    let ended = launched.wait(5);
    ended.expect_code(143);
    assert!(ended.has_line("[rank 0] saved"), "{ended}");

    let script = "trap '' TERM; echo $$; while :; do sleep 0.1; done";
    let mut launched = Launched::start(sh(&["-n", "1", "--signal-grace", "60"], script));
    launched.pids(1);
    launched.signal(Signal::TERM);
    launched.until_err(5, "SIGTERM received");
    std::thread::sleep(Duration::from_millis(400));
    launched.signal(Signal::TERM);
    launched.wait(5).expect_code(143);
}

#[test]
fn nohup_is_respected() {
    let script = "echo $$; while [ ! -e \"$GO\" ]; do sleep 0.05; done; echo done";
    let go = tempfile::tempdir().unwrap();
    let mut command = command("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_burnrun"), "-n", "1"]);
    command.args(["sh", "-c", script]).env("GO", go.path().join("go"));
    let mut launched = Launched::start(command);
    launched.pids(1);
    launched.signal(Signal::HUP);
    std::fs::write(go.path().join("go"), "").unwrap();
    let ended = launched.wait(5);
    ended.expect_code(0);
    assert!(ended.has_line("[rank 0] done"), "{ended}");
}
