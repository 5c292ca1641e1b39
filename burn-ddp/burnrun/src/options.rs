//! The checked options of a launch, the same for a command line and for a library call.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use burn_ddp_comm::{Error, Result};

/// Maximum number of ranks. More are taken for a typing error; the limit also keeps products of sizes from overflowing.
const MAX_RANKS: usize = 1 << 15;
/// Maximum grace period. Much longer ones would overflow the clock.
const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// Decides if rank 0 inherits the terminal instead of writing into a pipe.
///
/// A program that draws on the terminal or reads keys needs a real one. The output of the other ranks goes to files
/// meanwhile, and the terminal is restored when rank 0 ends, even if it is killed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tty {
    /// All ranks write into pipes, and every line is prefixed with its rank.
    #[default]
    Never,
    /// Rank 0 gets the terminal if standard input and output are a terminal, this process is in its foreground, and
    /// the files for the output of the other ranks can be created.
    Auto,
    /// Rank 0 gets the terminal, and it is an error if there is none.
    Always,
}

/// One of the two output streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// A set of output streams, written as torchrun does: 0 none, 1 standard output, 2 standard error, 3 both.
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

    pub(crate) fn contains(self, stream: Stream) -> bool {
        match stream {
            Stream::Out => self.out,
            Stream::Err => self.err,
        }
    }
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

/// Everything that a launch depends on besides the environment.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub nproc: usize,
    pub nnodes: usize,
    pub node_rank: usize,
    pub standalone: bool,
    pub master_addr: Option<String>,
    pub master_port: Option<u16>,
    pub local_addr: Option<String>,
    pub run_id: Option<String>,
    pub log_dir: Option<PathBuf>,
    pub redirects: Streams,
    pub tee: Streams,
    /// Local ranks whose output the console shows; all if `None`.
    pub local_ranks_filter: Option<Vec<usize>>,
    pub tty: Tty,
    /// Time that the other ranks have after the first failure to report what they saw, before SIGTERM.
    pub report_grace: Duration,
    /// Time between SIGTERM and SIGKILL after a failure.
    pub grace: Duration,
    /// Time between a signal that is passed on and SIGKILL.
    pub signal_grace: Duration,
    /// The running program if `None`.
    pub program: Option<OsString>,
    pub args: Vec<OsString>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nproc: 1,
            nnodes: 1,
            node_rank: 0,
            standalone: false,
            master_addr: None,
            master_port: None,
            local_addr: None,
            run_id: None,
            log_dir: None,
            redirects: Streams::default(),
            tee: Streams::default(),
            local_ranks_filter: None,
            tty: Tty::Never,
            report_grace: Duration::from_secs(3),
            grace: Duration::from_secs(2),
            signal_grace: Duration::from_secs(5),
            program: None,
            args: Vec::new(),
        }
    }
}

impl Options {
    /// Returns an error for values that are out of range or contradict each other.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](burn_ddp_comm::ErrorKind::Config), naming the flag and its value.
    pub fn check(&self) -> Result<()> {
        self.check_world_size()?;
        self.check_grace_periods()?;
        self.check_nodes()?;
        self.check_local_ranks_filter()?;
        self.check_run_id()?;
        if self.tty == Tty::Always && self.node_rank > 0 {
            return Err(Error::config(format!(
                "--tty-rank0 on --node-rank {}: rank 0 is on node 0, leave the flag out here",
                self.node_rank
            )));
        }
        Ok(())
    }

    fn check_world_size(&self) -> Result<()> {
        if self.nproc == 0 {
            return Err(Error::config("0 processes: a launch has at least one process per node"));
        }
        if self.nnodes.checked_mul(self.nproc).is_none_or(|world_size| world_size > MAX_RANKS) {
            return Err(Error::config(format!(
                "--nnodes {} times --nproc-per-node {}: a launch has at most {MAX_RANKS} ranks",
                self.nnodes, self.nproc
            )));
        }
        Ok(())
    }

    fn check_grace_periods(&self) -> Result<()> {
        for (flag, grace) in [("--grace", self.grace), ("--signal-grace", self.signal_grace)] {
            if grace > MAX_GRACE {
                return Err(Error::config(format!(
                    "{flag} {}: at most {} seconds, which is a day",
                    grace.as_secs(),
                    MAX_GRACE.as_secs()
                )));
            }
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<()> {
        if self.node_rank >= self.nnodes {
            return Err(Error::config(format!(
                "--node-rank {} is outside of --nnodes {}: nodes go from 0 to {}",
                self.node_rank,
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
        Ok(())
    }

    fn check_local_ranks_filter(&self) -> Result<()> {
        let mut listed = self.local_ranks_filter.iter().flatten();
        match listed.find(|local_rank| **local_rank >= self.nproc) {
            Some(local_rank) => Err(Error::config(format!(
                "--local-ranks-filter names {local_rank}, but local ranks go from 0 to {}",
                self.nproc - 1
            ))),
            None => Ok(()),
        }
    }

    fn check_run_id(&self) -> Result<()> {
        match &self.run_id {
            Some(id) if id.is_empty() || id == "." || id == ".." || id.contains(['/', '\0']) => {
                Err(Error::config(format!(
                    "--run-id {id:?} cannot be the name of a directory: use letters, digits, - and _"
                )))
            }
            _ => Ok(()),
        }
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
    fn contradicting_options_are_refused_by_name() {
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
        refused(Options { nnodes: 2, node_rank: 2, ..fine.clone() }, "--node-rank 2");
        refused(Options { nnodes: 2, standalone: true, ..fine.clone() }, "--standalone");
        refused(Options { local_ranks_filter: Some(vec![0, 2]), ..fine.clone() }, "names 2");
        refused(Options { run_id: Some("a/b".into()), ..fine.clone() }, "a/b");
        refused(Options { run_id: Some("..".into()), ..fine.clone() }, "--run-id");
        refused(Options { nnodes: 2, node_rank: 1, tty: Tty::Always, ..fine }, "--tty-rank0");
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
