//! Limits of a group's waits, and the network and memory that it uses.
//!
//! "Slow" and "dead" have separate limits: a group waits for a living peer that prepares its data for ten minutes, but
//! a peer whose process is gone is an error within seconds.

use std::time::Duration;

use derive_new::new;
use serde::{Deserialize, Serialize};

use crate::environment::process_environment;
use crate::error::{Error, Result};

/// Library that moves tensors between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommunicatorKind {
    /// The fastest one that all ranks have: NCCL where the group was made for it, else host memory.
    #[default]
    Auto,
    /// NCCL, or an error that says what is missing.
    Nccl,
    /// Host memory, whatever the device.
    Host,
}

/// Way of bytes between ranks that communicate through host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransportKind {
    /// Shared memory between ranks of one host where it is available, TCP between all others.
    #[default]
    Auto,
    /// Shared memory between all ranks that have the same host name, or an error that says why not; TCP between hosts.
    Shm,
    /// TCP between all ranks.
    Tcp,
}

/// Variables that [`GroupOptions`] reads.
const VARIABLES: [&str; 9] = [
    "BURN_DDP_TIMEOUT",
    "BURN_DDP_PEER_TIMEOUT",
    "BURN_DDP_RENDEZVOUS_TIMEOUT",
    "BURN_DDP_IFACE",
    "BURN_DDP_COMM",
    "BURN_DDP_TRANSPORT",
    "BURN_DDP_SHM_BYTES",
    "BURN_DDP_HOST",
    "BURN_DDP_CONNECT_ALONE",
];

