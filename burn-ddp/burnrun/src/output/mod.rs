//! Output of the ranks: from their pipes to the console, to files and into memory.
//!
//! ```text
//!            pipe              whole lines, prefixed
//!  rank 0 ─────────► Copier ─┬───────────────────────► Console
//!                            ├─► log file (bytes as they come)
//!                            └─► LastLines (quoted if the rank fails)
//! ```
//!
//! Each stream of each rank has a thread that runs a `Copier` and blocks on the pipe. If the console blocks, these
//! threads block, then the pipes fill, then the ranks wait, and no output is lost. The supervisor itself never writes
//! to the console, so it can always act.

pub(crate) mod console;
pub(crate) mod copier;
pub(crate) mod log_files;
pub(crate) mod routing;
pub(crate) mod terminal;
