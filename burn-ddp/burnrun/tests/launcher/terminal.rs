//! `--tty-rank0` on a pseudo-terminal, which `setsid --ctty` makes the controlling one.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, tcgetattr};

use burnrun::{self as launch, Launcher, Tty};

use crate::launched;

/// A program on a terminal of its own.
struct Session {
    process: Child,
    keyboard: File,
    screen: Arc<Mutex<Vec<u8>>>,
    terminal: File,
    before: Termios,
}

impl Session {
    /// Runs `script` in a shell on a new terminal. Returns `None`, with a message, on systems without `setsid`.
    fn start(script: &str) -> Option<Self> {
        if !Command::new("setsid").arg("--version").output().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no setsid (util-linux) to give a terminal to a process");
            return None;
        }
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal =
            rustix::fs::open(ptsname(&keyboard, Vec::new()).unwrap(), flags, Mode::empty()).unwrap();
        let terminal = File::from(terminal);
        let before = tcgetattr(&terminal).unwrap();
        let stdio = || Stdio::from(terminal.try_clone().unwrap());
        let process = launched::command("setsid")
            .args(["--ctty", "sh", "-c", script, env!("CARGO_BIN_EXE_burnrun")])
            .env("TERM", "dumb")
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .unwrap();
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

    fn type_in(&mut self, keys: &[u8]) {
        self.keyboard.write_all(keys).unwrap();
    }

