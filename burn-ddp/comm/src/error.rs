//! One error type for every floor: who failed, in which operation, and why.
//!
//! A failure in one process is an error in all of them, so an [`Error`] has to survive being repeated: it is
//! cheap to clone, a poisoned group hands the same first cause to every later call, and its text can be sent
//! to the other ranks. Callers branch on [`ErrorKind`]; people read the message, which names the value at
//! fault and what to do.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::rank::Rank;

/// What went wrong, for code that has to branch on it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller's input is wrong: an environment variable, a flag, an argument. Nothing was started.
    Config,
    /// A wait reached its deadline although nobody is known to be dead.
    Timeout,
    /// A peer's process died, was stopped, or its network is gone; the payload is that peer.
    PeerLost(Rank),
    /// A peer met an error of its own, which the message repeats; the payload is that peer.
    PeerFailed(Rank),
    /// A peer has left the group in good order and will take part in nothing more; the payload is that peer.
    PeerFinished(Rank),
    /// Ranks disagree on what to do: another operation, element count, dtype or set of parameters.
    Mismatch,
    /// Ranks agree on what to do, but values that must be equal on all of them are not.
    Diverged,
    /// This process aborted the group by request.
    Aborted,
    /// Code that the user's program brought along (a data set, a batcher, a training step, a metric) panicked or
    /// broke its contract.
    Program,
    /// A socket, file or process call failed.
    Io,
    /// A device, its driver or the library that communicates between devices failed.
    Device,
    /// A launched program failed; the payload is the exit code to leave with.
    Exit(i32),
}

/// An error of any floor. See the [module documentation](self).
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` with a message that names the value at fault and what to do.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner { kind, message: message.into(), source: None }))
    }

    /// Like [`Error::new`], keeping the error it came from.
    pub fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self(Arc::new(Inner { kind, message: message.into(), source: Some(source.into()) }))
    }

    /// Wrong input by the caller ([`ErrorKind::Config`]).
    pub fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    /// A failed system call ([`ErrorKind::Io`]); `message` says what was being done.
    pub fn io(message: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::with_source(ErrorKind::Io, message, source.into())
    }

    /// A panic of the user's code ([`ErrorKind::Program`]), with its message; `what` says whose code it was.
    pub fn panicked(what: impl fmt::Display, payload: &(dyn Any + Send)) -> Self {
        Self::new(ErrorKind::Program, format!("{what} panicked: {}", one_line(panic_text(payload))))
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The same error with `context` in front of its message, for floors that know more than the one below.
    pub fn context(&self, context: impl fmt::Display) -> Self {
        Self(Arc::new(Inner {
            kind: self.0.kind,
            message: format!("{context}: {}", self.0.message),
            source: self.0.source.as_ref().map(|source| source.to_string().into()),
        }))
    }

    /// The exit code a program should leave with: 2 for wrong input, a launched program's own code, else 1.
    pub fn exit_code(&self) -> i32 {
        match self.0.kind {
            ErrorKind::Config => 2,
            ErrorKind::Exit(code) => code,
            _ => 1,
        }
    }
}

/// The message of a panic.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// The lines of `text` as one: messages of Burn's checks have many, and an error is a line.
pub fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        match &self.0.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

// `source()` stays empty on purpose: the source's text is already part of the one line that `Display` prints,
// and reporters that walk the chain would print it twice.
impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_holds_message_and_source() {
        let error = Error::io("cannot bind 127.0.0.1:1", std::io::Error::other("in use"));
        assert_eq!(error.to_string(), "cannot bind 127.0.0.1:1: in use");
        assert_eq!(error.context("store").to_string(), "store: cannot bind 127.0.0.1:1: in use");
        assert_eq!(error.kind(), ErrorKind::Io);
    }

    #[test]
    fn exit_codes() {
        assert_eq!(Error::config("x").exit_code(), 2);
        assert_eq!(Error::new(ErrorKind::Exit(137), "x").exit_code(), 137);
        assert_eq!(Error::new(ErrorKind::PeerLost(Rank(1)), "x").exit_code(), 1);
    }
}
