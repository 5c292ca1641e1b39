//! Output: one line for each check.

use std::fmt;

/// Prints lines and remembers failures.
pub(crate) struct Report {
    /// Rank 0 alone prints passes; each rank prints its failures.
    root: bool,
    failed: bool,
}

impl Report {
    pub(crate) fn new(root: bool) -> Self {
        Self { root, failed: false }
    }

    pub(crate) fn passed(&self) -> bool {
        !self.failed
    }

    /// `PASS name: numbers`, or `FAIL name: why`.
    pub(crate) fn line<N: fmt::Display, E: fmt::Display>(&mut self, name: &str, outcome: Result<N, E>) {
        match outcome {
            Ok(numbers) if self.root => println!("PASS {name}: {numbers}"),
            Ok(_) => {}
            Err(why) => {
                self.failed = true;
                println!("FAIL {name}: {why}");
            }
        }
    }

    /// Prints a number or an observation without a verdict.
    pub(crate) fn note(&self, text: impl fmt::Display) {
        if self.root {
            println!("NOTE {text}");
        }
    }
}
