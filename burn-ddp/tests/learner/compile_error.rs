//! The compile error for an output that cannot be gathered.
//!
//! `metrics.rs` implements `DdpOutput` for an output of its own, except with the feature `__without_ddp_output`. The
//! test compiles this binary once more with that feature and checks the message. It selects the features of a build of
//! the workspace, so that Cargo compiles this package anew and nothing below it. After a build of another selection it
//! compiles Burn for that of the workspace, which takes minutes.

use std::process::Command;

#[test]
#[cfg_attr(
    feature = "overlap",
    ignore = "compiles Burn without overlap; it runs in the build without that feature"
)]
fn an_output_that_cannot_be_gathered_is_a_compile_error_that_names_the_trait() {
    let binary = std::env::current_exe().expect("this binary");
    let target = binary.ancestors().nth(3).expect("the target directory");
    let output = Command::new(env!("CARGO"))
        .args(["test", "--no-run", "--offline", "--color", "never", "--workspace", "--test", "learner"])
        .args(["--features", "burn-ddp/__without_ddp_output"])
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
