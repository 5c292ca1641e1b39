//! The last words: what the user reads first, since they stand at the end.

use super::process::RankProcess;
use super::signals;
use crate::error::{Error, ErrorKind};

/// What is known of a failed rank besides its process.
pub(super) struct Evidence<'a> {
    pub host: &'a str,
    pub prefix: &'a str,
    /// Its last lines; `None` when it wrote to the terminal itself.
    pub lines: Option<Vec<String>>,
}

/// The error for a launch in which `failed` was the first to fail.
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
    Error::new(ErrorKind::Exit(failed.end.map_or(1, |end| end.exit_code())), words)
}

/// The error for a launch that was stopped by a signal.
pub(super) fn stopped(signal: i32) -> Error {
    Error::new(ErrorKind::Exit(128 + signal), format!("stopped by signal {}", signals::describe(signal)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::process::End;
    use rustix::process::Pid;

    fn said(lines: Option<&[&str]>) -> Error {
        let mut failed = RankProcess { rank: 3, pid: Pid::from_raw(77).unwrap(), end: Some(End::Signal(9)) };
        let lines = lines.map(|lines| lines.iter().map(|line| line.to_string()).collect());
        let error = failure(&failed, &Evidence { host: "here", prefix: "[rank 3] ", lines });
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
    fn a_stop_is_named() {
        assert_eq!(stopped(15).exit_code(), 143);
        assert_eq!(stopped(15).to_string(), "stopped by signal 15 (SIGTERM)");
    }
}
