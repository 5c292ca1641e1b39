//! Runs the built programs, each under a deadline.

use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Longest run of one program; a test that hangs ends with it.
pub const LIMIT: Duration = Duration::from_secs(120);

/// `program` with `args` (separated by blanks) in an environment without ranks and choices.
pub fn command(program: &str, args: &str) -> Command {
    let mut command = Command::new(program);
    command.args(args.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ranks = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    for name in ranks.into_iter().chain(["BURN_DDP_COMM"]) {
        command.env_remove(name);
    }
    command
}

/// Waits for the end of `child`, which is killed when `limit` has passed.
pub fn finish(child: Child, limit: Duration) -> Output {
    let id = child.id();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(limit) {
        Ok(output) => output.expect("the output can be read"),
        Err(_) => {
            kill(id);
            panic!("process {id} has not ended in {limit:?}");
        }
    }
}

/// Runs `command` to its end.
pub fn run(mut command: Command) -> Output {
    finish(command.spawn().expect("the program can be started"), LIMIT)
}

/// Sends SIGKILL to process `id`. A process that has ended already is no error.
pub fn kill(id: u32) {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).expect("a process id");
    let _ = kill_process(pid, Signal::KILL);
}

/// Standard output of a run that must have succeeded.
pub fn stdout(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

/// A refusal of wrong usage: exit code 2, nothing on standard output, one line that has all of `words`.
pub fn assert_refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(text.lines().count(), 1, "{text}");
    for word in words {
        assert!(text.contains(word), "{text} lacks {word}");
    }
}

/// The backend that was asked for is the one that is used, or the program ends in one line. `start` gives the program,
/// with arguments added, which trains within seconds.
pub fn assert_backends_are_chosen(start: impl Fn(&str) -> Command) {
    #[cfg(not(feature = "cuda"))]
    for nproc in ["", "--nproc 2 "] {
        let output = run(start(&format!("{nproc}--backend cuda")));
        assert_refused(&output, &["--backend cuda", "built without it", "--features cuda"]);
    }
    #[cfg(feature = "cuda")]
    {
        // With a driver or without: there is no device, and the program does not train on the CPU instead.
        let mut hidden = start("--backend cuda");
        hidden.env("CUDA_VISIBLE_DEVICES", "");
        assert_refused(&run(hidden), &["CUDA driver"]);
        // With BURN_DDP_COMM=nccl one error names everything that is missing.
        let mut both = start("--backend cuda");
        both.env("CUDA_VISIBLE_DEVICES", "")
            .env("BURN_DDP_COMM", "nccl")
            .env("BURN_DDP_NCCL_LIB", "/no/libnccl.so");
        assert_refused(&run(both), &["BURN_DDP_COMM=nccl", "CUDA driver", "/no/libnccl.so"]);
    }

    let with = |choice: &str| {
        let mut command = start("--backend flex");
        command.env("BURN_DDP_COMM", choice);
        run(command)
    };
    assert_refused(&with("nccl"), &["BURN_DDP_COMM=nccl", "flex", "BURN_DDP_COMM=host"]);
    assert_refused(&with("gloo"), &["BURN_DDP_COMM=gloo"]);
    for choice in ["auto", "host"] {
        let text = stdout(&with(choice));
        assert!(text.starts_with("flex on Cpu | "), "{text}");
    }
    let text = stdout(&run(start("--backend ndarray")));
    assert!(text.starts_with("ndarray on Cpu | "), "{text}");
}

/// The processes whose parent is `launcher` and whose rank is known.
pub fn ranks_of(launcher: u32) -> Vec<(usize, u32)> {
    let rank_of = |id: u32| {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
        status.lines().find(|line| *line == format!("PPid:\t{launcher}"))?;
        let environment = std::fs::read(format!("/proc/{id}/environ")).ok()?;
        let rank = environment.split(|byte| *byte == 0).find_map(|pair| pair.strip_prefix(b"RANK="))?;
        Some((std::str::from_utf8(rank).ok()?.parse().ok()?, id))
    };
    let ids = std::fs::read_dir("/proc").unwrap();
    let ids = ids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut ranks: Vec<_> = ids.filter_map(rank_of).collect();
    ranks.sort_unstable();
    ranks
}
