//! `burnrun` as a process: shell scripts as ranks, since it must not matter to it what the ranks are.
//!
//! Every wait has a deadline, and a launcher that is still there when its test ends is killed, which ends its
//! ranks too.

#![cfg(target_os = "linux")]

#[path = "launcher/launched.rs"]
mod launched;
#[path = "launcher/terminal.rs"]
mod terminal;

use std::collections::BTreeSet;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burnrun::{self as launch, Launcher, Tty};
use launched::{Launched, alive, burnrun, ignored, sh};
use rustix::process::Signal;

#[test]
fn each_rank_gets_torchruns_environment() {
    let names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR \
                 TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS";
    let script =
        format!("for n in {names}; do eval echo $n=\\$$n; done; echo run=$TORCHELASTIC_RUN_ID:$MASTER_PORT");
    // What a foreign launcher left in the environment does not get through.
    let mut command = sh(&["-n", "2"], &script);
    command.env("RANK", "7").env("WORLD_SIZE", "nine").env("TORCHELASTIC_RUN_ID", "old");
    let ended = Launched::start(command).wait(10);
    ended.expect_code(0);
    for (rank, line) in [(0, "RANK=0"), (1, "RANK=1"), (1, "LOCAL_RANK=1"), (0, "WORLD_SIZE=2")] {
        assert!(ended.has_line(&format!("[rank {rank}] {line}")), "{line}\n{ended}");
    }
    for line in ["LOCAL_WORLD_SIZE=2", "GROUP_RANK=0", "GROUP_WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1"] {
        assert!(ended.has_line(&format!("[rank 0] {line}")), "{line}\n{ended}");
    }
    assert!(ended.has_line("[rank 0] TORCHELASTIC_RESTART_COUNT=0"));
    assert!(ended.has_line("[rank 0] TORCHELASTIC_MAX_RESTARTS=0"));
    let runs: BTreeSet<&str> =
        ended.out.lines().filter_map(|line| line.split_once("run=")).map(|l| l.1).collect();
    assert_eq!(runs.len(), 1, "all ranks see one run and one port\n{ended}");
    assert!(!runs.iter().any(|run| run.starts_with("old:") || run.ends_with(':')), "{ended}");
    assert_eq!(ended.err.lines().count(), 1, "a run that goes well says one line\n{ended}");
}

#[test]
fn the_second_node_counts_on() {
    let flags = ["--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--master-addr=far", "--rdzv-id=j"];
    let script =
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT $TORCHELASTIC_RUN_ID";
    let ended = Launched::start(sh(&flags, script)).wait(10);
    ended.expect_code(0);
    assert!(ended.out.contains(":rank 2] 2 0 4 1 far 29500 j"), "{ended}");
    assert!(ended.out.contains(":rank 3] 3 1 4 1 far 29500 j"), "{ended}");
}

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
fn the_exit_code_is_that_of_the_first_failure() {
    for (script, code, words) in [
        ("exit $((RANK * 7))", 7, "rank 1 (pid "),
        ("[ $RANK = 1 ] || kill -9 $$; sleep 1; exit 5", 137, "was killed by signal 9 (SIGKILL)"),
        ("[ $RANK = 1 ] && exit 3; sleep 600", 3, "rank 1 (pid "),
        ("exit 0", 0, ""),
    ] {
        let begin = Instant::now();
        let ended = Launched::start(sh(&["-n", "2", "--grace", "1"], script)).wait(10);
        ended.expect_code(code);
        assert!(ended.err.contains(words), "{script}\n{ended}");
        assert!(begin.elapsed() < Duration::from_secs(8), "{script}: {:?}", begin.elapsed());
    }
}

/// Runs itself three times over: as the test, as the program that launches itself, and as its ranks.
#[test]
fn a_program_launches_itself() {
    if launch::is_child() {
        let rank: i32 = std::env::var("RANK").unwrap().parse().unwrap();
        eprintln!("child {rank}");
        std::process::exit(rank * 3);
    }
    if std::env::var_os("LAUNCH_YOURSELF").is_some() {
        let launcher = Launcher::new(2).args(std::env::args_os().skip(1)).tty_rank0(Tty::Never);
        let error = launcher.run().expect_err("rank 1 fails");
        eprintln!("{error}");
        std::process::exit(error.exit_code());
    }
    let mut command = launched::command(std::env::current_exe().unwrap().to_str().unwrap());
    command.args(["a_program_launches_itself", "--exact", "--nocapture"]).env("LAUNCH_YOURSELF", "1");
    let ended = Launched::start(command).wait(10);
    ended.expect_code(3);
    assert!(ended.err.contains("[rank 0] child 0\n"), "{ended}");
    let (_, last_words) = ended.err.split_once("\nrank 1 (pid ").expect("last words");
    assert!(
        last_words.contains("exited with code 3 on host ") && last_words.contains("\n[rank 1] child 1\n"),
        "{ended}"
    );
}

