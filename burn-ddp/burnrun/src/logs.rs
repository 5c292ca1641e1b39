//! Files of output, one pair per rank, laid out as torchrun does.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::options::{Options, Streams};
use super::output::Stream;
use burn_ddp_comm::{Error, Result};

/// The directory of one launch on this node.
#[derive(Clone)]
pub(super) struct Logs {
    directory: PathBuf,
    /// The directory made for it, if none was given.
    temporary: Option<PathBuf>,
    /// Whether files were asked for, and are not just where output goes that has no other place.
    asked_for: bool,
}

impl Logs {
    /// `<log-dir>/<run-id>/attempt_0`, in a new private directory for temporary files if none was given.
    pub fn create(options: &Options, run_id: &str) -> Result<Self> {
        let temporary = match &options.log_dir {
            Some(_) => None,
            None => Some(private(&std::env::temp_dir())?),
        };
        let top = temporary.as_ref().or(options.log_dir.as_ref()).cloned().unwrap_or_default();
        Ok(Self {
            directory: top.join(run_id).join("attempt_0"),
            temporary,
            asked_for: options.redirects != Streams::default() || options.tee != Streams::default(),
        })
    }

    /// Where the files are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The files for the chosen `streams` of a rank. Those of an earlier run of the same name are continued.
    pub fn open(&self, local_rank: usize, streams: Streams) -> Result<[Option<File>; 2]> {
        let directory = self.directory.join(local_rank.to_string());
        let open = |stream: Stream, name: &str| {
            let path = directory.join(name);
            let wanted = if stream == Stream::Out { streams.out } else { streams.err };
            if !wanted {
                return Ok(None);
            }
            let created = DirBuilder::new().recursive(true).create(&directory);
            created
                .and_then(|()| OpenOptions::new().create(true).append(true).open(&path))
                .map(Some)
                .map_err(|error| Error::io(format!("cannot write {} (--log-dir)", path.display()), error))
        };
        Ok([open(Stream::Out, "stdout.log")?, open(Stream::Err, "stderr.log")?])
    }
}

impl Logs {
    /// After the launch: removes files that nobody asked for and nobody misses. Those that may tell why a launch
    /// failed are named once more, since the first time was before all output.
    pub fn finish(&self, outcome: Result<()>) -> Result<()> {
        let needless = outcome.is_ok() && !self.asked_for;
        if self.temporary.is_none() || self.remove(needless) {
            return outcome;
        }
        let directory = self.directory.display();
        outcome.map_err(|error| Error::new(error.kind(), format!("{error}\noutput is kept in {directory}")))
    }

    /// Removes a temporary directory if it is `needless` or empty; returns whether it is gone. One that cannot be
    /// removed stays where temporary files are, which is no reason to fail.
    pub fn remove(&self, needless: bool) -> bool {
        self.temporary.as_ref().is_some_and(|directory| {
            (needless || is_empty(directory)) && std::fs::remove_dir_all(directory).is_ok()
        })
    }
}

/// Whether there is no byte in any file under `directory`; false if that cannot be told.
fn is_empty(directory: &Path) -> bool {
    let Ok(mut entries) = std::fs::read_dir(directory) else { return false };
    entries.all(|entry| {
        let Ok((entry, kind)) = entry.and_then(|entry| entry.file_type().map(|kind| (entry, kind))) else {
            return false;
        };
        if kind.is_dir() {
            is_empty(&entry.path())
        } else {
            entry.metadata().is_ok_and(|metadata| metadata.len() == 0)
        }
    })
}

/// A directory that did not exist and that only this user can read.
fn private(parent: &Path) -> Result<PathBuf> {
    let mut last = None;
    for number in 0..100 {
        let path = parent.join(format!("burnrun-{}-{number}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) => last = Some(error),
        }
    }
    let error = last.unwrap_or_else(|| std::io::ErrorKind::AlreadyExists.into());
    Err(Error::io(format!("cannot make a directory in {}: give --log-dir", parent.display()), error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn layout_and_continuation() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options { log_dir: Some(directory.path().into()), ..Options::default() };
        for _ in 0..2 {
            let logs = Logs::create(&options, "job").unwrap();
            let [out, err] = logs.open(1, Streams { out: true, err: false }).unwrap();
            assert!(err.is_none());
            out.unwrap().write_all(b"x").unwrap();
        }
        let path = directory.path().join("job/attempt_0/1/stdout.log");
        assert_eq!(std::fs::read_to_string(path).unwrap(), "xx");
        assert!(!directory.path().join("job/attempt_0/1/stderr.log").exists());
    }

    #[test]
    fn temporary_files_are_kept_for_a_reason_only() {
        let exit = || Err(Error::new(burn_ddp_comm::ErrorKind::Exit(3), "rank 1 failed"));
        let both = Streams::BOTH;
        let none = Streams::default();
        for (tee, output, outcome, kept) in [
            (none, "x", Ok(()), false),
            (none, "", exit(), false),
            (none, "x", exit(), true),
            (both, "x", Ok(()), true),
            (both, "", Ok(()), false),
        ] {
            let logs = Logs::create(&Options { tee, ..Options::default() }, "job").unwrap();
            let [out, _] = logs.open(0, both).unwrap();
            out.unwrap().write_all(output.as_bytes()).unwrap();
            let failed = outcome.is_err();
            let said = logs.finish(outcome).err().map(|error| (error.exit_code(), error.to_string()));
            let named = said.as_ref().is_some_and(|said| said.1.contains(logs.directory().to_str().unwrap()));
            assert_eq!(said.map(|said| said.0), failed.then_some(3));
            assert_eq!((named, logs.temporary.as_ref().unwrap().exists()), (failed && kept, kept));
            let _ = std::fs::remove_dir_all(logs.temporary.unwrap());
        }
    }

    #[test]
    fn an_impossible_directory_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = Options { log_dir: Some(file.path().into()), ..Options::default() };
        let error = Logs::create(&options, "job").unwrap().open(0, Streams::BOTH).unwrap_err();
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
    }
}
