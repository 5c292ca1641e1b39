//! Flags, programs that cannot start, and the library call.

use std::net::TcpListener;

use burnrun::{self as launch, Launcher, Tty};

use crate::launched::{Launched, burnrun, command, sh};

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

#[test]
fn a_program_that_cannot_start_is_one_line_and_a_shells_exit_code() {
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
    let mut command = command(std::env::current_exe().unwrap().to_str().unwrap());
    command.args(["usage::a_program_launches_itself", "--exact", "--nocapture"]).env("LAUNCH_YOURSELF", "1");
    let ended = Launched::start(command).wait(10);
    ended.expect_code(3);
    assert!(ended.err.contains("[rank 0] child 0\n"), "{ended}");
    let (_, last_words) = ended.err.split_once("\nrank 1 (pid ").expect("last words");
    assert!(
        last_words.contains("exited with code 3 on host ") && last_words.contains("\n[rank 1] child 1\n"),
        "{ended}"
    );
}
