//! The client of the store: calls from any thread.
//!
//! A call has a connection for itself while it lasts. It takes an idle one or opens another; the server takes any
//! number from one process. So a get that waits never delays a set of another thread, and no thread has to distribute
//! answers. There are as many connections as calls at the same time, of which start-up makes two or three.
//!
//! ```text
//!   idle ──call──> in use ──answer──> idle
//!                     └────no answer in time──> timed out (kept open until the client is dropped)
//! ```

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::client_connection::{CallError, ClientConnection};
use super::protocol::{Request, Response, encode};
use crate::deadline::{Deadline, seconds};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::store::claim::Claim;

/// Time for the server's answer on top of a call's own wait. The server has a thread of its own and answers at once, so
/// after this much silence its process is stopped or its host is gone.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time for one attempt to connect.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// Time for the server to answer a bye.
const BYE_LIMIT: Duration = Duration::from_secs(1);
/// Pause after the first failed attempt to connect; it doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_millis(10);
const LONGEST_BACKOFF: Duration = Duration::from_millis(250);

/// Number of the next client of this process.
static CLIENTS: AtomicU64 = AtomicU64::new(0);

/// Calls to the server at one address.
pub(super) struct Client {
    server: SocketAddr,
    local: SocketAddr,
    hello: Request,
    idle: Mutex<Vec<ClientConnection>>,
    /// Connections whose answer did not come in time. They stay open, because the server takes a process without
    /// connections for ended.
    timed_out: Mutex<Vec<ClientConnection>>,
    /// First error that ended the store for this client; every later call returns it.
    failure: OnceLock<Error>,
}

/// All addresses of `host`, in the order of the system's resolver.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((strip_brackets(host), port).to_socket_addrs()?.collect())
}

/// True if `host` is an address rather than a name; an IPv6 address may have a scope (`fe80::1%eth0`).
pub(super) fn is_address(host: &str) -> bool {
    match strip_brackets(host).split_once('%') {
        Some((address, _scope)) => address.parse::<Ipv6Addr>().is_ok(),
        None => strip_brackets(host).parse::<IpAddr>().is_ok(),
    }
}

