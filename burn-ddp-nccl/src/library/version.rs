//! Versions of NCCL.

use std::ffi::c_int;
use std::fmt;

use serde::{Deserialize, Serialize};

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// The 2 of 2.18.3.
    pub major: u32,
    /// The 18 of 2.18.3.
    pub minor: u32,
    /// The 3 of 2.18.3.
    pub patch: u32,
}

impl Version {
    /// The oldest that is accepted: the first with the configuration that [`Config`](super::Config) is.
    pub(crate) const NEEDED: Version = Version { major: 2, minor: 18, patch: 0 };

    /// The version of a number of `ncclGetVersion`. Its form changed with 2.9 (`NCCL_VERSION` in `nccl.h`): 2.8.4 is
    /// 2804, 2.10.3 is 21003.
    pub fn from_code(code: c_int) -> Self {
        let code = code.unsigned_abs();
        let scale = if code >= 10_000 { 10_000 } else { 1_000 };
        Self { major: code / scale, minor: code % scale / 100, patch: code % 100 }
    }

    /// True if ranks with these versions may form a communicator. NCCL promises nothing for ranks of different
    /// releases; patches of one release speak the same protocol.
    pub(crate) fn works_with(self, other: Self) -> bool {
        (self.major, self.minor) == (other.major, other.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_number() {
        let text = |code| Version::from_code(code).to_string();
        assert_eq!([text(2408), text(2804)], ["2.4.8", "2.8.4"]);
        assert_eq!(
            [text(20906), text(21003), text(21800), text(23203)],
            ["2.9.6", "2.10.3", "2.18.0", "2.32.3"]
        );
        assert!(Version::from_code(2804) < Version::from_code(20906));
        assert!(Version::from_code(21706) < Version::NEEDED && Version::from_code(21801) > Version::NEEDED);
    }
}
