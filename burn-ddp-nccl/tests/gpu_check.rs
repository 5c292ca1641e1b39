//! The verdicts of `gpu-check.sh` on programs that pass, fail, hang or are missing. The programs are stubs, and so is
//! the machine.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Passes only with a compiler, headers and NCCL where the programs look for them.
const CHECK: &str = r#"
[ -e "$CUDA_PATH/include/cuda_runtime.h" ] && [ -e "$BURN_DDP_NCCL_LIB" ] || exit 3
[ -e "${LD_LIBRARY_PATH%%:*}/libnvrtc.so" ] || exit 4
[ -z "${WORLD_SIZE:-}" ] || exit 5
# Under a launcher a line begins with its rank.
prefix=; [ "${2:-}" = --nproc ] && prefix="[rank 0] "
echo "${prefix}PASS $1: 1"
"#;

/// Steps of 100 ms, of `nccl_ms` by NCCL and of 300 by the host; the first ten are slower.
fn gpt(nccl_ms: &str) -> String {
    format!(
        r#"
while [ $# -gt 1 ]; do
  case $1 in --log-json) file=$2 ;; --steps) steps=$2 ;; esac
  shift
done
ms=100
case "${{BURN_DDP_CONNECT_ALONE:-}}${{BURN_DDP_COMM:-}}" in 1nccl) ms={nccl_ms} ;; 1host) ms=300 ;; esac
for step in $(seq 1 "$steps"); do
  time=$ms
  [ "$step" -gt 10 ] || time=9999
  echo "{{\"step\":$step,\"loss\":$step.5,\"norm\":1.0,\"lr\":0.1,\"dt_ms\":$time.0,\"world_size\":1}}"
done >"$file"
echo trained
"#
    )
}

/// A machine with a folder of programs.
struct Machine(TempDir);

impl Machine {
    fn with(gpus: usize, programs: &[(&str, &str)]) -> Self {
        let this = Self(tempfile::tempdir().expect("a folder"));
        let list: String = (0..gpus).map(|i| format!("echo 'GPU {i}: A fake (UUID: GPU-{i})'\n")).collect();
        this.script("machine/nvidia-smi", &format!("[ \"$1\" = -L ] || exit 0\n{list}"));
        let site = this.path("site");
        this.script("machine/python3", &format!("echo {site}"));
        this.script("machine/ldconfig", "");
        for file in ["nccl/lib/libnccl.so.2", "cu13/lib/libnvrtc.so.13", "cu13/include/cuda_runtime.h"] {
            this.file(&format!("site/nvidia/{file}"), "");
        }
        for (name, text) in programs {
            this.script(&format!("programs/{name}"), text);
        }
        this
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn file(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    fn script(&self, name: &str, text: &str) {
        self.file(name, &format!("#!/bin/sh\n{text}"));
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).expect("permissions");
    }

    fn check(&self) -> Checked {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu-check.sh");
        let path = std::env::var("PATH").expect("PATH");
        let output = Command::new("bash")
            .arg(script)
            .arg(self.path("programs"))
            .env("PATH", format!("{}:{path}", self.path("machine")))
            .env("GPU_CHECK_LIMIT", "3")
            .env("WORLD_SIZE", "7")
            .env_remove("CUDA_PATH")
            .env_remove("BURN_DDP_NCCL_LIB")
            .output()
            .expect("bash");
        Checked(output)
    }
}

struct Checked(Output);

impl Checked {
    fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.0.stdout).into_owned()
    }

    fn code(&self) -> Option<i32> {
        self.0.status.code()
    }

    /// Verdict and line of `part` in the table.
    fn row(&self, part: &str) -> (String, String) {
        let stdout = self.stdout();
        let row = stdout.lines().map(|line| line.splitn(4, '|').map(str::trim).collect::<Vec<_>>());
        let row = row.into_iter().find(|row| row.len() == 4 && row[0] == part);
        let row = row.unwrap_or_else(|| panic!("no row {part} in {stdout}"));
        (row[1].to_owned(), row[3].to_owned())
    }

    #[track_caller]
    fn assert(&self, part: &str, verdict: &str, line: &str) {
        let row = self.row(part);
        assert!(row.0 == verdict && row.1.contains(line), "{part}: {row:?}");
    }
}

