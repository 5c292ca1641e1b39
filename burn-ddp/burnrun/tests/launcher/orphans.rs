//! Processes that outlive their rank or the launcher.

use rustix::process::Signal;

use crate::launched::{Launched, alive, kill, sh};

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
fn processes_that_a_rank_leaves_behind_are_ended() {
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
        kill(pids[0], Signal::KILL);
    }
}
