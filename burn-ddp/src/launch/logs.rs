//! Files of output, one pair per rank, laid out as torchrun does.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::options::{Options, Streams};
use super::output::Stream;
use crate::error::{Error, Result};

/// The directory of one launch on this node.
pub(super) struct Logs {
    directory: PathBuf,
}

impl Logs {
    /// `<log-dir>/<run-id>/attempt_0`, in a new private directory for temporary files if none was given.
    pub fn create(options: &Options, run_id: &str) -> Result<Self> {
        let top = match &options.log_dir {
            Some(directory) => directory.clone(),
            None => private(&std::env::temp_dir())?,
        };
        Ok(Self { directory: top.join(run_id).join("attempt_0") })
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
    fn an_impossible_directory_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = Options { log_dir: Some(file.path().into()), ..Options::default() };
        let error = Logs::create(&options, "job").unwrap().open(0, Streams::BOTH).unwrap_err();
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
    }
}
