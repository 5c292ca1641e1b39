//! Runs this program again, in an environment of the test's choice.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burn_ddp_nccl::library::Library;

use super::real;

/// Environment variable with the file to which the child writes its answer.
const ANSWER: &str = "BURN_DDP_TEST_ANSWER";
const LIMIT: Duration = Duration::from_secs(25);

/// Runs the ignored test `name` in a process of its own, with `environment` and nothing else that the search reads;
/// returns what it answered.
fn run(name: &str, environment: &[(&str, &Path)]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let [answer, output] = ["answer", "output"].map(|name| folder.path().join(name));
    let stdio = || File::options().create(true).append(true).open(&output).map(Stdio::from).expect("a file");
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    for name in ["BURN_DDP_NCCL_LIB", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        command.env_remove(name);
    }
    let mut child = command
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(ANSWER, &answer)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(stdio())
        .stderr(stdio())
        .spawn()
        .expect("a child");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let end = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{name} did not end in time:\n{}", read(&output));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(status.success(), "{name}, {status}:\n{}", read(&output));
    read(&answer)
}

fn answer(text: String) {
    let file = std::env::var_os(ANSWER).expect("a parent that waits for the answer");
    std::fs::write(file, text).expect("the answer");
}

/// The outcome of `Library::load` in `environment`: path and version, or exit code and text of the error.
pub fn load(environment: &[(&str, &Path)]) -> Result<(String, String), (i32, String)> {
    let text = run("library::child::load_process", environment);
    let (kind, rest) = text.split_once('\n').expect("an answer");
    let (head, tail) = rest.split_once('\n').expect("two values");
    match kind {
        "loaded" => Ok((head.into(), tail.into())),
        _ => Err((head.parse().expect("a code"), tail.into())),
    }
}

#[test]
#[ignore = "run by the other tests"]
fn load_process() {
    answer(match Library::load() {
        Ok(library) => format!("loaded\n{}\n{}", library.path().display(), library.version()),
        Err(error) => format!("error\n{}\n{error}", error.exit_code()),
    });
}

/// Checks the real library at `file` where no device is visible.
pub fn init_without_device(file: &Path) {
    let environment = [("BURN_DDP_NCCL_LIB", file), ("CUDA_VISIBLE_DEVICES", "".as_ref())];
    assert_eq!(run("library::child::init_process", &environment), "checked");
}

#[test]
#[ignore = "run by the other tests"]
fn init_process() {
    real::init(&Library::load().expect("the library"));
    answer("checked".into());
}
