//! The client side of the store: calls from any thread.
//!
//! Every call has a connection to itself while it lasts. Idle ones are kept, and a call that finds none opens
//! another (the server takes any number from one process), so a get that waits never holds up a set from
//! another thread, nothing polls, and no thread has to hand answers to callers. The price is one connection
//! for each call at the same time, of which start-up makes two or three.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::link::{Link, Obstacle};
use super::protocol::{Request, Response, encode};
use crate::deadline::{Deadline, seconds};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::store::Claim;

/// Time for the server's answer on top of what a call waits for by itself. The server has a thread of its own
/// and answers at once, so this much silence means that its process is stopped or its host is gone.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time for one of several attempts to connect.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// Time for the server to hear a goodbye. Nothing depends on it but how the end of this process is taken.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Numbers the clients of this process.
static CLIENTS: AtomicU64 = AtomicU64::new(0);

/// Calls to the server at one address.
pub(super) struct Client {
    server: SocketAddr,
    local: SocketAddr,
    hello: Request,
    idle: Mutex<Vec<Link>>,
    /// Links whose answer never came. They stay open: to the server, a process without any has ended.
    spent: Mutex<Vec<Link>>,
    /// Set when the store has ended; every later call returns it.
    ended: OnceLock<Error>,
}

/// All addresses of `host`, in the order of the system's resolver.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((bare(host), port).to_socket_addrs()?.collect())
}

/// Whether `host` is an address rather than a name; an IPv6 address may have a scope (`fe80::1%eth0`).
pub(super) fn is_address(host: &str) -> bool {
    match bare(host).split_once('%') {
        Some((address, _scope)) => address.parse::<Ipv6Addr>().is_ok(),
        None => bare(host).parse::<IpAddr>().is_ok(),
    }
}

/// An IPv6 address may be written as in a URL.
fn bare(host: &str) -> &str {
    let host = host.trim();
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

impl Client {
    /// Connects to the store at `host`:`port`, which may not be there yet, trying all of its addresses until
    /// `deadline`.
    pub(super) fn connect(host: &str, port: u16, claim: &Claim, deadline: Deadline) -> Result<Self> {
        // Names of other nodes may appear later than this process, so they are resolved each time.
        Self::reach(&format!("{host}:{port}"), || resolve(host, port), claim, deadline)
    }

    /// Like [`Client::connect`], to an address that is known. It stays an address on the way: its text would
    /// lack the scope.
    pub(super) fn connect_to(address: SocketAddr, claim: &Claim, deadline: Deadline) -> Result<Self> {
        Self::reach(&address.to_string(), || Ok(vec![address]), claim, deadline)
    }

    fn reach(
        place: &str,
        resolve: impl Fn() -> io::Result<Vec<SocketAddr>>,
        claim: &Claim,
        deadline: Deadline,
    ) -> Result<Self> {
        let client = CLIENTS.fetch_add(1, Ordering::Relaxed);
        let hello = Request::Hello { claim: claim.clone(), client, serves: false };
        let mut pause = FIRST_PAUSE;
        // The latest of the most telling ones: the last attempt may have no time to meet any but its own.
        let (mut weight, mut obstacle) = (0, format!("{place} has no address"));
        loop {
            let addresses = resolve().unwrap_or_else(|error| {
                if weight == 0 {
                    obstacle = error.to_string();
                }
                Vec::new()
            });
            for address in addresses {
                let attempt = Deadline::after(deadline.remaining().min(ATTEMPT_LIMIT));
                match Link::open(address, &hello, attempt) {
                    Ok(link) => return Self::new(address, hello, link),
                    // The store of an attempt before this one may still be on its way out.
                    Err(Obstacle::Refused(error)) if !matches!(error.kind(), ErrorKind::PeerFinished(_)) => {
                        return Err(error);
                    }
                    Err(other) if other.weight(attempt.limit()) >= weight => {
                        weight = other.weight(attempt.limit());
                        obstacle = format!("{address}: {other}");
                    }
                    Err(_) => {}
                }
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{} cannot reach the store of rank 0 at {place} within {} s ({obstacle}): check \
                         that rank 0 is running, that MASTER_ADDR and MASTER_PORT are the same on all ranks, \
                         and that no firewall is in between",
                        claim.rank,
                        seconds(deadline.limit()),
                    ),
                ));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn new(server: SocketAddr, hello: Request, link: Link) -> Result<Self> {
        let local =
            link.local_addr().map_err(|error| Error::io("cannot read the address of a connection", error))?;
        Ok(Self {
            server,
            local,
            hello,
            idle: Mutex::new(vec![link]),
            spent: Mutex::default(),
            ended: OnceLock::new(),
        })
    }

    /// Where the server was reached.
    pub(super) fn server(&self) -> SocketAddr {
        self.server
    }

    /// This end of the connection.
    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Replaces the address of this end by one that others can reach.
    pub(super) fn seen_from_outside(&mut self, ip: IpAddr) {
        self.local.set_ip(ip);
    }

    /// One request and its answer, which may take `wait` by itself.
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
        if let Some(error) = self.ended.get() {
            return Err(error.clone());
        }
        let request = encode(request, value.len())?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let link = match idle {
            Some(link) => Ok(link),
            None => Link::open(self.server, &self.hello, deadline),
        };
        let mut link = link.map_err(|obstacle| self.failed(obstacle))?;
        let answer = link.call(&request, value, deadline);
        let kept = if answer.is_ok() { &self.idle } else { &self.spent };
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        answer.map_err(|obstacle| self.failed(obstacle))
    }

    fn failed(&self, obstacle: Obstacle) -> Error {
        match obstacle {
            // Slowness may pass; everything else is the end.
            Obstacle::Silent(limit) => Error::new(
                ErrorKind::Timeout,
                format!(
                    "rank 0, which serves the store at {}, did not answer within {} s: its process is stopped \
                     or its host is gone",
                    self.server,
                    seconds(limit)
                ),
            ),
            Obstacle::Refused(error) => self.ended.get_or_init(|| error).clone(),
            lost @ (Obstacle::Closed(_) | Obstacle::Foreign(_)) => {
                let error = || {
                    Error::new(
                        ErrorKind::PeerLost(Rank(0)),
                        format!("rank 0, which serves the store at {}, is lost: {lost}", self.server),
                    )
                };
                self.ended.get_or_init(error).clone()
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A panic is no end in good order, and a store that has ended takes no leave.
        if std::thread::panicking() || self.ended.get().is_some() {
            return;
        }
        let deadline = Deadline::after(GOODBYE_LIMIT);
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner).pop();
        let link = idle.map_or_else(|| Link::open(self.server, &self.hello, deadline), Ok);
        if let (Ok(mut link), Ok(bye)) = (link, encode(&Request::Bye, 0)) {
            // Whoever does not hear it is either gone itself or finds out that this process is.
            let _ = link.call(&bye, &[], deadline);
        }
    }
}
