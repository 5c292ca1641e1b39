//! Files for the output of ranks, laid out as torchrun does: one pair per rank.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use burn_ddp_comm::{Error, Result};

use super::routing::Routing;
use crate::options::{Options, Stream, Streams};
use crate::plan::Plan;

/// The files of all ranks. They are opened before the first rank starts, so that nothing starts if they cannot be.
pub(crate) struct LogFiles {
    /// `None` if no rank writes to a file.
    pub directory: Option<LogDirectory>,
    /// Standard output and standard error of each rank.
    pub files: Vec<[Option<File>; 2]>,
}

impl LogFiles {
    /// Opens the files that `routing` needs.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](burn_ddp_comm::ErrorKind::Io) with the path that cannot be written.
    pub fn open(plan: &Plan, routing: Routing<'_>) -> Result<Self> {
        let wanted: Vec<(usize, Streams)> = plan
            .ranks
            .iter()
            .map(|planned| (planned.local_rank, routing.streams_to_files(planned.local_rank)))
            .collect();
        if wanted.iter().all(|(_, streams)| *streams == Streams::default()) {
            return Ok(Self { directory: None, files: wanted.iter().map(|_| [None, None]).collect() });
        }
        let directory = LogDirectory::create(routing.options, &plan.run_id)?;
        let files = wanted.iter().map(|(local_rank, streams)| directory.open(*local_rank, *streams));
        match files.collect() {
            Ok(files) => Ok(Self { directory: Some(directory), files }),
            Err(error) => {
                directory.remove_temporary(false);
                Err(error)
            }
        }
    }
}

/// The directory of one launch on this node.
#[derive(Clone)]
pub(crate) struct LogDirectory {
    path: PathBuf,
    /// The directory that was created because the user named none.
    temporary: Option<PathBuf>,
    /// False if the files only exist because rank 0 has the terminal.
    requested: bool,
}

impl LogDirectory {
    /// Chooses `<log-dir>/<run-id>/attempt_0`, in a new private directory for temporary files if no log directory was
    /// given.
    fn create(options: &Options, run_id: &str) -> Result<Self> {
        let temporary = match &options.log_dir {
            Some(_) => None,
            None => Some(create_private(&std::env::temp_dir())?),
        };
        let top = temporary.as_ref().or(options.log_dir.as_ref()).cloned().unwrap_or_default();
        Ok(Self {
            path: top.join(run_id).join("attempt_0"),
            temporary,
            requested: options.redirects != Streams::default() || options.tee != Streams::default(),
        })
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the files for the chosen `streams` of a rank. Files of an earlier run with the same id are appended to.
    fn open(&self, local_rank: usize, streams: Streams) -> Result<[Option<File>; 2]> {
        let directory = self.path.join(local_rank.to_string());
        let open = |stream: Stream, name: &str| {
            if !streams.contains(stream) {
                return Ok(None);
            }
            let path = directory.join(name);
            let created = DirBuilder::new().recursive(true).create(&directory);
            created
                .and_then(|()| OpenOptions::new().create(true).append(true).open(&path))
                .map(Some)
                .map_err(|error| Error::io(format!("cannot write {} (--log-dir)", path.display()), error))
        };
        Ok([open(Stream::Out, "stdout.log")?, open(Stream::Err, "stderr.log")?])
    }

    /// Removes a temporary directory after the launch if its files are empty, or if the launch succeeded and the user
    /// did not ask for files. If files stay, their directory is added to the error of a failed launch.
    pub fn clean_up(&self, outcome: Result<()>) -> Result<()> {
        let unneeded = outcome.is_ok() && !self.requested;
        if self.temporary.is_none() || self.remove_temporary(unneeded) {
            return outcome;
        }
        let path = self.path.display();
        outcome.map_err(|error| Error::new(error.kind(), format!("{error}\noutput is kept in {path}")))
    }

    /// Removes a temporary directory if it is `unneeded` or its files are empty; returns true if it is gone. It is no
    /// error if it cannot be removed.
    fn remove_temporary(&self, unneeded: bool) -> bool {
        self.temporary.as_ref().is_some_and(|directory| {
            (unneeded || is_empty(directory)) && std::fs::remove_dir_all(directory).is_ok()
        })
    }
}

/// Returns true if all files under `directory` are empty, and false if that cannot be determined.
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

/// Creates a directory that only this user can read.
fn create_private(parent: &Path) -> Result<PathBuf> {
    let mut last_error = None;
    for number in 0..100 {
        let path = parent.join(format!("burnrun-{}-{number}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) => last_error = Some(error),
        }
    }
    let error = last_error.unwrap_or_else(|| std::io::ErrorKind::AlreadyExists.into());
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
            let logs = LogDirectory::create(&options, "job").unwrap();
            let [out, err] = logs.open(1, Streams { out: true, err: false }).unwrap();
            assert!(err.is_none());
            out.unwrap().write_all(b"x").unwrap();
        }
        let path = directory.path().join("job/attempt_0/1/stdout.log");
        assert_eq!(std::fs::read_to_string(path).unwrap(), "xx");
        assert!(!directory.path().join("job/attempt_0/1/stderr.log").exists());
    }

    #[test]
    fn temporary_files_are_kept_only_if_asked_for_or_after_a_failure() {
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
            let logs = LogDirectory::create(&Options { tee, ..Options::default() }, "job").unwrap();
            let [out, _] = logs.open(0, both).unwrap();
            out.unwrap().write_all(output.as_bytes()).unwrap();
            let failed = outcome.is_err();
            let said = logs.clean_up(outcome).err().map(|error| (error.exit_code(), error.to_string()));
            let named = said.as_ref().is_some_and(|said| said.1.contains(logs.path().to_str().unwrap()));
            assert_eq!(said.map(|said| said.0), failed.then_some(3));
            assert_eq!((named, logs.temporary.as_ref().unwrap().exists()), (failed && kept, kept));
            let _ = std::fs::remove_dir_all(logs.temporary.unwrap());
        }
    }

    #[test]
    fn an_impossible_directory_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = Options { log_dir: Some(file.path().into()), ..Options::default() };
        let error = LogDirectory::create(&options, "job").unwrap().open(0, Streams::BOTH).unwrap_err();
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
    }
}