#[test]
fn a_rank_that_ends_well_early_is_no_failure() {
    let ended = Launched::start(sh(&["-n", "2"], "[ $RANK = 0 ] || { sleep 1; echo late; }")).wait(10);
    ended.expect_code(0);
    assert!(ended.has_line("[rank 1] late"), "{ended}");
}

#[test]
fn survivors_report_before_they_are_ended() {
    let script = "trap 'echo terminated; exit 1' TERM
        [ $RANK = 1 ] && { echo boom-17 >&2; exit 3; }
        [ $RANK = 2 ] && { sleep 1; echo peer 1 lost; exit 9; }
        i=0; while [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done";
    let begin = Instant::now();
    let ended = Launched::start(sh(&["-n", "3"], script)).wait(15);
    ended.expect_code(3);
    assert!(ended.has_line("[rank 2] peer 1 lost"), "{ended}");
    assert!(ended.has_line("[rank 0] terminated"), "{ended}");
    assert!(begin.elapsed() >= Duration::from_secs(3), "rank 0 had {:?}", begin.elapsed());
    assert!(ended.err.contains("exited with code 9, after rank 1"), "{ended}");
    let last: Vec<&str> = ended.err.lines().rev().take(3).collect();
    assert_eq!(last[0], "also failed: rank 2 (exit code 9): peer 1 lost", "rank 0 only obeyed\n{ended}");
    assert_eq!(last[1], "[rank 1] boom-17", "{ended}");
    assert!(last[2].contains("rank 1 (pid ") && last[2].contains("exited with code 3 on host "), "{ended}");
}

#[test]
fn the_cause_is_among_the_last_words_even_if_a_victim_left_first() {
    let script = "[ $RANK = 0 ] && { echo peer 1 lost >&2; exit 8; }
        sleep 0.3; echo out of memory >&2; echo bye; exit 5";
    let ended = Launched::start(sh(&["-n", "2"], script)).wait(10);
    ended.expect_code(8);
    let (_, last_words) = ended.err.split_once("\nburnrun: rank 0 (pid ").expect("last words");
    let last_words = last_words.split_once("\nburnrun: rank 0 (pid ").map_or(last_words, |words| words.1);
    assert!(last_words.contains("\n[rank 0] peer 1 lost\n"), "{ended}");
    assert!(last_words.ends_with("\nalso failed: rank 1 (exit code 5): out of memory\n"), "{ended}");
}

/// A peer may notice the death of a rank, report it and leave before the launcher can see that death.
#[test]
fn a_rank_that_was_killed_is_the_cause_even_if_a_victim_left_first() {
    let script = "[ $RANK = 0 ] && { echo peer 1 lost >&2; exit 8; }
        sleep 0.3; kill -KILL $$";
    let ended = Launched::start(sh(&["-n", "2"], script)).wait(10);
    ended.expect_code(137);
    assert!(ended.err.contains("was killed by signal 9 (SIGKILL), after rank 0"), "{ended}");
    assert!(ended.err.ends_with("\nalso failed: rank 0 (exit code 8): peer 1 lost\n"), "{ended}");
    // A victim may end by a signal too: it has chosen to, or it took its time.
    for end in ["sleep 0.3; kill -ABRT $$", "sleep 2; kill -KILL $$"] {
        let script = format!("[ $RANK = 0 ] && {{ echo why >&2; exit 8; }}\n{end}");
        Launched::start(sh(&["-n", "2"], &script)).wait(10).expect_code(8);
    }
}

#[test]
fn kill_9_of_the_launcher_leaves_nothing() {
    // Rank 0 is the program itself, rank 1 a wrapper that waits for one.
    let script = "if [ $RANK = 0 ]; then echo $$; exec sleep 600; fi; sleep 600 & echo $$; echo $!; wait";
    let mut launched = Launched::start(sh(&["-n", "2"], script));
    let pids = launched.pids(3);
    launched.signal(Signal::KILL);
    launched.wait(5);
    launched.until(5, || !pids.iter().any(|pid| alive(*pid)), "the ranks outlive the launcher");
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_and_named() {
    let script =
        "[ $RANK = 1 ] && { sleep 0.2; exit 4; }; trap '' TERM; echo $$; while :; do sleep 0.1; done";
    let mut launched = Launched::start(sh(&["-n", "2"], script));
    let pids = launched.pids(1);
    let begin = Instant::now();
    let ended = launched.wait(12);
    ended.expect_code(4);
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    assert!(
        ended.err.contains(&format!("rank 0 (pid {}) did not end when asked to: SIGKILL", pids[0])),
        "{ended}"
    );
    assert!(!alive(pids[0]));
}

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
fn signals_that_a_parent_blocked_are_heard() {
    let block = "--block-signal=TERM,CHLD,INT,HUP";
    if !Command::new("env").args([block, "true"]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this env has no --block-signal");
        return;
    }
    let deaf = |script: &str| {
        let mut command = launched::command("env");
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
    let mut command = launched::command("sh");
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

#[test]
fn what_a_rank_leaves_behind_is_ended() {
    for (script, code) in
        [("sleep 600 & echo $!", 0), ("sleep 600 & echo $!; [ $RANK = 0 ] || exit 6; sleep 1", 6)]
    {
        let mut launched = Launched::start(sh(&["-n", "2"], script));
        let pids = launched.pids(2);
        let ended = launched.wait(10);
        ended.expect_code(code);
        launched.until(2, || !pids.iter().any(|pid| alive(*pid)), "a grandchild is left");
    }
}

#[test]
fn a_process_that_left_its_group_does_not_hold_the_launcher() {
    for program in ["sleep 600", "sh -c 'while echo y; do :; done'"] {
        let script = format!("setsid {program} & echo $!; sleep 0.3; exit 0");
        let mut launched = Launched::start(sh(&["-n", "1"], &script));
        let pids = launched.pids(1);
        let ended = launched.wait(8);
        ended.expect_code(0);
        launched::kill(pids[0], Signal::KILL);
    }
}

#[test]
fn launchers_side_by_side_use_ports_of_their_own() {
    let script = "sleep 0.3; echo port=$MASTER_PORT";
    let launches: Vec<_> = (0..4).map(|_| Launched::start(sh(&["-n", "2"], script))).collect();
    let mut ports = BTreeSet::new();
    for mut launched in launches {
        let ended = launched.wait(10);
        ended.expect_code(0);
        let port = ended.out.lines().find_map(|line| line.split_once("port=")).expect("a port").1.to_string();
        assert!(ended.err.contains(&format!("store 127.0.0.1:{port}")), "{ended}");
        ports.insert(port);
    }
    assert_eq!(ports.len(), 4);
}

#[test]
fn a_port_in_use_starts_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let mut by_flag = sh(&["-n", "2", "--master-port", &port], "echo started");
    by_flag.env_remove("MASTER_PORT");
    let mut by_environment = sh(&["-n", "2"], "echo started");
    by_environment.env("MASTER_PORT", &port);
    for command in [by_flag, by_environment] {
        let ended = Launched::start(command).wait(5);
        ended.expect_code(1);
        assert!(ended.err.contains("in use") && ended.err.contains(&format!("127.0.0.1:{port}")), "{ended}");
        assert_eq!((ended.out.as_str(), ended.err.lines().count()), ("", 1), "{ended}");
    }
}

#[test]
fn an_ipv6_address_may_have_brackets() {
    let flags = ["-n", "1", "--nnodes", "2", "--node-rank", "1", "--master-addr", "[fd77::1]"];
    let ended = Launched::start(sh(&flags, "echo at $MASTER_ADDR")).wait(5);
    ended.expect_code(0);
    assert!(ended.err.contains("store [fd77::1]:29500"), "{ended}");
    assert!(ended.out.contains("] at fd77::1\n"), "{ended}");
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
fn the_failed_rank_is_quoted_even_if_filtered() {
    let script = "i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done
        [ $RANK = 2 ] && { sleep 0.3; echo E-42 >&2; exit 1; }; sleep 1";
    let ended = Launched::start(sh(&["-n", "3", "--local-ranks-filter", "0"], script)).wait(10);
    ended.expect_code(1);
    assert!(!ended.out.contains("[rank 2]"), "{ended}");
    let last: Vec<&str> = ended.err.lines().rev().take(21).collect();
    assert_eq!(last[0], "[rank 2] E-42", "{ended}");
    assert_eq!(last[19], "[rank 2] line 81", "{ended}");
    assert!(last[20].ends_with("its last 20 lines:"), "{ended}");
}

#[test]
fn cores_are_shared_out_and_the_users_choice_is_kept() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let script = "echo $RAYON_NUM_THREADS $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS $MATMUL_NUM_THREADS";
    let ended = Launched::start(sh(&["-n", "2"], script)).wait(10);
    let share = (cores / 2).max(1);
    assert!(ended.has_line(&format!("[rank 1] {share} {share} {share} {share}")), "{ended}");
    assert_eq!(ended.err.matches(&format!("RAYON_NUM_THREADS={share} each")).count(), 1, "{ended}");
    let mut command = sh(&["-n", "2"], script);
    command.env("RAYON_NUM_THREADS", "13");
    let ended = Launched::start(command).wait(10);
    assert!(ended.has_line(&format!("[rank 0] 13 {share} {share} {share}")), "{ended}");
}

#[test]
fn a_reader_that_leaves_does_not_end_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; echo x > \"$DONE/$RANK\"";
    let mut command = sh(&["-n", "2"], script);
    command.env("DONE", directory.path()).stdout(Stdio::piped());
    let mut launched = Launched::start_as_is(command);
    drop(launched.process.stdout.take());
    let ended = launched.wait(10);
    ended.expect_code(0);
    assert!(ended.err.contains("standard output is closed"), "{ended}");
    assert!(!ended.err.contains("panicked"), "{ended}");
    assert!(directory.path().join("0").exists() && directory.path().join("1").exists());
}

#[test]
fn a_console_that_nobody_reads_does_not_stop_supervision() {
    let script = "[ $RANK = 1 ] && { sleep 0.3; exit 3; }; echo $$ > \"$DIR/pid\"; exec yes";
    let directory = tempfile::tempdir().unwrap();
    let mut command = sh(&["-n", "2"], script);
    command.env("DIR", directory.path()).stdout(Stdio::piped());
    let mut launched = Launched::start_as_is(command);
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
    let mut launched = Launched::start_as_is(command);
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
fn last_words_that_nobody_reads_do_not_hold_the_launcher() {
    let (unread, writer) = std::io::pipe().unwrap();
    let mut command = sh(&["-n", "1"], "yes >&2");
    command.stderr(writer);
    let mut launched = Launched::start_unheard(command);
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

#[test]
fn what_cannot_be_started_is_one_line_and_a_shells_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    std::fs::write(&plain, "not a program").unwrap();
    for (program, code) in
        [("no-such-program", 127), ("./no/such/program", 127), (plain.to_str().unwrap(), 126)]
    {
        let ended = Launched::start(burnrun(&["-n", "2", program])).wait(5);
        ended.expect_code(code);
        assert_eq!(ended.err.lines().count(), 2, "the notice and the error\n{ended}");
        assert!(ended.err.contains(program) && !ended.err.contains("panicked"), "{ended}");
    }
}

#[test]
fn wrong_usage_is_exit_code_2_and_starts_nothing() {
    for (flags, words) in [
        (&["--nproc-per-node", "0"][..], "at least one process"),
        (&["--nproc-per-node", "two"], "expected a number"),
        (&["--nproc-per-node", "18446744073709551615"], "18446744073709551615"),
        (&["--nproc-per-node", "32769"], "32769"),
        (&["--nnodes", "9223372036854775808", "-n", "2"], "--nnodes 9223372036854775808"),
        (&["--grace", "1e19"], "--grace 10000000000000000000"),
        (&["--signal-grace", "1e19"], "--signal-grace 10000000000000000000"),
        (&["--nnodes", "1:2"], "not supported yet"),
        (&["--nnodes", "2"], "--master-addr"),
        (&["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "--node-rank 2"),
        (&["--max-restarts", "1"], "--max-restarts 1"),
        (&["--rdzv-endpoint", "h:1"], "--rdzv-endpoint h:1"),
        (&["--local-ranks-filter", "5"], "--local-ranks-filter"),
        (&["--tty-rank0"], "not a terminal"),
        (&["--no-such-flag"], "--no-such-flag"),
    ] {
        let ended = Launched::start(sh(flags, "echo started")).wait(5);
        ended.expect_code(2);
        assert!(ended.err.contains(words), "{flags:?}\n{ended}");
        assert!(!ended.out.contains("started"), "{flags:?}\n{ended}");
    }
}

#[test]
fn torchruns_environment_variables_are_flags() {
    let mut command = sh(&[], "echo $WORLD_SIZE");
    command.env("PET_NPROC_PER_NODE", "3").env("PET_STANDALONE", "1");
    let ended = Launched::start(command).wait(5);
    ended.expect_code(0);
    assert!(ended.has_line("[rank 2] 3"), "{ended}");
}
