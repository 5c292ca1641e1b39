//! NCCL's result codes as errors.
//!
//! Results stay integers: an enumeration with the code of a later NCCL would be undefined behaviour. A code alone says
//! little, so an error has everything that NCCL offers: number and name of the code, its text, the library's last
//! message, and the usual cause if there is one.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use burn_ddp::{Error, ErrorKind};

use crate::symbols::{RawComm, Symbols};

/// `ncclSuccess`.
pub(crate) const SUCCESS: c_int = 0;
/// `ncclInProgress`: a non-blocking call goes on until `ncclCommGetAsyncError` returns another code.
pub(crate) const IN_PROGRESS: c_int = 7;

/// The name of `code` in `nccl.h` (as of 2.31) and its usual cause, if known.
fn meaning(code: c_int) -> (Option<&'static str>, Option<&'static str>) {
    let (name, cause) = match code {
        SUCCESS => ("ncclSuccess", ""),
        1 => (
            "ncclUnhandledCudaError",
            "a device or its driver failed: see nvidia-smi and the log of the system",
        ),
        2 => ("ncclSystemError", "network or shared memory: NCCL_DEBUG=WARN names the call"),
        3 => ("ncclInternalError", ""),
        4 => ("ncclInvalidArgument", ""),
        5 => ("ncclInvalidUsage", "NCCL_DEBUG=WARN says of what"),
        6 => ("ncclRemoteError", "a peer died or lost its network: see the other ranks"),
        IN_PROGRESS => ("ncclInProgress", ""),
        8 => ("ncclTimeout", ""),
        _ => return (None, None),
    };
    (Some(name), Some(cause).filter(|cause| !cause.is_empty()))
}

/// The error of the call `what`, which returned `code`. `comm` may be null. NCCL never clears its last message: if this
/// failure left none, the message is that of an earlier one.
pub(crate) fn failure(symbols: &Symbols, what: &str, code: c_int, comm: RawComm) -> Error {
    // SAFETY: NCCL takes any integer and returns a static text.
    let text = unsafe { line((symbols.get_error_string)(code)) };
    // SAFETY: NCCL does not read the communicator, so null or one in any state is valid. The text is in a buffer of the
    // library with a zero at its end; an error of another thread may garble the text, not lengthen it.
    let last = unsafe { line((symbols.get_last_error)(comm)) };
    Error::new(ErrorKind::Device, message(what, code, text, last))
}

fn message(what: &str, code: c_int, text: String, last: String) -> String {
    let (name, cause) = meaning(code);
    let code = name.map_or_else(|| format!("code {code}"), |name| format!("{name} (code {code})"));
    let parts = [code, text, last, cause.unwrap_or_default().to_owned()];
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    format!("{what} failed: {}", parts.join("; "))
}

/// The text at `text` as one line; empty for a null.
///
/// # Safety
///
/// `text` is null or points to characters that end in a zero.
unsafe fn line(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: of the caller; the text is copied before anything else is called.
    one_line(&unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// The lines of `text`, joined by semicolons.
pub(crate) fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use cudarc::nccl::sys::ncclResult_t;

    use super::*;
    use crate::library::Library;

    #[test]
    fn names_are_those_of_the_header() {
        use ncclResult_t::*;
        let codes = [
            ncclSuccess,
            ncclUnhandledCudaError,
            ncclSystemError,
            ncclInternalError,
            ncclInvalidArgument,
            ncclInvalidUsage,
            ncclRemoteError,
            ncclInProgress,
            ncclTimeout,
        ];
        for code in codes {
            assert_eq!(meaning(code as c_int).0, Some(format!("{code:?}").as_str()));
        }
        assert_eq!((SUCCESS, IN_PROGRESS), (ncclSuccess as c_int, ncclInProgress as c_int));
        assert_eq!(meaning(ncclNumResults as c_int), (None, None));
    }

    #[test]
    fn one_line_with_everything_that_is_known() {
        let line = |code, last: &str| message("ncclX", code, "text".into(), one_line(last));
        assert_eq!(
            line(2, "refused\n  by 10.0.0.7\n\n"),
            "ncclX failed: ncclSystemError (code 2); text; refused; by 10.0.0.7; \
             network or shared memory: NCCL_DEBUG=WARN names the call"
        );
        assert_eq!(line(3, ""), "ncclX failed: ncclInternalError (code 3); text");
        assert_eq!(line(99, ""), "ncclX failed: code 99; text");
    }

    #[test]
    fn texts_of_c() {
        // SAFETY: null, and a literal with a zero at its end.
        let lines = unsafe { [line(std::ptr::null()), line(c"a\nb".as_ptr())] };
        assert_eq!(lines, ["", "a; b"]);
    }

    #[test]
    #[ignore = "needs NCCL: set BURN_DDP_TEST_NCCL to a libnccl.so.2"]
    fn the_texts_of_a_real_library() {
        let file = std::env::var_os("BURN_DDP_TEST_NCCL").expect("BURN_DDP_TEST_NCCL");
        let symbols = Library::open(file.as_ref()).unwrap().symbols();
        let null = std::ptr::null_mut();
        // SAFETY: NCCL checks for a null communicator and writes nothing then.
        let code = unsafe { (symbols.comm_get_async_error)(null, &mut 0) };
        let error = failure(&symbols, "ncclCommGetAsyncError", code, null);
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Device, 1));
        let error = error.to_string();
        let known = "ncclCommGetAsyncError failed: ncclInvalidArgument (code 4); invalid argument (run with NCCL_DEBUG";
        assert!(error.starts_with(known) && error.ends_with("comm argument is NULL"), "{error}");
        let unknown = failure(&symbols, "x", 99, null).to_string();
        assert!(unknown.starts_with("x failed: code 99; unknown result code; "), "{unknown}");
    }
}
