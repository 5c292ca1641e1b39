//! The store that rank 0 serves over TCP.
//!
//! It lives as long as one attempt of one run: rank 0 binds MASTER_PORT, everybody (rank 0 too) is a client,
//! and every client says who it is before anything else. So the mistakes of a launch by hand, which elsewhere
//! end in a wait, end here in a message: a rank that is taken twice, lost, or of another world size fails all
//! processes, and a process of another run is told so. `board.rs` decides, `server.rs` and `connection.rs` move bytes, `bind.rs` finds the
//! place to listen; `client.rs` and `link.rs` are the other end, `protocol.rs` is what both speak.

use std::net::SocketAddr;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::RankInfo;
use crate::store::{Claim, Store, not_set};

mod bind;
mod board;
mod client;
mod connection;
mod link;
mod protocol;
mod server;

use client::Client;
use protocol::{KEY_LIMIT, Request, Response};
use server::Server;

/// Longest name of a run. It is part of the names of groups, which have limits of their own.
const RUN_ID_LIMIT: usize = 512;

/// A client of the store of rank 0, and on rank 0 its server as well. Calls from several threads do not wait
/// for each other. When rank 0 drops its own, calls of all others fail with
/// [`ErrorKind::PeerFinished`]; when another rank does, nothing happens. A rank whose process ends without
/// dropping it, or panics, is an [`ErrorKind::PeerLost`] for all others at once.
pub struct TcpStore {
    client: Client,
    // Held for its drop, which ends the serving thread.
    _server: Option<Server>,
}

impl TcpStore {
    /// Serves the store on rank 0, and connects to it on every rank.
    ///
    /// # Errors
    /// `Timeout` when rank 0 cannot be reached within `timeout`; `Config` when the rank is taken already, when
    /// the run or world of rank 0 is another one, or without MASTER_ADDR; `Io` when another program has the
    /// port.
    pub fn from_rank_info(info: &RankInfo, timeout: Duration) -> Result<Self> {
        Self::join(info, Claim::of(info), timeout)
    }

    fn join(info: &RankInfo, claim: Claim, timeout: Duration) -> Result<Self> {
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
        let elsewhere = info.local_world_size < info.world_size && !client::is_address(host);
        let serve = Request::Hello { claim: claim.clone(), client: 0, serves: true };
        let bound = bind::listen(&resolved, elsewhere, &serve)?;
        let server = Server::start(bound.listener, claim.clone())?;
        let mut client = Client::connect_to(bound.own, &claim, deadline)?;
        if let Some(ip) = bound.outward {
            client.seen_from_outside(ip);
        }
        Ok(Self { client, _server: Some(server) })
    }

    /// `error` of a wait of `timeout`, with what the store knows about who is not there. Nobody waited if it
    /// was only a look.
    fn in_vain(&self, error: Error, timeout: Duration) -> Error {
        let remarks = if timeout.is_zero() { Vec::new() } else { self.remarks() };
        match remarks.is_empty() {
            true => error,
            false => Error::new(error.kind(), format!("{error}; {}", remarks.join("; "))),
        }
    }

    /// This process's address as rank 0 sees it: what a rank advertises to its peers. Its port belongs to the
    /// connection.
    pub fn local_addr(&self) -> SocketAddr {
        self.client.local()
    }

    /// Where this process reaches the server.
    pub fn server_addr(&self) -> SocketAddr {
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
            (Response::NotSet, _) => Err(self.in_vain(not_set(key, timeout), timeout)),
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
    Error::new(ErrorKind::Io, format!("the store gave an answer to another question: {response:?}"))
}

#[cfg(test)]
mod tests;
