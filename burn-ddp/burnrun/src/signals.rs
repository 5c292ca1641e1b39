//! Facts about signals: which of them the launcher handles, and their names.

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

/// Signals that end the launch.
pub(crate) const STOP_SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Returns the signals that the launcher handles.
///
/// HUP, INT and QUIT are left out if they were ignored when the launcher started. `nohup`, and shells that put a job in
/// the background, ignore them on its behalf; handling them would undo that.
pub(crate) fn signals_to_handle() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    without_ignored(parse_ignored_mask(&status))
}

/// Bit `n - 1` of `ignored` stands for signal n.
fn without_ignored(ignored: u64) -> Vec<i32> {
    let handled = |signal: &i32| {
        let may_be_ignored = [SIGHUP, SIGINT, SIGQUIT].contains(signal);
        !(may_be_ignored && ignored & (1 << (signal - 1)) != 0)
    };
    STOP_SIGNALS.into_iter().filter(handled).chain([SIGUSR1, SIGUSR2, SIGCHLD]).collect()
}

/// Reads the mask of ignored signals from the text of `/proc/self/status`; zero if it is not there.
fn parse_ignored_mask(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// Returns `9 (SIGKILL)`, or the bare number for a signal without a name.
pub(crate) fn number_and_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("{signal} ({name})"),
        None => signal.to_string(),
    }
}

/// Returns `SIGKILL`, or `signal 34` for a signal without a name.
pub(crate) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_stay_ignored() {
        assert!(without_ignored(0).contains(&SIGHUP));
        let nohup = parse_ignored_mask("Name:\tx\nSigBlk:\t0\nSigIgn:\t0000000000000001\n");
        assert_eq!(nohup, 1);
        assert!(!without_ignored(nohup).contains(&SIGHUP));
        assert!(without_ignored(nohup).contains(&SIGINT));
        assert!(without_ignored(u64::MAX).contains(&SIGTERM), "nobody means to ignore SIGTERM");
        assert!(without_ignored(u64::MAX).contains(&SIGCHLD));
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(number_and_name(9), "9 (SIGKILL)");
        assert_eq!(number_and_name(60), "60");
        assert_eq!(name(15), "SIGTERM");
    }
}
