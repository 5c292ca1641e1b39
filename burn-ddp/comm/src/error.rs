//! The one error type of all packages.
//!
//! A failure in one process is an error in all of them, so an [`Error`] gets repeated: it is cheap to clone, a failed
//! group returns the same first cause from every later call, and its text travels to the other ranks. Programs branch
//! on the [`ErrorKind`]; people read the message, which says what happened, where, and what to do.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::rank::Rank;

/// Kind of an error, for programs that branch on it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller's input is wrong: an environment variable, a flag, an argument. Nothing was started.
    Config,
    /// A wait reached its deadline, and no peer is known to be dead.
    Timeout,
    /// The process of a peer died or was stopped, or its network is gone; the payload is that peer.
    PeerLost(Rank),
    /// A peer failed with an error of its own, which the message repeats; the payload is that peer.
    PeerFailed(Rank),
    /// A peer has left the group without an error and takes part in nothing more; the payload is that peer.
    PeerFinished(Rank),
    /// Ranks disagree on what to do: on the operation, element count, dtype or set of parameters.
    Mismatch,
    /// Ranks agree on what to do, but values that must be equal on all of them are not.
    Diverged,
    /// This process aborted the group by request.
    Aborted,
    /// Code of the user's program (a data set, a batcher, a training step, a metric) panicked or broke its contract.
    Program,
    /// A socket, file or process call failed.
    Io,
    /// A device, its driver or the library that communicates between devices failed.
    Device,
    /// A launched program failed; the payload is the exit code to leave with.
    Exit(i32),
}

/// An error of any module. See the [module documentation](self).
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

    /// A failed system call ([`ErrorKind::Io`]); `message` names the attempt.
    pub fn io(message: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::with_source(ErrorKind::Io, message, source.into())
    }

    /// A panic of the user's code ([`ErrorKind::Program`]) with its message; `what` names the code.
    pub fn panicked(what: impl fmt::Display, payload: &(dyn Any + Send)) -> Self {
        Self::new(ErrorKind::Program, format!("{what} panicked: {}", one_line(panic_text(payload))))
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The same error with `context` in front of its message.
    pub fn context(&self, context: impl fmt::Display) -> Self {
        Self(Arc::new(Inner {
            kind: self.0.kind,
            message: format!("{context}: {}", self.0.message),
            source: self.0.source.as_ref().map(|source| source.to_string().into()),
        }))
    }

    /// Exit code of a program that ends with this error: 2 for wrong input, a launched program's own code, else 1.
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

/// The lines of `text` joined to one, because an error is one line and panics of Burn have many.
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

// `source()` stays empty: `Display` already prints the source's text, and reporters that walk the chain would print it
// twice.
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
