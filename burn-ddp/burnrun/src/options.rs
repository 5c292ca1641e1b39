//! What was meant: the second stage, the same for a command line and for a library call.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use burn_ddp_comm::{Error, Result};

/// More ranks than this are a slip of the finger, and the numbers of a launch are products of its sizes.
const MOST_RANKS: usize = 1 << 15;
/// Longer than this is not waited for; clocks overflow somewhere beyond.
const LONGEST_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// Whether rank 0 inherits the terminal instead of writing into a pipe.
///
/// A program that draws on the terminal or reads keys needs a real one. The other ranks' output goes to files
/// meanwhile, and the terminal is restored when rank 0 ends, however it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tty {
    /// All ranks write into pipes, and every line says whose it is.
    #[default]
    Never,
    /// Rank 0 gets the terminal if standard input and output are one, this process is in its foreground, and the
    /// files for the other ranks' output can be made.
    Auto,
    /// Rank 0 gets the terminal; an error if there is none.
    Always,
}

/// A choice of standard output and standard error, written as torchrun does: 0 none, 1 output, 2 error, 3 both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard output.
    pub out: bool,
    /// Standard error.
    pub err: bool,
}

impl Streams {
    /// Both streams.
    pub const BOTH: Self = Self { out: true, err: true };
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(bits @ 0..=3u8) => Ok(Self { out: bits & 1 != 0, err: bits & 2 != 0 }),
            _ => Err("expected 0 (none), 1 (standard output), 2 (standard error) or 3 (both)".into()),
        }
    }
}

/// Everything a launch depends on besides the environment.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub nproc: usize,
    pub nnodes: usize,
    pub node: usize,
    pub standalone: bool,
    pub master_addr: Option<String>,
    pub master_port: Option<u16>,
    pub local_addr: Option<String>,
    pub run_id: Option<String>,
    pub log_dir: Option<PathBuf>,
    pub redirects: Streams,
    pub tee: Streams,
    /// Local ranks whose output the console shows; all if `None`.
    pub shown: Option<Vec<usize>>,
    pub tty: Tty,
    /// How long the others may report after the first failure.
    pub report: Duration,
    /// How long after SIGTERM comes SIGKILL, after a failure.
    pub grace: Duration,
    /// The same after a signal to the launcher.
    pub signal_grace: Duration,
    /// `None` is the running program.
    pub program: Option<OsString>,
    pub args: Vec<OsString>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nproc: 1,
            nnodes: 1,
            node: 0,
            standalone: false,
            master_addr: None,
            master_port: None,
            local_addr: None,
            run_id: None,
            log_dir: None,
            redirects: Streams::default(),
            tee: Streams::default(),
            shown: None,
            tty: Tty::Never,
            report: Duration::from_secs(3),
            grace: Duration::from_secs(2),
            signal_grace: Duration::from_secs(5),
            program: None,
            args: Vec::new(),
        }
    }
}

impl Options {
    /// Refuses what does not fit together.
    pub fn check(&self) -> Result<()> {
        if self.nproc == 0 {
            return Err(Error::config("0 processes: a launch has at least one process per node"));
        }
        if self.nnodes.checked_mul(self.nproc).is_none_or(|world_size| world_size > MOST_RANKS) {
            return Err(Error::config(format!(
                "--nnodes {} times --nproc-per-node {}: a launch has at most {MOST_RANKS} ranks",
                self.nnodes, self.nproc
            )));
        }
        for (flag, grace) in [("--grace", self.grace), ("--signal-grace", self.signal_grace)] {
            if grace > LONGEST_GRACE {
                return Err(Error::config(format!(
                    "{flag} {}: at most {} seconds, which is a day",
                    grace.as_secs(),
                    LONGEST_GRACE.as_secs()
                )));
            }
        }
        if self.node >= self.nnodes {
            return Err(Error::config(format!(
                "--node-rank {} is outside of --nnodes {}: nodes go from 0 to {}",
                self.node,
                self.nnodes,
                self.nnodes.saturating_sub(1)
            )));
        }
        if self.standalone && self.nnodes > 1 {
            return Err(Error::config(format!(
                "--standalone is for one node, not for --nnodes {}: give --master-addr instead",
                self.nnodes
            )));
        }
        if let Some(local_rank) = self.shown.iter().flatten().find(|local_rank| **local_rank >= self.nproc) {
            return Err(Error::config(format!(
                "--local-ranks-filter names {local_rank}, but local ranks go from 0 to {}",
                self.nproc - 1
            )));
        }
        if let Some(id) = &self.run_id
            && (id.is_empty() || id == "." || id == ".." || id.contains(['/', '\0']))
        {
            return Err(Error::config(format!(
                "--run-id {id:?} cannot be the name of a directory: use letters, digits, - and _"
            )));
        }
        if self.tty == Tty::Always && self.node > 0 {
            return Err(Error::config(format!(
                "--tty-rank0 on --node-rank {}: rank 0 is on node 0, leave the flag out here",
                self.node
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(options: Options, word: &str) {
        let error = options.check().expect_err("must be refused");
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(word), "{error} lacks {word}");
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let fine = Options { nproc: 2, ..Options::default() };
        fine.check().unwrap();
        refused(Options { nproc: 0, ..fine.clone() }, "0 processes");
        refused(Options { nproc: usize::MAX, ..fine.clone() }, "18446744073709551615");
        refused(Options { nnodes: 1 << 63, ..fine.clone() }, "--nnodes 9223372036854775808");
        refused(Options { nnodes: (1 << 14) + 1, ..fine.clone() }, "--nnodes 16385");
        Options { nnodes: 1 << 14, ..fine.clone() }.check().unwrap();
        let day = Duration::from_secs(86_400);
        refused(Options { grace: day + Duration::from_secs(1), ..fine.clone() }, "--grace 86401");
        refused(Options { signal_grace: day * 2, ..fine.clone() }, "--signal-grace 172800");
        Options { grace: day, signal_grace: day, ..fine.clone() }.check().unwrap();
        refused(Options { nnodes: 2, node: 2, ..fine.clone() }, "--node-rank 2");
        refused(Options { nnodes: 2, standalone: true, ..fine.clone() }, "--standalone");
        refused(Options { shown: Some(vec![0, 2]), ..fine.clone() }, "names 2");
        refused(Options { run_id: Some("a/b".into()), ..fine.clone() }, "a/b");
        refused(Options { run_id: Some("..".into()), ..fine.clone() }, "--run-id");
        refused(Options { nnodes: 2, node: 1, tty: Tty::Always, ..fine }, "--tty-rank0");
    }

    #[test]
    fn streams_are_bits() {
        assert_eq!("0".parse(), Ok(Streams::default()));
        assert_eq!("1".parse(), Ok(Streams { out: true, err: false }));
        assert_eq!("2".parse(), Ok(Streams { out: false, err: true }));
        assert_eq!("3".parse(), Ok(Streams::BOTH));
        assert!("4".parse::<Streams>().is_err());
    }
}
