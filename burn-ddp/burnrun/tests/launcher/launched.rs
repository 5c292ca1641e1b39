//! A started `burnrun`, its output so far, and waits with deadlines.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A command with a known environment, independent of that of the tests.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env_clear().stdin(Stdio::null());
    for name in ["PATH", "HOME", "TMPDIR"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    command
}

/// `burnrun` with these arguments.
pub fn burnrun(args: &[&str]) -> Command {
    let mut command = command(env!("CARGO_BIN_EXE_burnrun"));
    command.args(args);
    command
}

/// `burnrun` with these flags and a shell script as every rank.
pub fn sh(flags: &[&str], script: &str) -> Command {
    let mut command = burnrun(flags);
    command.args(["sh", "-c", script]);
    command
}

/// A running launcher. Dropping it kills it, and its ranks with it.
pub struct Launched {
    pub process: Child,
    out: File,
    err: File,
}

impl Launched {
    /// Starts `command` with standard output and error in files of their own.
    pub fn start(mut command: Command) -> Self {
        let out = tempfile::tempfile().unwrap();
        command.stdout(out.try_clone().unwrap());
        let mut launched = Self::start_with_stdout_of_command(command);
        launched.out = out;
        launched
    }

    /// The same with both in one file.
    pub fn start_joined(mut command: Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("both");
        let open = || File::options().create(true).append(true).read(true).open(&path).unwrap();
        command.stdout(open()).stderr(open());
        let process = command.spawn().unwrap();
        Self { process, out: open(), err: tempfile::tempfile().unwrap() }
    }

    /// The same with the standard output that `command` has.
    pub fn start_with_stdout_of_command(mut command: Command) -> Self {
        let err = tempfile::tempfile().unwrap();
        command.stderr(err.try_clone().unwrap());
        let process = command.spawn().unwrap();
        Self { process, out: tempfile::tempfile().unwrap(), err }
    }

    /// The same with the standard output and error that `command` has.
    pub fn start_with_streams_of_command(mut command: Command) -> Self {
        let process = command.spawn().unwrap();
        Self { process, out: tempfile::tempfile().unwrap(), err: tempfile::tempfile().unwrap() }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Waits until `count` lines of the ranks are numbers, and returns them.
    pub fn pids(&self, count: usize) -> Vec<i32> {
        let found = || -> Vec<i32> {
            let out = text(&self.out);
            let whole = out.rsplit_once('\n').map_or("", |(whole, _)| whole);
            whole.lines().filter_map(|line| line.split_once("] ")?.1.parse().ok()).collect()
        };
        self.until(10, || found().len() >= count, "the ranks do not start");
        found()
    }

    pub fn until_out(&self, seconds: u64, words: &str) {
        self.until(seconds, || text(&self.out).contains(words), words);
    }

    pub fn until_err(&self, seconds: u64, words: &str) {
        self.until(seconds, || text(&self.err).contains(words), words);
    }

    pub fn until(&self, seconds: u64, condition: impl Fn() -> bool, otherwise: &str) {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while !condition() {
            let late = Instant::now() > deadline;
            assert!(!late, "{otherwise}, after {seconds} s\n{}\n{}", text(&self.out), text(&self.err));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn wait(&mut self, seconds: u64) -> Ended {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return Ended { code: status.code(), out: text(&self.out), err: text(&self.err) };
            }
            let late = Instant::now() > deadline;
            assert!(!late, "still there after {seconds} s\n{}\n{}", text(&self.out), text(&self.err));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Exit code and output of an ended launcher.
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    pub fn expect_code(&self, code: i32) {
        assert_eq!(self.code, Some(code), "\n{self}");
    }

    pub fn has_line(&self, line: &str) -> bool {
        self.out.lines().any(|found| found == line)
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "standard output:\n{}\nstandard error:\n{}", self.out, self.err)
    }
}

/// The whole file, read through a descriptor with a position of its own.
fn text(file: &File) -> String {
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
    let mut copy = File::open(path).unwrap();
    copy.rewind().unwrap();
    let mut bytes = Vec::new();
    copy.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns true if the process exists and is not only waiting to be reaped.
pub fn alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub fn kill(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

/// Returns true if this process, and so every process that it starts, ignores `signal`.
pub fn ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0) & (1 << (signal.as_raw() - 1)) != 0
}
