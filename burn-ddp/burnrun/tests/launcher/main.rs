//! Tests of the built `burnrun` with shell scripts as ranks.
//!
//! Every wait has a deadline. A launcher that still runs when its test ends is killed, which ends its ranks too.

#![cfg(target_os = "linux")]

mod launched;

mod environment;
mod failures;
mod orphans;
mod output;
mod signals;
mod terminal;
mod usage;
