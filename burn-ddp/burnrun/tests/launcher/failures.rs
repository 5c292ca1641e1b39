//! Which failure the launcher reports, and the moment that other ranks have.

use std::time::{Duration, Instant};

use crate::launched::{Launched, alive, sh};

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
fn the_cause_is_in_the_error_even_if_a_peer_left_first() {
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
fn a_killed_rank_is_the_cause_even_if_a_peer_left_first() {
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
