//! N processes as N ranks: the test binary runs itself again with the environment of a rank.
//!
//! Training needs processes, not threads, because Burn's autodiff may lose a gradient when two threads of one
//! process run `backward()` at once. A test launches a case by name; the ignored test `rank_process` is where
//! the children come in, finds the case in the table and runs it. Every launch has a deadline, after which the
//! children are killed and the test fails with what they had written.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use burn_ddp::Error;
use socket2::{Domain, Socket, Type};

/// A case: what one rank does; its text is handed to the test.
pub type Case = fn() -> Result<String, Error>;

/// Set in children: which case to run.
const CASE: &str = "BURN_DDP_TEST_CASE";
/// Set in a process that launches: how many ranks.
#[cfg(feature = "launcher")]
const PROCESSES: &str = "BURN_DDP_TEST_PROCESSES";
/// Set in children: where to write the case's text.
const RESULT: &str = "BURN_DDP_TEST_RESULT";

/// The argument a test gave to its case by [`Launch::argument`].
pub fn argument() -> String {
    std::env::var("BURN_DDP_TEST_ARGUMENT").unwrap_or_default()
}

/// Launches the ranks of [`Launch::under_burnrun`] and leaves the process as `burnrun` does.
#[cfg(feature = "launcher")]
pub fn launch_case() {
    let processes = std::env::var(PROCESSES).expect("only a launch starts this");
    let outcome = burn_ddp::launch::Launcher::new(processes.parse().expect("a number"))
        .args(["--exact", "rank_process", "--ignored", "--nocapture", "--quiet"])
        .run();
    let Err(error) = outcome else { std::process::exit(0) };
    eprintln!("burnrun: {error}");
    std::process::exit(error.exit_code());
}

/// Runs the case that the environment names and leaves the process.
pub fn run_case(cases: &[(&str, Case)]) {
    let name = std::env::var(CASE).expect("only a launch starts this");
    let (_, case) = cases.iter().find(|(known, _)| *known == name).expect("a case of the table");
    match case() {
        Ok(text) => {
            std::fs::write(std::env::var(RESULT).expect("set with the case"), text)
                .expect("a writable result");
            std::process::exit(0);
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(error.exit_code());
        }
    }
}

/// How ranks reach each other: shared memory, TCP, or shared memory within pairs of ranks that take themselves to be on
/// one host and TCP between the pairs.
pub const ROADS: [&str; 3] = ["shm", "tcp", "hosts"];

/// How to start a case on several ranks.
pub struct Launch {
    case: &'static str,
    world: usize,
    env: Vec<(String, String)>,
    without: Vec<&'static str>,
    limit: Duration,
}

impl Launch {
    pub fn new(case: &'static str, world: usize) -> Self {
        let env = vec![("RAYON_NUM_THREADS".into(), "1".into()), ("RUST_BACKTRACE".into(), "0".into())];
        Self { case, world, env, without: Vec::new(), limit: Duration::from_secs(60) }
    }

    pub fn env(mut self, name: &str, value: impl ToString) -> Self {
        self.env.push((name.into(), value.to_string()));
        self
    }

    /// Lets frames take one of [`ROADS`].
    pub fn over(self, road: &str) -> Self {
        match road {
            "hosts" => self.env("BURN_DDP_TRANSPORT", "shm").env("BURN_DDP_HOST", "host {pair}"),
            transport => self.env("BURN_DDP_TRANSPORT", transport),
        }
    }

    pub fn without(mut self, name: &'static str) -> Self {
        self.without.push(name);
        self
    }

    /// Gives the ranks so many seconds.
    pub fn limit(self, seconds: u64) -> Self {
        Self { limit: Duration::from_secs(seconds), ..self }
    }

    pub fn argument(self, value: impl ToString) -> Self {
        self.env("BURN_DDP_TEST_ARGUMENT", value)
    }

    pub fn start(self) -> Ranks {
        let folder = tempfile::tempdir().expect("a folder");
        let held = reserve_port();
        let port = held.local_addr().expect("an address").as_socket().expect("an IP address").port();
        let children = (0..self.world).map(|rank| self.spawn(rank, port, folder.path().into())).collect();
        Ranks { folder, children, end: Instant::now() + self.limit, case: self.case, _port: held }
    }

    /// Starts all ranks, waits, and returns what became of each.
    pub fn run(self) -> Vec<Outcome> {
        self.start().wait()
    }

    /// Like [`Launch::run`]; fails the test unless all ranks succeed. Returns their texts.
    pub fn succeed(self) -> Vec<String> {
        let outcomes = self.run();
        let bad = outcomes.iter().position(|outcome| !outcome.status.success());
        assert!(bad.is_none(), "ranks failed:\n{}", tell(&outcomes));
        outcomes.into_iter().map(|outcome| outcome.text).collect()
    }

