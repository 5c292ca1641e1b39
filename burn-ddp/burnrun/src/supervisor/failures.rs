//! Decides which rank failed first, and builds the error that tells the user.
//!
//! The first failure gives the exit code of the launch, because it most often is the cause. The launcher sees exits in
//! the order in which the kernel reports them, which is not always the order of causes:
//!
//! - The kernel closes the connections of a process before it reports the exit to the parent. A peer may notice, report
//!   and exit in between. So a crash within [`CAUSE_WINDOW`] replaces a first failure that was an exit code.
//! - Otherwise a peer that exits before the cause stays the first failure, and the cause is listed in the error.

use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, ErrorKind};
use signal_hook::consts::{SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV};

use crate::process::exit::RankExit;
use crate::signals;

/// Signals by which a process ends for a reason of its own, and not because it noticed the end of another.
const CRASH_SIGNALS: [i32; 5] = [SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE];
/// Maximum time between the moment in which peers can notice a crash and the moment in which the launcher sees it.
const CAUSE_WINDOW: Duration = Duration::from_secs(1);
/// Maximum number of other failed ranks that the error lists; a large launch can fail in hundreds.
const MAX_LISTED: usize = 8;

/// The failure of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Index of the rank among those of this node.
    pub index: usize,
    pub exit: RankExit,
}

/// All failures before the ranks were told to end.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// The failure that is taken as the cause, and the time of the first failure.
    first: Option<(Failure, Instant)>,
    others: Vec<Failure>,
}

impl Failures {
    /// Returns the failure that is taken as the cause so far.
    pub fn first(&self) -> Option<Failure> {
        self.first.map(|(failure, _)| failure)
    }

    /// Returns the other failures.
    pub fn others(&self) -> &[Failure] {
        &self.others
    }

    /// Records a failure that the launcher saw at `now`.
    pub fn record(&mut self, failure: Failure, now: Instant) {
        let Some((first, time)) = &mut self.first else {
            self.first = Some((failure, now));
            return;
        };
        let is_crash = matches!(failure.exit, RankExit::Signal(signal) if CRASH_SIGNALS.contains(&signal));
        let may_be_cause =
            matches!(first.exit, RankExit::Code(_)) && now.duration_since(*time) < CAUSE_WINDOW;
        self.others.push(if is_crash && may_be_cause { std::mem::replace(first, failure) } else { failure });
    }
}

/// Facts about the first failure, for the error of the launch.
pub(crate) struct FailureReport<'a> {
    /// The rank and its process id.
    pub process: String,
    pub exit: RankExit,
    pub host: &'a str,
    /// Text in front of each of the last lines.
    pub prefix: &'a str,
    /// `None` if the rank wrote to the terminal itself.
    pub last_lines: Option<Vec<String>>,
    pub others: Vec<OtherFailure>,
}

/// A rank that failed soon after the first.
pub(crate) struct OtherFailure {
    pub rank: usize,
    pub exit: RankExit,
    /// The line of its output that most likely explains the failure.
    pub line: Option<String>,
}

impl FailureReport<'_> {
    /// Builds the error of a launch in which a rank failed.
    pub fn into_error(self) -> Error {
        let Self { process, exit, host, prefix, last_lines, others } = self;
        let mut message = format!("{process} {exit} on host {host}");
        match last_lines.as_deref() {
            None => message += "; its output is above",
            Some([]) => message += "; it wrote nothing",
            Some([line]) => message += &format!("; its last line:\n{prefix}{line}"),
            Some(lines) => {
                message += &format!("; its last {} lines:", lines.len());
                for line in lines {
                    message += &format!("\n{prefix}{line}");
                }
            }
        }
        for OtherFailure { rank, exit, line } in others.iter().take(MAX_LISTED) {
            message += &format!("\nalso failed: rank {rank} ({})", exit.brief());
            message += &line.as_ref().map_or_else(String::new, |line| format!(": {line}"));
        }
        if let more @ 1.. = others.len().saturating_sub(MAX_LISTED) {
            message += &format!("\nalso failed: {more} more");
        }
        Error::new(ErrorKind::Exit(exit.exit_code()), message)
    }
}

