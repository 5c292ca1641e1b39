//! What rustc says to a trainer whose output cannot be gathered. A doc test can only show that it does not compile.
#![cfg(feature = "train")]

use std::path::Path;
use std::process::Command;

const PROGRAM: &str = include_str!("compile_fail/output_without_trait.rs");

/// Checks a program in a crate of its own, with the dependencies of this one, and returns what the compiler wrote.
fn check(source: &str) -> (bool, String) {
    let krate = Path::new(env!("CARGO_MANIFEST_DIR"));
    let workspace = krate.parent().expect("the crate is in a workspace");
    let folder = tempfile::tempdir().expect("a folder");
    let manifest = format!(
        "[package]\nname = \"trainer\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [profile.dev]\ndebug = \"line-tables-only\"\n\n[profile.dev.package.\"*\"]\nopt-level = 1\ndebug = false\n\n\
         [dependencies]\nburn-ddp = {{ path = {krate:?} }}\nburn-flex = \"=0.21.0\"\n\
         burn = {{ version = \"=0.21.0\", default-features = false, features = [\"std\", \"train\"] }}\n"
    );
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("a file");
    std::fs::create_dir(folder.path().join("src")).expect("a folder");
    write("Cargo.toml", &manifest);
    write("src/main.rs", source);
    std::fs::copy(workspace.join("Cargo.lock"), folder.path().join("Cargo.lock")).expect("a lock file");
    // Next to this test's own build, so that dependencies that are built already serve here too.
    let target = std::env::current_exe().expect("this binary").ancestors().nth(3).expect("target").to_owned();
    let output = Command::new(env!("CARGO"))
        .args(["check", "--offline", "--color", "never"])
        .current_dir(folder.path())
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("cargo");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn an_output_that_cannot_be_gathered_is_a_compile_error_that_names_the_trait() {
    let (compiles, text) = check(PROGRAM);
    assert!(!compiles, "{text}");
    let wanted =
        ["cannot be gathered from all ranks", "`DdpOutput`", "items, parts, join", "Scores<", "launch_ddp"];
    for words in wanted {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    assert_eq!(text.matches("\nerror[").count() + usize::from(text.starts_with("error[")), 2, "{text}");
    // The same program with the trait is right: nothing else is wrong with it.
    let implemented = PROGRAM.replace(
        "#[derive(Module, Debug)]",
        "impl<B: Backend> burn_ddp::learner::DdpOutput for Scores<B> {
            fn items(&self) -> usize { 1 }
            fn parts(self) -> burn_ddp::learner::Parts { burn_ddp::learner::Parts::new().with_loss(self.0) }
            fn join(parts: burn_ddp::learner::GlobalParts) -> burn_ddp::Result<Self> { Ok(Self(parts.loss()?)) }
        }
        #[derive(Module, Debug)]",
    );
    let (compiles, text) = check(&implemented);
    assert!(compiles, "{text}");
}
