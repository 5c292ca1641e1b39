//! The program on a terminal, with Burn's own screen.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

use super::{BATCH, Bench, PROGRAM};
use crate::process::{LIMIT, kill, ranks_of};

/// More epochs than any test waits for.
const ENDLESS: &str = "--epochs 1000000 --dropout 0";
/// From a wish to stop to the end of all processes.
const STOP: Duration = Duration::from_secs(10);

/// `fashion_mnist` on a terminal of its own.
struct Session {
    process: Child,
    keyboard: File,
    screen: Arc<Mutex<Vec<u8>>>,
    terminal: File,
    before: Termios,
}

impl Session {
    /// `None`, and a word about it, where no process can be given a terminal.
    fn start(bench: &Bench, args: &str) -> Option<Self> {
        if !Command::new("setsid").arg("--version").output().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no setsid (util-linux) to give a terminal to a process");
            return None;
        }
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        tcsetwinsize(&keyboard, Winsize { ws_row: 40, ws_col: 140, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal = File::from(rustix::fs::open(name, flags, Mode::empty()).unwrap());
        let before = tcgetattr(&terminal).unwrap();
        let stdio = || Stdio::from(terminal.try_clone().unwrap());
        let mut command = crate::process::command("setsid", "--ctty");
        command.arg(PROGRAM).args(format!("--batch-size {BATCH} {args}").split_whitespace());
        command.arg("--data").arg(bench.data()).arg("--artifacts").arg(bench.0.path().join("artifacts"));
        command.env("TERM", "xterm").stdin(stdio()).stdout(stdio()).stderr(stdio());
        let process = command.spawn().unwrap();
        let keyboard = File::from(keyboard);
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to) = (keyboard.try_clone().unwrap(), screen.clone());
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(length @ 1..) = from.read(&mut chunk) {
                to.lock().unwrap().extend_from_slice(&chunk[..length]);
            }
        });
        Some(Self { process, keyboard, screen, terminal, before })
    }

    fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    fn until(&self, words: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        while !self.screen().contains(words) {
            assert!(Instant::now() < deadline, "no {words:?} on the screen:\n{}", self.screen());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + STOP;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "not ended in {STOP:?}:\n{}", self.screen());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn terminal_is_back(&self) {
        self.until("\x1b[?1049l", STOP);
        let after = tcgetattr(&self.terminal).unwrap();
        assert_eq!(after.local_modes, self.before.local_modes);
        assert_eq!(after.input_modes, self.before.input_modes);
        assert_eq!(after.output_modes, self.before.output_modes);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The ranks end with their launcher.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn keys_on_rank_0s_screen_stop_all_ranks() {
    // `q` asks, `s` stops after the step, `k` panics.
    for (args, keys, code, words) in [
        ("", "qs", 0, "stopped before the end"),
        ("--nproc 2", "qs", 0, "stopped before the end"),
        ("--nproc 2", "qk", 1, "Killing training from user input"),
    ] {
        let bench = Bench::new();
        let Some(mut session) = Session::start(&bench, &format!("{ENDLESS} {args}")) else { return };
        session.until("\x1b[?1049h", LIMIT);
        session.until("Accuracy", LIMIT);
        let ranks = ranks_of(session.process.id());
        session.keyboard.write_all(keys.as_bytes()).unwrap();
        let status = session.end();
        assert_eq!(status.code(), Some(code), "{args} {keys}: {}", session.screen());
        session.until(words, STOP);
        session.terminal_is_back();
        assert_eq!(ranks.len(), if args.is_empty() { 0 } else { 2 });
        for (rank, id) in ranks {
            assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "rank {rank} is left");
        }
    }
}

#[test]
fn the_terminal_is_back_when_rank_0_is_killed() {
    let bench = Bench::new();
    let Some(mut session) = Session::start(&bench, &format!("{ENDLESS} --nproc 2")) else { return };
    session.until("Accuracy", LIMIT);
    let ranks = ranks_of(session.process.id());
    kill(ranks[0].1);
    assert_eq!(session.end().code(), Some(137), "{}", session.screen());
    session.terminal_is_back();
}
