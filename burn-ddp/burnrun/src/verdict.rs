//! The last words: what the user reads first, since they stand at the end.

use super::process::{End, RankProcess};
use super::signals;
use burn_ddp_comm::{Error, ErrorKind};

/// Other failed ranks that are listed; a large launch fails in hundreds.
const LISTED: usize = 8;

/// What is known of a failed rank besides its process.
pub(super) struct Evidence<'a> {
    pub host: &'a str,
    pub prefix: &'a str,
    /// Its last lines; `None` when it wrote to the terminal itself.
    pub lines: Option<Vec<String>>,
    pub others: Vec<AlsoFailed>,
}

/// A rank that failed soon after the first. The launcher sees ends, not causes: a rank that only lost its peer may
/// leave a moment before the peer does, and then the cause is among these.
pub(super) struct AlsoFailed {
    pub rank: usize,
    pub end: End,
    pub line: Option<String>,
}

/// The error for a launch in which `failed` was the first that was seen to fail.
pub(super) fn failure(failed: &RankProcess, evidence: &Evidence<'_>) -> Error {
    let end = failed.end.map_or_else(|| "did not end".into(), |end| end.to_string());
    let mut words = format!("{failed} {end} on host {}", evidence.host);
    match evidence.lines.as_deref() {
        None => words += "; its output is above",
        Some([]) => words += "; it wrote nothing",
        Some([line]) => words += &format!("; its last line:\n{}{line}", evidence.prefix),
        Some(lines) => {
            words += &format!("; its last {} lines:", lines.len());
            for line in lines {
                words += &format!("\n{}{line}", evidence.prefix);
            }
        }
    }
    for AlsoFailed { rank, end, line } in evidence.others.iter().take(LISTED) {
        words += &format!("\nalso failed: rank {rank} ({})", end.brief());
        words += &line.as_ref().map_or_else(String::new, |line| format!(": {line}"));
    }
    if let more @ 1.. = evidence.others.len().saturating_sub(LISTED) {
        words += &format!("\nalso failed: {more} more");
    }
    Error::new(ErrorKind::Exit(failed.end.map_or(1, |end| end.exit_code())), words)
}

/// The error for a launch that was stopped by a signal.
pub(super) fn stopped(signal: i32) -> Error {
    Error::new(ErrorKind::Exit(128 + signal), format!("stopped by signal {}", signals::describe(signal)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Pid;

    fn said(lines: Option<&[&str]>) -> Error {
        said_of(lines, Vec::new())
    }

    fn said_of(lines: Option<&[&str]>, others: Vec<AlsoFailed>) -> Error {
        let mut failed = RankProcess { rank: 3, pid: Pid::from_raw(77).unwrap(), end: Some(End::Signal(9)) };
        let lines = lines.map(|lines| lines.iter().map(|line| line.to_string()).collect());
        let error = failure(&failed, &Evidence { host: "here", prefix: "[rank 3] ", lines, others });
        failed.end = Some(End::Code(0));
        error
    }

    #[test]
    fn the_failed_rank_speaks_last() {
        let error = said(Some(&["a", "b"]));
        assert_eq!(error.exit_code(), 137);
        let head = "rank 3 (pid 77) was killed by signal 9 (SIGKILL) on host here";
        assert_eq!(error.to_string(), format!("{head}; its last 2 lines:\n[rank 3] a\n[rank 3] b"));
        assert_eq!(said(Some(&["a"])).to_string(), format!("{head}; its last line:\n[rank 3] a"));
        assert_eq!(said(Some(&[])).to_string(), format!("{head}; it wrote nothing"));
        assert_eq!(said(None).to_string(), format!("{head}; its output is above"));
    }

    #[test]
    fn the_others_follow_in_one_line_each() {
        let other = |rank| AlsoFailed { rank, end: End::Code(1), line: Some("why".into()) };
        let mut others: Vec<AlsoFailed> = (10..20).map(other).collect();
        others[1] = AlsoFailed { rank: 1, end: End::Signal(11), line: None };
        let error = said_of(Some(&["a"]), others);
        assert_eq!(error.exit_code(), 137);
        let words = error.to_string();
        let lines: Vec<&str> = words.lines().skip(1).collect();
        assert_eq!(lines.len(), 1 + LISTED + 1);
        assert_eq!(lines[0], "[rank 3] a");
        assert_eq!(lines[1], "also failed: rank 10 (exit code 1): why");
        assert_eq!(lines[2], "also failed: rank 1 (signal 11 (SIGSEGV))");
        assert_eq!(lines[9], "also failed: 2 more");
    }

    #[test]
    fn a_stop_is_named() {
        assert_eq!(stopped(15).exit_code(), 143);
        assert_eq!(stopped(15).to_string(), "stopped by signal 15 (SIGTERM)");
    }
}