/// Limits and addresses of a process group.
#[derive(Clone, Debug, PartialEq, new)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Longest wait of one collective for living peers (`BURN_DDP_TIMEOUT`, seconds; 30 minutes).
    #[new(value = "Duration::from_secs(30 * 60)")]
    pub timeout: Duration,
    /// Longest silence of a peer before it counts as lost (`BURN_DDP_PEER_TIMEOUT`, seconds; 30). A process that is
    /// busy in its own code is not silent, because its heartbeats have a thread of their own.
    #[new(value = "Duration::from_secs(30)")]
    pub peer_timeout: Duration,
    /// Longest wait for all ranks to appear at start-up (`BURN_DDP_RENDEZVOUS_TIMEOUT`, seconds; 5 minutes).
    #[new(value = "Duration::from_secs(300)")]
    pub rendezvous_timeout: Duration,
    /// Interface or address to listen on and to advertise to peers (`BURN_DDP_IFACE`); by default the address from
    /// which this process reaches rank 0.
    #[new(default)]
    pub interface: Option<String>,
    /// Library that moves tensors (`BURN_DDP_COMM`: `auto`, `nccl` or `host`; auto).
    #[new(default)]
    pub communicator: CommunicatorKind,
    /// Way of bytes between ranks in host memory (`BURN_DDP_TRANSPORT`: `auto`, `shm` or `tcp`; auto).
    #[new(default)]
    pub transport: TransportKind,
    /// Most bytes of shared memory that the ranks of a host may reserve together for this group (`BURN_DDP_SHM_BYTES`;
    /// no limit). A group of two takes 2134016, one of eight 8.2 MiB, none more than 10 MiB up to 64 ranks. With a
    /// smaller limit all ranks of this host communicate over TCP.
    #[new(default)]
    pub shared_memory: Option<usize>,
    /// Name of this rank's host (`BURN_DDP_HOST`; the name that the system gives). Ranks with different names share no
    /// memory.
    #[new(default)]
    pub host: Option<String>,
    /// Runs the collectives of a world of one as those of several ranks (`BURN_DDP_CONNECT_ALONE`, 1 or 0; 0), to
    /// measure their cost.
    #[new(default)]
    pub connect_alone: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl GroupOptions {
    /// The defaults, changed by the process environment; see [`GroupOptions::from_lookup`].
    ///
    /// # Errors
    /// Those of [`GroupOptions::from_lookup`], and `Config` naming a variable whose value is not UTF-8.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(process_environment(&VARIABLES)?)
    }

    /// The defaults, changed by the variables that `lookup` finds.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::error::ErrorKind::Config) naming variable and value when a number of
    /// seconds does not parse or is not positive, or a word is none of those listed.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let seconds = |name: &str, default: Duration| match lookup(name) {
            None => Ok(default),
            Some(text) => text
                .trim()
                .parse()
                .ok()
                .filter(|seconds: &f64| *seconds > 0.0)
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .ok_or_else(|| {
                    Error::config(format!(
                        "{name}={text}: set it to a positive number of seconds, at most 1e19"
                    ))
                }),
        };
        let communicator = match lookup("BURN_DDP_COMM").as_deref() {
            None | Some("auto") => CommunicatorKind::Auto,
            Some("nccl") => CommunicatorKind::Nccl,
            Some("host") => CommunicatorKind::Host,
            Some(other) => {
                return Err(Error::config(format!("BURN_DDP_COMM={other}: set it to auto, nccl or host")));
            }
        };
        let transport = match lookup("BURN_DDP_TRANSPORT").as_deref() {
            None | Some("auto") => TransportKind::Auto,
            Some("shm") => TransportKind::Shm,
            Some("tcp") => TransportKind::Tcp,
            Some(other) => {
                return Err(Error::config(format!("BURN_DDP_TRANSPORT={other}: set it to auto, shm or tcp")));
            }
        };
        let bytes = |text: String| {
            let parsed = text.trim().parse();
            parsed
                .map_err(|_| Error::config(format!("BURN_DDP_SHM_BYTES={text}: set it to a number of bytes")))
        };
        let connect_alone = match lookup("BURN_DDP_CONNECT_ALONE").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => {
                return Err(Error::config(format!("BURN_DDP_CONNECT_ALONE={other}: set it to 1 or 0")));
            }
        };
        let defaults = Self::new();
        Ok(Self {
            timeout: seconds("BURN_DDP_TIMEOUT", defaults.timeout)?,
            peer_timeout: seconds("BURN_DDP_PEER_TIMEOUT", defaults.peer_timeout)?,
            rendezvous_timeout: seconds("BURN_DDP_RENDEZVOUS_TIMEOUT", defaults.rendezvous_timeout)?,
            interface: lookup("BURN_DDP_IFACE"),
            communicator,
            transport,
            shared_memory: lookup("BURN_DDP_SHM_BYTES").map(bytes).transpose()?,
            host: lookup("BURN_DDP_HOST"),
            connect_alone,
        })
    }

    /// The same with another [`timeout`](Self::timeout).
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The same with another [`peer_timeout`](Self::peer_timeout).
    pub fn with_peer_timeout(self, peer_timeout: Duration) -> Self {
        Self { peer_timeout, ..self }
    }

    /// The same with another [`transport`](Self::transport).
    pub fn with_transport(self, transport: TransportKind) -> Self {
        Self { transport, ..self }
    }

    /// The same with another [`rendezvous_timeout`](Self::rendezvous_timeout).
    pub fn with_rendezvous_timeout(self, rendezvous_timeout: Duration) -> Self {
        Self { rendezvous_timeout, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_change_the_defaults_and_nonsense_is_named() {
        let read = |value: &'static str| {
            GroupOptions::from_lookup(move |name| (name == "BURN_DDP_TIMEOUT").then(|| value.into()))
        };
        assert_eq!(read("2.5").unwrap().timeout, Duration::from_millis(2500));
        assert_eq!(read("2.5").unwrap().peer_timeout, GroupOptions::new().peer_timeout);
        for value in ["", "soon", "0", "-1", "inf", "nan"] {
            let error = read(value).unwrap_err().to_string();
            assert!(error.contains(&format!("BURN_DDP_TIMEOUT={value}")), "{error}");
        }
    }

    #[test]
    fn words_are_those_listed() {
        let read = |name: &'static str, value: &'static str| {
            GroupOptions::from_lookup(move |asked| (asked == name).then(|| value.into()))
        };
        assert_eq!(read("BURN_DDP_COMM", "nccl").unwrap().communicator, CommunicatorKind::Nccl);
        assert_eq!(read("BURN_DDP_COMM", "auto").unwrap(), GroupOptions::new());
        assert!(read("BURN_DDP_CONNECT_ALONE", "1").unwrap().connect_alone);
        assert_eq!(read("BURN_DDP_TRANSPORT", "tcp").unwrap().transport, TransportKind::Tcp);
        assert_eq!(read("BURN_DDP_SHM_BYTES", "4096").unwrap().shared_memory, Some(4096));
        for (name, value) in [
            ("BURN_DDP_COMM", "gloo"),
            ("BURN_DDP_COMM", ""),
            ("BURN_DDP_TRANSPORT", "rdma"),
            ("BURN_DDP_SHM_BYTES", "4 MB"),
            ("BURN_DDP_CONNECT_ALONE", "yes"),
        ] {
            let error = read(name, value).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}={value}")), "{error}");
        }
    }
}
