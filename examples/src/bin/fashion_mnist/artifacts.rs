//! The directory of a run: for one run at a time, cleared of an earlier one's files.

use std::fs::{File, TryLockError};
use std::path::Path;

use burn_ddp::{Error, Result};

/// Creates and locks `directory`; the lock keeps other runs out. Unless the run is resumed, the files that Burn wrote
/// for an earlier one are removed: Burn would append to its metrics, and use those of later epochs as this run's. Other
/// files stay.
pub(crate) fn prepare(directory: &Path, resumed: bool) -> Result<File> {
    let failed = |error| Error::io(format!("--artifacts {}", directory.display()), error);
    std::fs::create_dir_all(directory).map_err(failed)?;
    let lock = File::open(directory).map_err(failed)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::config(format!(
                "--artifacts {}: another run is using it; give each its own",
                directory.display()
            )));
        }
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    if !resumed {
        clear(directory).map_err(failed)?;
    }
    Ok(lock)
}

fn clear(directory: &Path) -> std::io::Result<()> {
    remove(&directory.join("experiment.log"))?;
    for split in ["train", "valid"] {
        let split = directory.join(split);
        for epoch in entries(&split, |name| numbered(name, "epoch-", ""))? {
            for file in entries(&epoch, |name| name.ends_with(".log"))? {
                remove(&file)?;
            }
            // A directory with other files stays.
            let _ = std::fs::remove_dir(&epoch);
        }
        let _ = std::fs::remove_dir(&split);
    }
    let checkpoint = directory.join("checkpoint");
    let is_record =
        |name: &str| ["model-", "optim-", "scheduler-"].iter().any(|kind| numbered(name, kind, ".mpk"));
    for file in entries(&checkpoint, is_record)? {
        remove(&file)?;
    }
    let _ = std::fs::remove_dir(&checkpoint);
    Ok(())
}

/// True if `name` is `before`, a number, `after`.
fn numbered(name: &str, before: &str, after: &str) -> bool {
    let number = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    number.is_some_and(|number| number.parse::<usize>().is_ok())
}

/// Paths in `directory` whose name is wanted; empty if there is no such directory.
fn entries(directory: &Path, wanted: impl Fn(&str) -> bool) -> std::io::Result<Vec<std::path::PathBuf>> {
    let list = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        list => list?,
    };
    let mut found = Vec::new();
    for entry in list {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&wanted) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn remove(file: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_run_wrote_is_removed_and_only_for_a_new_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let theirs = [
            "train/cats/1.txt",
            "train/epoch-1/notes.txt",
            "valid/epoch-x/Loss.log",
            "checkpoint/model-best.mpk",
        ];
        let ours = [
            "train/epoch-1/Loss.log",
            "valid/epoch-12/Accuracy.log",
            "checkpoint/optim-3.mpk",
            "experiment.log",
        ];
        for name in theirs.iter().chain(&ours) {
            std::fs::create_dir_all(path(name).parent().expect("a parent")).expect("a folder");
            std::fs::write(path(name), name).expect("a file");
        }
        drop(prepare(folder.path(), true).expect("a lock"));
        assert!(theirs.iter().chain(&ours).all(|name| path(name).exists()));
        drop(prepare(folder.path(), false).expect("a lock"));
        assert!(theirs.iter().all(|name| path(name).exists()));
        assert!(!ours.iter().any(|name| path(name).exists()));
        assert!(!path("valid/epoch-12").exists());
    }

    #[test]
    fn a_directory_serves_one_run_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let lock = prepare(folder.path(), false).expect("a lock");
        let error = prepare(folder.path(), false).expect_err("it is in use");
        assert!(error.to_string().contains("another run"), "{error}");
        drop(lock);
        prepare(folder.path(), false).expect("it is free again");
    }
}
