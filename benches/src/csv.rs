//! One line for each measurement, in the format that the programs of the peers write too.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use burn_ddp::{DType, Error, Result};

use crate::times::Times;

/// The subject of a measurement.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The benchmark: `all_reduce`, `all_reduce_group`, `step_on`, `step_off`, ...
    pub bench: &'static str,
    /// Type of the elements.
    pub dtype: DType,
    /// Bytes of the buffer on one rank.
    pub bytes: usize,
    /// Number of processes.
    pub world: usize,
}

impl Measurement {
    /// Appends `bench,dtype,bytes,world,system,median,minimum` to `file`, if there is one; times are in µs.
    ///
    /// # Errors
    /// `Io` with the file.
    pub fn append(&self, file: Option<&Path>, times: &Times) -> Result<()> {
        let Some(file) = file else { return Ok(()) };
        let Self { bench, dtype, bytes, world } = self;
        let line =
            format!("{bench},{dtype},{bytes},{world},ours,{:.3},{:.3}\n", times.median(), times.minimum());
        let opened = OpenOptions::new().create(true).append(true).open(file);
        opened
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .map_err(|error| Error::io(format!("cannot write to {} (--csv)", file.display()), error))
    }
}
