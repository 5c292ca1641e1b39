//! Arguments that the training programs share: their checks, and the agreement of all ranks on them.

use std::path::Path;

use burn::tensor::backend::Backend;
use burn_ddp::{Error, ProcessGroup, Result};
use clap::Args;

use crate::BackendName;

/// Processes and backend of a program that trains.
#[derive(Args, Clone, Copy, Debug)]
pub struct Processes {
    /// Start this many processes on this machine; without it, be the one process that trains, or the rank that a
    /// launcher's environment names
    #[arg(long)]
    pub nproc: Option<usize>,
    /// Who computes
    #[arg(long, value_enum, default_value = "flex")]
    pub backend: BackendName,
}

/// Largest number that counts anything; products of them fit into 64 bits.
const LARGEST: usize = 1 << 20;

/// Refuses counts, each with its flag, that are zero or beyond any use.
///
/// # Errors
/// A configuration error that names the first of them.
pub fn check_counts(counts: &[(&str, usize)]) -> Result<()> {
    let refuse = |(flag, count): &(&str, usize), advice: String| {
        Err(Error::config(format!("{flag} {count}: give at {advice}")))
    };
    if let Some(zero) = counts.iter().find(|(_, count)| *count == 0) {
        return refuse(zero, "least 1".into());
    }
    match counts.iter().find(|(_, count)| *count > LARGEST) {
        Some(large) => refuse(large, format!("most {LARGEST}")),
        None => Ok(()),
    }
}

/// Refuses numbers, each with its flag, that are negative, infinite or not a number.
///
/// # Errors
/// A configuration error that names the first of them.
pub fn check_not_negative(numbers: &[(&str, f64)]) -> Result<()> {
    match numbers.iter().find(|(_, number)| !number.is_finite() || *number < 0.0) {
        Some((flag, number)) => {
            Err(Error::config(format!("{flag} {number}: give a number that is not negative")))
        }
        None => Ok(()),
    }
}

/// Refuses a share outside of 0 to below 1.
///
/// # Errors
/// A configuration error that names `flag`.
pub fn check_share(flag: &str, share: f64) -> Result<()> {
    match (0.0..1.0).contains(&share) {
        true => Ok(()),
        false => Err(Error::config(format!("{flag} {share}: give a share from 0 to below 1"))),
    }
}

/// Refuses a path at which no file can be written.
///
/// # Errors
/// A configuration error that names `flag`.
pub fn check_output_file(flag: &str, path: &Path) -> Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() || !directory.is_dir() {
        return Err(Error::config(format!(
            "{flag} {}: give the path of a file in a directory that exists",
            path.display()
        )));
    }
    Ok(())
}

/// Compares between all ranks the arguments that determine the training, each with its flag, and `data`, a description
/// of what is trained on. Ranks that were started by hand may have different ones: they would train, but not as one.
///
/// # Errors
/// A configuration error on all ranks, with the arguments of rank 0 and of the first rank that differs from it.
pub fn agree_on_arguments<B: Backend>(
    group: &ProcessGroup<B>,
    arguments: &[(&str, String)],
    data: &str,
) -> Result<()> {
    let mut mine = String::new();
    for (flag, value) in arguments {
        // A flag without a value has an empty one.
        mine += format!("{flag} {value}").trim_end();
        mine += " ";
    }
    mine += &format!("on {data}");
    let all = group.all_gather_bytes(mine.into_bytes())?;
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]);
    match (1..all.len()).find(|rank| all[*rank] != all[0]) {
        None => Ok(()),
        Some(rank) => {
            Err(Error::config(format!("rank 0 was given {}, but rank {rank} {}", text(0), text(rank))))
        }
    }
}