    fn until(&self, words: &str) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.screen().contains(words) {
            assert!(Instant::now() < deadline, "no {words:?} on the screen:\n{}", self.screen());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn modes_are_back(&self) {
        let after = tcgetattr(&self.terminal).unwrap();
        assert_eq!(after.local_modes, self.before.local_modes);
        assert_eq!(after.input_modes, self.before.input_modes);
        assert_eq!(after.output_modes, self.before.output_modes);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A script that runs the launcher as `$0`, then prints its exit code and if the shell has the foreground again.
fn then_tell(launch: &str) -> String {
    format!(
        "{launch}; echo code=$?; set -- $(cut -d' ' -f5,8 /proc/self/stat); \
         [ $1 = $2 ] && echo 'foreground back'; echo over"
    )
}

#[test]
fn rank_0_has_the_terminal_and_the_others_have_files() {
    let directory = tempfile::tempdir().unwrap();
    let launch = format!(
        "\"$0\" -n 2 --tty-rank0 --log-dir {} --run-id j sh -c '
            [ $RANK = 1 ] && {{ echo from 1; exit 0; }}
            test -t 0 && test -t 1 && test -t 2 && echo terminal
            set -- $(cut -d\" \" -f5,8 /proc/self/stat); [ $1 = $2 ] && echo in front
            read line; echo read:$line'",
        directory.path().display()
    );
    let Some(mut session) = Session::start(&then_tell(&launch)) else { return };
    session.until("in front");
    session.type_in(b"hello\n");
    session.until("over");
    let screen = session.screen();
    for words in
        ["\r\nterminal\r\n", "read:hello", "code=0", "foreground back", "output of the other ranks goes to"]
    {
        assert!(screen.contains(words), "{words:?}\n{screen}");
    }
    assert!(!screen.contains("[rank"), "{screen}");
    let file = directory.path().join("j/attempt_0/1/stdout.log");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "from 1\n");
}

#[test]
fn the_terminal_is_restored_when_rank_0_is_killed() {
    let launch =
        "\"$0\" -n 1 --tty-rank0 sh -c 'stty raw -echo; printf \"\\033[?1049h\\033[?25l\"; kill -9 $$'";
    let Some(session) = Session::start(&then_tell(launch)) else { return };
    session.until("over");
    session.modes_are_back();
    let screen = session.screen();
    for words in
        ["\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h", "code=137", "foreground back", "its output is above"]
    {
        assert!(screen.contains(words), "{words:?}\n{screen}");
    }
}

#[test]
fn a_killed_rank_0_that_changed_nothing_leaves_the_screen_alone() {
    for script in ["kill -9 $$", "stty -echo; exit 3"] {
        let launch = format!("\"$0\" -n 1 --tty-rank0 sh -c '{script}'");
        let Some(session) = Session::start(&then_tell(&launch)) else { return };
        session.until("over");
        session.modes_are_back();
        let screen = session.screen();
        assert!(!screen.contains("\x1b[?1049l") && screen.contains("\x1b[?25h"), "{script}\n{screen}");
    }
}

#[test]
fn another_ranks_failure_is_quoted_after_the_terminal_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let launch = format!(
        "\"$0\" -n 2 --tty-rank0 --log-dir {} sh -c '[ $RANK = 1 ] && {{ echo E-77; exit 5; }}; stty -echo; sleep 600'",
        directory.path().display()
    );
    let Some(session) = Session::start(&then_tell(&launch)) else { return };
    session.until("over");
    session.modes_are_back();
    let screen = session.screen();
    assert!(screen.contains("code=5") && screen.contains("foreground back"), "{screen}");
    assert!(screen.find("\x1b[?1049l") < screen.find("its last line:\r\n[rank 1] E-77"), "{screen}");
}

#[test]
fn keys_reach_the_launch() {
    let directory = tempfile::tempdir().unwrap();
    let launch = format!(
        "trap '' INT; \"$0\" -n 2 --tty-rank0 --log-dir {} sh -c 'echo up $RANK; while :; do sleep 0.1; done'",
        directory.path().display()
    );
    // Ctrl-Z would freeze a terminal that nobody else reads; it is undone. Ctrl-C ends all.
    let launch = launch.replace("trap '' INT; ", "");
    let script = then_tell(&format!("trap : INT; {launch}"));
    let Some(mut session) = Session::start(&script) else { return };
    session.until("up 0");
    session.type_in(b"\x1a");
    session.type_in(b"\x03");
    session.until("over");
    assert!(session.screen().contains("code=130"), "{}", session.screen());
}

/// Runs itself as the program that launches itself from a terminal, and as its ranks.
#[test]
fn a_self_launch_uses_the_terminal_and_leaves_no_files_behind() {
    if launch::is_child() {
        let rank: i32 = std::env::var("RANK").unwrap().parse().unwrap();
        eprintln!("rank {rank} terminal={}", std::io::IsTerminal::is_terminal(&std::io::stderr()));
        std::process::exit(rank * std::env::var("CODE").unwrap().parse::<i32>().unwrap());
    }
    if std::env::var_os("LAUNCH_YOURSELF").is_some() {
        let launcher = Launcher::new(2).args(std::env::args_os().skip(1)).tty_rank0(Tty::Auto);
        let outcome = launcher.run();
        eprintln!("outcome={outcome:?}");
        std::process::exit(outcome.map_or_else(|error| error.exit_code(), |()| 0));
    }
    let directory = tempfile::tempdir().unwrap();
    let temporary = directory.path().to_str().unwrap();
    let program = std::env::current_exe().unwrap();
    let name = "terminal::a_self_launch_uses_the_terminal_and_leaves_no_files_behind";
    for (tmp, code, words, kept) in [
        (temporary, 0, &["rank 0 terminal=true", "code=0"][..], 0),
        (temporary, 3, &["rank 0 terminal=true", "code=3", "output is kept in "], 1),
        (
            "/no/such/directory",
            3,
            &["[rank 0] rank 0 terminal=false", "instead of the terminal", "code=3"],
            1,
        ),
    ] {
        let launch = format!(
            "LAUNCH_YOURSELF=1 CODE={code} TMPDIR={tmp} {} {name} --exact --nocapture",
            program.display()
        );
        let Some(session) = Session::start(&then_tell(&launch)) else { return };
        session.until("over");
        let screen = session.screen();
        for words in words {
            assert!(screen.contains(words), "{words:?}\n{screen}");
        }
        assert_eq!(std::fs::read_dir(temporary).unwrap().count(), kept, "{screen}");
    }
}