/// `host` without the brackets around an IPv6 address that is written as in a URL.
fn strip_brackets(host: &str) -> &str {
    let host = host.trim();
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

impl Client {
    /// Connects to the store at `host`:`port`, which may not be there yet: tries all its addresses until `deadline`.
    ///
    /// # Errors
    /// `Timeout` with the best explanation of the failed attempts, or the error with which the store refuses `claim`.
    pub(super) fn connect(host: &str, port: u16, claim: &Claim, deadline: Deadline) -> Result<Self> {
        // The name of another node may appear later than this process, so each attempt resolves it anew.
        Self::connect_with_backoff(&format!("{host}:{port}"), || resolve(host, port), claim, deadline)
    }

    /// [`Client::connect`] to an address. It is not passed as text, which would lack the scope of an IPv6 address.
    pub(super) fn connect_to(address: SocketAddr, claim: &Claim, deadline: Deadline) -> Result<Self> {
        Self::connect_with_backoff(&address.to_string(), || Ok(vec![address]), claim, deadline)
    }

    fn connect_with_backoff(
        place: &str,
        resolve: impl Fn() -> io::Result<Vec<SocketAddr>>,
        claim: &Claim,
        deadline: Deadline,
    ) -> Result<Self> {
        let client = CLIENTS.fetch_add(1, Ordering::Relaxed);
        let hello = Request::Hello { claim: claim.clone(), client, serves: false };
        let mut backoff = FIRST_BACKOFF;
        // The latest explanation of the greatest weight. The last attempt may have too little time to find out
        // anything.
        let (mut weight, mut explanation) = (0, format!("{place} has no address"));
        loop {
            let addresses = resolve().unwrap_or_else(|error| {
                if weight == 0 {
                    explanation = error.to_string();
                }
                Vec::new()
            });
            for address in addresses {
                let attempt = Deadline::after(deadline.remaining().min(ATTEMPT_LIMIT));
                match ClientConnection::open(address, &hello, attempt) {
                    Ok(connection) => return Self::new(address, hello, connection),
                    // The store of an earlier attempt of this run may be about to end.
                    Err(CallError::Refused(error)) if !matches!(error.kind(), ErrorKind::PeerFinished(_)) => {
                        return Err(error);
                    }
                    Err(other) if other.weight(attempt.limit()) >= weight => {
                        weight = other.weight(attempt.limit());
                        explanation = format!("{address}: {other}");
                    }
                    Err(_) => {}
                }
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{} cannot reach the store of rank 0 at {place} within {} s ({explanation}): check \
                         that rank 0 is running, that MASTER_ADDR and MASTER_PORT are the same on all ranks, \
                         and that no firewall is in between",
                        claim.rank,
                        seconds(deadline.limit()),
                    ),
                ));
            }
            std::thread::sleep(backoff.min(left));
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }

    fn new(server: SocketAddr, hello: Request, connection: ClientConnection) -> Result<Self> {
        let local = connection
            .local_addr()
            .map_err(|error| Error::io("cannot read the address of a connection", error))?;
        Ok(Self {
            server,
            local,
            hello,
            idle: Mutex::new(vec![connection]),
            timed_out: Mutex::default(),
            failure: OnceLock::new(),
        })
    }

    /// Address at which the server was reached.
    #[cfg(test)]
    pub(super) fn server(&self) -> SocketAddr {
        self.server
    }

    /// Address of this end of the connection.
    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Replaces the address of this end by one at which other hosts reach it.
    pub(super) fn set_local_ip(&mut self, ip: IpAddr) {
        self.local.set_ip(ip);
    }

    /// Sends one request and returns its answer, which may take `wait` by itself.
    ///
    /// # Errors
    /// `Timeout` when the server does not answer, else the error that has ended the store for this client.
    pub(super) fn call(
        &self,
        request: &Request,
        value: &[u8],
        wait: Duration,
    ) -> Result<(Response, Vec<u8>)> {
        self.call_until(request, value, Deadline::after(wait.saturating_add(ANSWER_LIMIT)))
    }

    pub(super) fn call_until(
        &self,
        request: &Request,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<(Response, Vec<u8>)> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        let request = encode(request, value.len())?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match idle {
            Some(connection) => Ok(connection),
            None => ClientConnection::open(self.server, &self.hello, deadline),
        };
        let mut connection = connection.map_err(|error| self.to_error(error))?;
        let answer = connection.call(&request, value, deadline);
        let kept = if answer.is_ok() { &self.idle } else { &self.timed_out };
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        answer.map_err(|error| self.to_error(error))
    }

    fn to_error(&self, error: CallError) -> Error {
        match error {
            // The server may only be slow, so later calls try again. Every other error is final.
            CallError::Silent(limit) => Error::new(
                ErrorKind::Timeout,
                format!(
                    "rank 0, which serves the store at {}, did not answer within {} s: its process is stopped \
                     or its host is gone",
                    self.server,
                    seconds(limit)
                ),
            ),
            CallError::Refused(error) => self.failure.get_or_init(|| error).clone(),
            lost @ (CallError::Closed(_) | CallError::Foreign(_)) => {
                let error = || {
                    Error::new(
                        ErrorKind::PeerLost(Rank(0)),
                        format!("rank 0, which serves the store at {}, is lost: {lost}", self.server),
                    )
                };
                self.failure.get_or_init(error).clone()
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Without a bye the server takes this process for lost, as it should after a panic.
        if std::thread::panicking() || self.failure.get().is_some() {
            return;
        }
        let deadline = Deadline::after(BYE_LIMIT);
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = idle.map_or_else(|| ClientConnection::open(self.server, &self.hello, deadline), Ok);
        if let (Ok(mut connection), Ok(bye)) = (connection, encode(&Request::Bye, 0)) {
            // A server that does not answer has ended, or learns from the closed connections that this process has.
            let _ = connection.call(&bye, &[], deadline);
        }
    }
}
