//! Libraries with NCCL's function names and no NCCL.

use std::path::Path;
use std::process::Command;

/// The functions that the crate looks up besides the version.
pub const FUNCTIONS: [&str; 15] = [
    "ncclGetUniqueId",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllReduce",
    "ncclReduce",
    "ncclBroadcast",
    "ncclReduceScatter",
    "ncclAllGather",
];

/// Builds a library at `file` whose `ncclGetVersion` gives `version`, and which has `functions` besides.
pub fn build(file: &Path, version: i32, functions: &[&str]) {
    let version = format!(
        "#[unsafe(no_mangle)] unsafe extern \"C\" fn ncclGetVersion(version: *mut i32) -> i32 {{\
             unsafe {{ *version = {version} }}; 0 }}\n"
    );
    compile(file, version, functions);
}

/// Builds a library at `file` from `source` and `functions`.
pub fn compile(file: &Path, mut source: String, functions: &[&str]) {
    let folder = file.parent().expect("a folder");
    for name in functions {
        source.push_str(&format!("#[unsafe(no_mangle)] extern \"C\" fn {name}() -> i32 {{ 3 }}\n"));
    }
    let path = folder.join("fake.rs");
    std::fs::write(&path, source).expect("the source");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "cdylib",
            "--crate-name",
            "fake",
            "-A",
            "non_snake_case",
            "-C",
            "panic=abort",
            "-o",
        ])
        .arg(file)
        .arg(&path)
        .output()
        .expect("rustc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
