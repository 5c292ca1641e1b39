//! The compile error for an output that cannot be gathered.
//!
//! `metrics.rs` implements `DdpOutput` for an output of its own, except under `cfg(without_ddp_output)`. The test
//! compiles this binary once more with that flag and checks the message. If Cargo was called for this package alone,
//! everything below is built already, and the test takes seconds. In a build of the workspace Burn has other features,
//! so Cargo would build Burn anew. The test therefore runs in the build with `overlap`, which is one of this package
//! alone, and on request.

use std::process::Command;

#[test]
#[cfg_attr(not(feature = "overlap"), ignore = "builds Burn anew, unless Cargo was called with `-p burn-ddp`")]
fn an_output_that_cannot_be_gathered_is_a_compile_error_that_names_the_trait() {
    let features = [
        ("overlap", cfg!(feature = "overlap")),
        ("flex", cfg!(feature = "flex")),
        ("ndarray", cfg!(feature = "ndarray")),
    ];
    let enabled = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect::<Vec<_>>().join(",");
    let binary = std::env::current_exe().expect("this binary");
    let target = binary.ancestors().nth(3).expect("the target directory");
    let output = Command::new(env!("CARGO"))
        .args(["rustc", "--offline", "--color", "never", "-p", "burn-ddp", "--test", "learner"])
        .args(["--features", &enabled, "--", "--cfg", "without_ddp_output"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("cargo");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    let wanted =
        ["cannot be gathered from all ranks", "`DdpOutput`", "items, parts, join", "Own<", "launch_ddp"];
    for words in wanted {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    // One for the training output and one for the validation output; nothing else is wrong without the implementation.
    assert_eq!(text.lines().filter(|line| line.starts_with("error[")).count(), 2, "{text}");
}
