//! Output of the ranks: console, files, and readers that are slow or gone.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::launched::{Launched, alive, sh};

#[test]
fn lines_are_never_cut_or_merged() {
    // Each line is written in two pieces, on both streams, and both end in one file.
    let script = "half=$(printf %0100d $RANK); i=0
        while [ $i -lt 500 ]; do printf %s $half; echo $half; printf %s $half >&2; echo $half >&2; i=$((i+1)); done
        printf 'no end'";
    let mut launched = Launched::start_joined(sh(&["-n", "3"], script));
    let ended = launched.wait(20);
    ended.expect_code(0);
    for rank in 0..3 {
        let line = format!("[rank {rank}] {}", format!("{rank:0100}").repeat(2));
        assert_eq!(ended.out.lines().filter(|found| **found == line).count(), 1000);
        assert!(ended.has_line(&format!("[rank {rank}] no end")));
    }
    assert_eq!(ended.out.lines().count(), 1 + 3 * 1001);
}

#[test]
fn output_goes_to_files_as_asked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let flags =
        ["-n", "2", "--log-dir", path, "--run-id", "j", "-r", "1", "-t", "2", "--local-ranks-filter", "1"];
    let ended =
        Launched::start(sh(&flags, "echo out $RANK; printf 'err %s' $RANK >&2; exit $((RANK * 5))")).wait(10);
    ended.expect_code(5);
    assert_eq!(ended.out, "", "redirected output is not shown");
    assert!(ended.err.contains("\n[rank 1] err 1\n") && !ended.err.contains("[rank 0] err 0"), "{ended}");
    for rank in 0..2 {
        let file = |name| {
            std::fs::read_to_string(directory.path().join(format!("j/attempt_0/{rank}/{name}"))).unwrap()
        };
        assert_eq!(file("stdout.log"), format!("out {rank}\n"));
        assert_eq!(file("stderr.log"), format!("err {rank}"), "files get the bytes as they are");
    }
    assert!(ended.err.contains("\n[rank 1] out 1\n"), "the last lines include what was redirected\n{ended}");
}

#[test]
fn a_reader_that_leaves_does_not_end_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; echo x > \"$DONE/$RANK\"";
    let mut command = sh(&["-n", "2"], script);
    command.env("DONE", directory.path()).stdout(Stdio::piped());
    let mut launched = Launched::start_with_stdout_of_command(command);
    drop(launched.process.stdout.take());
    let ended = launched.wait(10);
    ended.expect_code(0);
    assert!(ended.err.contains("standard output is closed"), "{ended}");
    assert!(!ended.err.contains("panicked"), "{ended}");
    assert!(directory.path().join("0").exists() && directory.path().join("1").exists());
}

#[test]
fn a_console_without_a_reader_does_not_stop_supervision() {
    let script = "[ $RANK = 1 ] && { sleep 0.3; exit 3; }; echo $$ > \"$DIR/pid\"; exec yes";
    let directory = tempfile::tempdir().unwrap();
    let mut command = sh(&["-n", "2"], script);
    command.env("DIR", directory.path()).stdout(Stdio::piped());
    let mut launched = Launched::start_with_stdout_of_command(command);
    let mut console = launched.process.stdout.take().unwrap();
    let pid = || std::fs::read_to_string(directory.path().join("pid")).ok()?.trim().parse::<i32>().ok();
    launched.until(5, || pid().is_some(), "rank 0 does not start");
    let pid = pid().unwrap();
    launched.until(8, || !alive(pid), "rank 0 is not ended");
    assert!(launched.process.try_wait().unwrap().is_none(), "what was written is not thrown away");
    std::thread::spawn(move || console.read_to_end(&mut Vec::new()));
    launched.wait(5).expect_code(3);
}

#[test]
fn a_stopped_launch_does_not_wait_for_a_reader_that_is_stuck() {
    let mut command = sh(&["-n", "1"], "exec yes");
    command.stdout(Stdio::piped());
    let mut launched = Launched::start_with_stdout_of_command(command);
    let console = launched.process.stdout.take().unwrap();
    launched.until(5, || nearly_full(&console), "the pipe does not fill");
    let begin = Instant::now();
    launched.signal(Signal::TERM);
    launched.until_err(2, "SIGTERM received");
    let ended = launched.wait(10);
    ended.expect_code(143);
    assert!(begin.elapsed() >= Duration::from_secs(4), "a reader has a moment: {:?}", begin.elapsed());
    assert!(ended.err.contains("stopped by signal 15 (SIGTERM)\n"), "{ended}");
    assert!(ended.err.contains("the last output for it is lost"), "{ended}");
}

#[test]
fn an_error_that_is_not_read_does_not_hold_the_launcher() {
    let (unread, writer) = std::io::pipe().unwrap();
    let mut command = sh(&["-n", "1"], "yes >&2");
    command.stderr(writer);
    let mut launched = Launched::start_with_streams_of_command(command);
    launched.until(5, || nearly_full(&unread), "the pipe does not fill");
    launched.signal(Signal::TERM);
    launched.wait(16).expect_code(143);
}

/// A pipe holds 64 KiB, or a little less when it was filled in odd pieces.
fn nearly_full(pipe: impl AsFd) -> bool {
    rustix::io::ioctl_fionread(pipe).unwrap() >= 48 << 10
}

#[test]
fn standard_input_of_ranks_is_empty() {
    let mut command = sh(&["-n", "2"], "cat; echo end");
    command.stdin(Stdio::piped());
    let ended = Launched::start(command).wait(5);
    ended.expect_code(0);
    assert_eq!(ended.out.lines().count(), 2, "{ended}");
}