#[test]
fn all_that_passes() {
    let machine = Machine::with(1, &[("nccl_check", CHECK), ("gpt", &gpt("102")), ("nccl_all_reduce", "")]);
    let checked = machine.check();
    assert_eq!(checked.code(), Some(0), "{}", checked.stdout());
    for part in ["collectives", "group", "order", "abort", "cost"] {
        checked.assert(part, "PASS", "1 checks");
    }
    for run in ["warm-up", "plain 1", "nccl 1", "plain 2", "nccl 2", "host"] {
        checked.assert(&format!("gpt {run}"), "PASS", "trained");
    }
    checked.assert("gpt cost of a group", "PASS", "plain 100.00 ms");
    checked.assert("gpt cost of a group", "PASS", "1.0200 (");
    checked.assert("gpt cost of a group", "PASS", "by the host 300.00 ms, 3.0000");
    checked.assert("gpt losses", "PASS", "NCCL to plain: 0; plain to plain: 0");
    let stdout = checked.stdout();
    assert!(stdout.contains("device   GPU 0: A fake") && stdout.contains("0 of 13 failed"), "{stdout}");
}

#[test]
fn whatever_fails_hangs_or_is_not_there() {
    let check = r#"
case $1 in
  collectives) echo "FAIL sum f32: element 3"; exit 1 ;;
  group) sleep 60 ;;
  order) ;;
  abort) echo "PASS a: 1"; echo "panicked"; exit 101 ;;
  cost) echo "PASS a: 1"; echo "FAIL b: 2" ;;
esac"#;
    let checked = Machine::with(1, &[("nccl_check", check)]).check();
    checked.assert("collectives", "FAIL", "exit code 1: FAIL sum f32: element 3");
    checked.assert("group", "FAIL", "no end within 3 s");
    checked.assert("order", "FAIL", "exit code 0, but: 0 checks passed, 0 failed");
    checked.assert("abort", "FAIL", "exit code 101: panicked");
    checked.assert("cost", "FAIL", "exit code 0, but: 1 checks passed, 1 failed");
    checked.assert("gpt host", "FAIL", "gpt is not in ");
    checked.assert("gpt cost of a group", "FAIL", "no steps");
    assert_eq!(checked.code(), Some(1), "{}", checked.stdout());
    assert!(checked.stdout().contains("13 of 13 failed"), "{}", checked.stdout());
}

#[test]
fn a_group_that_costs_too_much_or_trains_otherwise() {
    let other = gpt("103").replace("$step.5,", "$step.$ms,");
    let checked = Machine::with(1, &[("nccl_check", CHECK), ("gpt", &other)]).check();
    checked.assert("gpt cost of a group", "FAIL", "1.0300 (");
    checked.assert("gpt losses", "FAIL", "NCCL to plain: 0.003; plain to plain: 0");
    assert_eq!(checked.code(), Some(1), "{}", checked.stdout());
}

#[test]
fn two_gpus_are_a_ring() {
    let ring = r#"[ "$1 $2" = "--nproc 2" ] && echo "busbw 300" || exit 1"#;
    let programs = [("nccl_check", CHECK), ("gpt", &gpt("100")), ("nccl_all_reduce", ring)];
    let checked = Machine::with(2, &programs).check();
    for part in ["collectives", "group"] {
        checked.assert(&format!("{part} on 2"), "PASS", "1 checks");
    }
    checked.assert("bandwidth on 2", "PASS", "busbw 300");
    assert_eq!(checked.code(), Some(0), "{}", checked.stdout());
}

#[test]
fn what_is_missing_is_one_line() {
    let machine = Machine::with(0, &[("nccl_check", CHECK)]);
    let checked = machine.check();
    let stderr = String::from_utf8_lossy(&checked.0.stderr).into_owned();
    assert_eq!((checked.code(), checked.stdout().as_str()), (Some(2), ""), "{stderr}");
    assert!(stderr.starts_with("gpu-check: missing: an NVIDIA driver with a GPU"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(!stderr.contains("libnccl"), "{stderr}");
    fs::remove_dir_all(machine.path("site/nvidia/nccl")).expect("a folder");
    let stderr = String::from_utf8_lossy(&machine.check().0.stderr).into_owned();
    assert!(stderr.contains("; libnccl.so.2: pip install") && stderr.lines().count() == 1, "{stderr}");
}