/// Builds the error of a launch that was stopped by a signal.
pub(crate) fn stopped_by(signal: i32) -> Error {
    let message = format!("stopped by signal {}", signals::number_and_name(signal));
    Error::new(ErrorKind::Exit(128 + signal), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The index of the first failure after two, which come `apart` from each other.
    fn first_of(exits: [RankExit; 2], apart: Duration) -> usize {
        let mut failures = Failures::default();
        let begin = Instant::now();
        for (index, exit) in exits.into_iter().enumerate() {
            failures.record(Failure { index, exit }, begin + apart * index as u32);
        }
        let first = failures.first().unwrap().index;
        assert_eq!(failures.others(), [Failure { index: 1 - first, exit: exits[1 - first] }]);
        first
    }

    #[test]
    fn a_crash_soon_after_an_exit_is_the_cause() {
        let soon = Duration::from_millis(300);
        let (code, killed, aborted) = (RankExit::Code(8), RankExit::Signal(9), RankExit::Signal(6));
        assert_eq!(first_of([code, killed], soon), 1);
        assert_eq!(first_of([code, killed], CAUSE_WINDOW), 0);
        assert_eq!(first_of([code, aborted], soon), 0);
        assert_eq!(first_of([code, code], soon), 0);
        assert_eq!(first_of([killed, killed], soon), 0);
    }

    fn error(last_lines: Option<&[&str]>, others: Vec<OtherFailure>) -> Error {
        let report = FailureReport {
            process: "rank 3 (pid 77)".into(),
            exit: RankExit::Signal(9),
            host: "here",
            prefix: "[rank 3] ",
            last_lines: last_lines.map(|lines| lines.iter().map(|line| line.to_string()).collect()),
            others,
        };
        report.into_error()
    }

    #[test]
    fn the_first_failed_rank_is_quoted() {
        let text = |lines: Option<&[&str]>| error(lines, Vec::new()).to_string();
        assert_eq!(error(None, Vec::new()).exit_code(), 137);
        let head = "rank 3 (pid 77) was killed by signal 9 (SIGKILL) on host here";
        assert_eq!(text(Some(&["a", "b"])), format!("{head}; its last 2 lines:\n[rank 3] a\n[rank 3] b"));
        assert_eq!(text(Some(&["a"])), format!("{head}; its last line:\n[rank 3] a"));
        assert_eq!(text(Some(&[])), format!("{head}; it wrote nothing"));
        assert_eq!(text(None), format!("{head}; its output is above"));
    }

    #[test]
    fn the_others_follow_in_one_line_each() {
        let other = |rank| OtherFailure { rank, exit: RankExit::Code(1), line: Some("why".into()) };
        let mut others: Vec<OtherFailure> = (10..20).map(other).collect();
        others[1] = OtherFailure { rank: 1, exit: RankExit::Signal(11), line: None };
        let error = error(Some(&["a"]), others);
        assert_eq!(error.exit_code(), 137);
        let message = error.to_string();
        let lines: Vec<&str> = message.lines().skip(1).collect();
        assert_eq!(lines.len(), 1 + MAX_LISTED + 1);
        assert_eq!(lines[0], "[rank 3] a");
        assert_eq!(lines[1], "also failed: rank 10 (exit code 1): why");
        assert_eq!(lines[2], "also failed: rank 1 (signal 11 (SIGSEGV))");
        assert_eq!(lines[9], "also failed: 2 more");
    }

    #[test]
    fn a_stop_is_named() {
        assert_eq!(stopped_by(15).exit_code(), 143);
        assert_eq!(stopped_by(15).to_string(), "stopped by signal 15 (SIGTERM)");
    }
}
