//! The end of a rank, in words and as an exit code.

use std::fmt;

use crate::signals;

/// The way a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankExit {
    Code(i32),
    Signal(i32),
    /// Another part of the launcher's program reaped the process first.
    Unknown,
}

impl RankExit {
    /// Returns a short form for brackets.
    pub fn brief(self) -> String {
        match self {
            Self::Code(code) => format!("exit code {code}"),
            Self::Signal(signal) => format!("signal {}", signals::number_and_name(signal)),
            Self::Unknown => "exit code unknown".into(),
        }
    }

    /// Returns the exit code that a shell would report.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::Unknown => 1,
        }
    }
}

impl fmt::Display for RankExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by signal {}", signals::number_and_name(*signal)),
            Self::Unknown => {
                f.write_str("ended, but its exit code was collected by another part of this program")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_read_as_in_a_shell() {
        assert_eq!(RankExit::Code(3).to_string(), "exited with code 3");
        assert_eq!(RankExit::Signal(9).to_string(), "was killed by signal 9 (SIGKILL)");
        assert_eq!(RankExit::Signal(9).brief(), "signal 9 (SIGKILL)");
        assert_eq!(
            [RankExit::Code(7), RankExit::Signal(9), RankExit::Unknown].map(RankExit::exit_code),
            [7, 137, 1]
        );
    }
}
