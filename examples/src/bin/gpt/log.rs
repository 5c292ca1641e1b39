//! The log of rank 0: one line and one JSON object for each step.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use burn_ddp::{Error, Result};
use burn_ddp_examples::say;
use serde::Serialize;

/// One optimizer step, as `--log-json` writes it.
#[derive(Serialize)]
pub(crate) struct Record {
    pub(crate) step: usize,
    pub(crate) loss: f64,
    pub(crate) norm: f64,
    pub(crate) lr: f64,
    pub(crate) dt_ms: f64,
    pub(crate) tokens_per_sec: u64,
    pub(crate) world_size: usize,
}

/// The log of rank 0; the other ranks write no file.
pub(crate) struct Log(Option<JsonLines>);

struct JsonLines {
    path: PathBuf,
    file: File,
    /// Bytes of the complete lines.
    length: u64,
}

impl Log {
    pub(crate) fn open(root: bool, path: Option<&Path>) -> Result<Self> {
        let create = |path: &Path| match File::create(path) {
            Ok(file) => Ok(JsonLines { path: path.into(), file, length: 0 }),
            Err(error) => Err(Error::io(format!("--log-json {}", path.display()), error)),
        };
        path.filter(|_| root).map(create).transpose().map(Self)
    }

    pub(crate) fn step(&mut self, record: &Record) -> Result<()> {
        if let Some(lines) = &mut self.0 {
            lines.write(record)?;
        }
        let Record { step, loss, norm, lr, dt_ms, tokens_per_sec, .. } = record;
        say(format_args!(
            "step {step:>4} | loss {loss:.6} | norm {norm:.4} | lr {lr:.2e} | dt {dt_ms:.2}ms | tok/s {tokens_per_sec}"
        ))
    }
}

impl JsonLines {
    /// Writes one line without a buffer: a process that is killed leaves every step that it finished. A line that does
    /// not fit on the disk is removed.
    fn write(&mut self, record: &Record) -> Result<()> {
        let failed = |error| Error::io(format!("--log-json {}: cannot write", self.path.display()), error);
        let line = serde_json::to_string(record).map_err(|error| failed(error.into()))? + "\n";
        self.file.write_all(line.as_bytes()).map_err(|error| {
            // A device file has no length; the error is then ignored.
            let _ = self.file.set_len(self.length);
            failed(error)
        })?;
        self.length += line.len() as u64;
        Ok(())
    }
}
