//! The store that rank 0 serves over TCP.
//!
//! The store lives as long as one attempt of one run. Rank 0 binds MASTER_PORT, and every rank (rank 0 too) is a client
//! that first sends its identity. So the mistakes of a launch by hand end in a message and not in a wait: a rank that
//! is claimed twice, lost, or of another world size fails all processes, and a process of another run is refused.
//!
//! ```text
//!   every rank: TcpStore ── Client ── ClientConnection ──┐
//!                                                        │ frames of requests and responses (protocol)
//!   rank 0:     Server (one thread) ── ServerConnection ─┘
//!                 │  listens on the address of `bind`
//!               Registry: members, values and rules
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::environment::RankInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::store::claim::Claim;
use crate::store::{Store, not_set};

mod bind;
mod client;
mod client_connection;
mod protocol;
mod registry;
mod server;
mod server_connection;

use client::Client;
use protocol::{KEY_LIMIT, Request, Response};
use server::Server;

/// Longest name of a run, which is part of the limited names of groups.
const RUN_ID_LIMIT: usize = 512;

/// A client of the store of rank 0, and on rank 0 its server as well. Calls from several threads do not wait for each
/// other. When rank 0 drops its store, calls of all other ranks fail with [`ErrorKind::PeerFinished`]; other ranks may
/// drop theirs at any time. A rank whose process panics, or ends without dropping its store, fails the calls of all
/// others at once with [`ErrorKind::PeerLost`].
pub struct TcpStore {
    client: Client,
    // Kept for its drop, which ends the serving thread.
    _server: Option<Server>,
}

impl TcpStore {
    /// Serves the store on rank 0, and connects to it on every rank.
    ///
    /// # Errors
    /// `Timeout` when rank 0 cannot be reached within `timeout`; `Config` when another process has the same rank, when
    /// rank 0 has another run or world size, or without MASTER_ADDR; `Io` when another program has the port.
    pub fn from_rank_info(info: &RankInfo, timeout: Duration) -> Result<Self> {
        Self::connect(info, Claim::of(info), timeout)
    }

    fn connect(info: &RankInfo, claim: Claim, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let Some((host, port)) = &info.master else {
            return Err(Error::config(
                "MASTER_ADDR and MASTER_PORT are not set, so there is no store to share: start the program \
                 under burnrun (or another launcher)",
            ));
        };
        if claim.run_id.len() > RUN_ID_LIMIT {
            return Err(Error::config(format!(
                "TORCHELASTIC_RUN_ID has {} bytes; use at most {RUN_ID_LIMIT}",
                claim.run_id.len()
            )));
        }
        if !claim.rank.is_root() {
            return Ok(Self { client: Client::connect(host, *port, &claim, deadline)?, _server: None });
        }
        let resolved = client::resolve(host, *port)
            .map_err(|error| Error::config(format!("MASTER_ADDR={host} does not resolve: {error}")))?;
        let other_nodes = info.local_world_size < info.world_size && !client::is_address(host);
        let serve = Request::Hello { claim: claim.clone(), client: 0, serves: true };
        let bound = bind::listen(&resolved, other_nodes, &serve)?;
        let server = Server::start(bound.listener, claim.clone())?;
        let mut client = Client::connect_to(bound.own, &claim, deadline)?;
        if let Some(ip) = bound.advertised {
            client.set_local_ip(ip);
        }
        Ok(Self { client, _server: Some(server) })
    }

    /// `error` of a get that waited for `timeout`, with the store's remarks on absent processes; unchanged if it did
    /// not wait.
    fn with_remarks(&self, error: Error, timeout: Duration) -> Error {
        let remarks = if timeout.is_zero() { Vec::new() } else { self.remarks() };
        match remarks.is_empty() {
            true => error,
            false => Error::new(error.kind(), format!("{error}; {}", remarks.join("; "))),
        }
    }

    /// This process's address as rank 0 sees it, which a rank advertises to its peers. Its port belongs to the
    /// connection with the store.
    pub fn local_addr(&self) -> SocketAddr {
        self.client.local()
    }

    /// Address at which this process reaches the server.
    #[cfg(test)]
    fn server_addr(&self) -> SocketAddr {
        self.client.server()
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        match self.client.call(&Request::Set { key: key.into() }, value, Duration::ZERO)? {
            (Response::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key(key)?;
        let wait_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        match self.client.call(&Request::Get { key: key.into(), wait_ms }, &[], timeout)? {
            (Response::Value, value) => Ok(value),
            (Response::NotSet, _) => Err(self.with_remarks(not_set(key, timeout), timeout)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_key(key)?;
        match self.client.call(&Request::Add { key: key.into(), delta }, &[], Duration::ZERO)? {
            (Response::Count(count), _) => Ok(count),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn remarks(&self) -> Vec<String> {
        match self.client.call(&Request::Remarks, &[], Duration::ZERO) {
            Ok((Response::Remarks(remarks), _)) => remarks,
            _ => Vec::new(),
        }
    }
}

fn check_key(key: &str) -> Result<()> {
    if key.len() <= KEY_LIMIT {
        return Ok(());
    }
    Err(Error::config(format!("a store key of {} bytes is over the limit of {KEY_LIMIT}", key.len())))
}

fn unexpected(response: &Response) -> Error {
    Error::new(
        ErrorKind::Io,
        format!("the store answered another request than the one that was sent: {response:?}"),
    )
}

#[cfg(test)]
mod tests;