    /// Runs the case under the launcher of the library, in a process of its own ([`launch_case`]), and returns its exit
    /// code and what it wrote.
    #[cfg(feature = "launcher")]
    pub fn under_burnrun(self) -> (Option<i32>, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("output");
        let output = || File::options().create(true).append(true).open(&path).expect("a file");
        let mut launcher = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "launcher_process", "--ignored", "--nocapture", "--quiet"])
            .env(PROCESSES, self.world.to_string())
            .env(CASE, self.case)
            .env(RESULT, folder.path().join("text"))
            .envs(self.env)
            .stdin(std::process::Stdio::null())
            .stdout(output())
            .stderr(output())
            .spawn()
            .expect("the launcher");
        let end = Instant::now() + self.limit;
        let read = || std::fs::read_to_string(&path).unwrap_or_default();
        loop {
            if let Some(status) = launcher.try_wait().expect("a child") {
                return (status.code(), read());
            }
            if Instant::now() > end {
                let _ = launcher.kill();
                let _ = launcher.wait();
                panic!("{} under the launcher did not end in time:\n{}", self.case, read());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn spawn(&self, rank: usize, port: u16, folder: PathBuf) -> Child {
        let file = |kind: &str| File::create(folder.join(format!("{rank}.{kind}"))).expect("a file");
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command
            .args(["--exact", "rank_process", "--ignored", "--nocapture", "--quiet"])
            .env(CASE, self.case)
            .env(RESULT, folder.join(format!("{rank}.text")))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", self.world.to_string())
            .env("LOCAL_WORLD_SIZE", self.world.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("BURN_DDP_RENDEZVOUS_TIMEOUT", "20")
            .envs(self.env.iter().map(|(name, value)| {
                let (rank, pair) = (rank.to_string(), (rank / 2).to_string());
                (name, value.replace("{rank}", &rank).replace("{pair}", &pair))
            }))
            .stdin(std::process::Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"));
        self.without.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.spawn().expect("a child")
    }
}

/// Ranks that were started.
pub struct Ranks {
    folder: tempfile::TempDir,
    children: Vec<Child>,
    end: Instant,
    case: &'static str,
    _port: Socket,
}

/// A socket that is bound but does not listen: no other process is given its port, and a socket that may reuse
/// addresses, as rank 0's store does, can still listen on it.
fn reserve_port() -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_reuse_address(true).expect("an option");
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port");
    socket
}

impl Ranks {
    /// A file that the case of `rank` may create to say how far it is; see [`mark`].
    pub fn wait_for_mark(&self, rank: usize, mark: &str) {
        let path = self.folder.path().join(format!("{rank}.text.{mark}"));
        while !path.exists() {
            assert!(Instant::now() < self.end, "rank {rank} never came to {mark}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn signal(&self, rank: usize, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.children[rank]);
        rustix::process::kill_process(pid, signal).expect("a living child");
    }

    /// The links to what `rank` has open.
    pub fn open_files(&self, rank: usize) -> Vec<PathBuf> {
        let folder = format!("/proc/{}/fd", self.children[rank].id());
        std::fs::read_dir(folder)
            .map_or(Vec::new(), |files| files.flatten().map(|file| file.path()).collect())
    }

    /// How long it takes from now until `rank` has ended.
    pub fn time_until_end_of(&mut self, rank: usize) -> Duration {
        let start = Instant::now();
        while self.children[rank].try_wait().expect("a child").is_none() {
            assert!(Instant::now() < self.end, "rank {rank} of {} does not end", self.case);
            std::thread::sleep(Duration::from_millis(2));
        }
        start.elapsed()
    }

    pub fn wait(mut self) -> Vec<Outcome> {
        let mut statuses: Vec<Option<ExitStatus>> = vec![None; self.children.len()];
        while statuses.iter().any(Option::is_none) {
            for (child, status) in self.children.iter_mut().zip(&mut statuses) {
                *status = status.or_else(|| child.try_wait().expect("a child"));
            }
            if Instant::now() > self.end {
                self.children.iter_mut().for_each(|child| {
                    let _ = child.kill();
                });
                panic!("{} did not end in time: {statuses:?}\n{}", self.case, self.errors());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let read = |rank: usize, kind: &str| {
            std::fs::read_to_string(self.folder.path().join(format!("{rank}.{kind}"))).unwrap_or_default()
        };
        let outcome = |(rank, status): (usize, Option<ExitStatus>)| Outcome {
            status: status.expect("ended"),
            text: read(rank, "text"),
            stderr: read(rank, "stderr"),
        };
        statuses.into_iter().enumerate().map(outcome).collect()
    }

    fn errors(&self) -> String {
        let files = (0..self.children.len()).map(|rank| self.folder.path().join(format!("{rank}.stderr")));
        files.map(|file| std::fs::read_to_string(file).unwrap_or_default()).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Called by a case: lets the test's [`Ranks::wait_for_mark`] go on.
pub fn mark(name: &str) {
    let path = std::env::var(RESULT).expect("set with the case");
    std::fs::write(format!("{path}.{name}"), "").expect("a writable mark");
}

/// What became of one rank.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub status: ExitStatus,
    pub text: String,
    pub stderr: String,
}

impl Outcome {
    /// Fails the test unless this rank failed and said all of `words`.
    pub fn failed_saying(&self, words: &[&str]) {
        assert!(!self.status.success(), "must fail: {self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is not in: {}", self.stderr);
        }
    }
}

/// All outcomes, for a failed test.
pub fn tell(outcomes: &[Outcome]) -> String {
    outcomes
        .iter()
        .map(|outcome| format!("{:?}: {}{}\n", outcome.status, outcome.stderr, outcome.text))
        .collect()
}
