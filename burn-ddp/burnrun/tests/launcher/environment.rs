//! The environment of the ranks, and the store's address in it.

use std::collections::BTreeSet;

use crate::launched::{Launched, sh};

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
fn an_ipv6_address_may_have_brackets() {
    let flags = ["-n", "1", "--nnodes", "2", "--node-rank", "1", "--master-addr", "[fd77::1]"];
    let ended = Launched::start(sh(&flags, "echo at $MASTER_ADDR")).wait(5);
    ended.expect_code(0);
    assert!(ended.err.contains("store [fd77::1]:29500"), "{ended}");
    assert!(ended.out.contains("] at fd77::1\n"), "{ended}");
}
