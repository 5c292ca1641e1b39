//! Encoding of the small messages that processes exchange, in postcard.
//!
//! The format describes nothing of itself, so the sender and the receiver must run the same build. `what` in these
//! functions names the message in the error.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};

/// The bytes of `value`.
///
/// # Errors
/// `Config` naming `what` when the type of `value` has no encoding.
pub fn encode(what: &str, value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| Error::config(format!("cannot encode {what}: {error}")))
}

/// The value that [`encode`] made `bytes` of.
///
/// # Errors
/// `Mismatch` naming `what` when `bytes` are no encoding of a `T`.
pub fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        let text = format!("cannot read {what} ({error}): all ranks must run the same build");
        Error::new(ErrorKind::Mismatch, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_other_bytes_are_named() {
        let value = (7u32, String::from("text"), Some(-1i64));
        let bytes = encode("a test message", &value).unwrap();
        assert_eq!(decode::<(u32, String, Option<i64>)>("a test message", &bytes).unwrap(), value);
        let error = decode::<(u32, String)>("a test message", &bytes[..3]).expect_err("cut");
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("cannot read a test message"), "{error}");
    }
}
