//! The address on which rank 0 listens.
//!
//! MASTER_ADDR is the address that the *other* ranks connect to, and need not be one of this host. Rank 0 tries to bind
//! it; it compares no host names, which have too many spellings. Behind a NAT, and where `/etc/hosts` gives a node's
//! own name a loopback address that other nodes cannot reach, rank 0 listens on all interfaces instead.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::client_connection::{CallError, ClientConnection};
use super::protocol::Request;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::net::address::advertised_ip;

/// Time for the program that holds the port to show that it is a store.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// Time for a store that is about to end to free the port.
const FREE_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two attempts to bind a port that is in use.
const BACKOFF: Duration = Duration::from_millis(50);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// A listening socket and the two addresses that belong to it.
pub(super) struct Bound {
    pub(super) listener: TcpListener,
    /// Address at which this process connects to the socket.
    pub(super) own: SocketAddr,
    /// Address of this host for others, if it is not the one of the connection to `own`.
    pub(super) advertised: Option<IpAddr>,
}

/// Listens on the first of `resolved` that is an address of this host, else on all interfaces. `skip_loopback` is for
/// an address that was found by name while some ranks are on other nodes.
///
/// # Errors
/// `Io` when another program has the port or no address can be bound; `Config` when a store holds the port and refuses
/// `hello`.
pub(super) fn listen(resolved: &[SocketAddr], skip_loopback: bool, hello: &Request) -> Result<Bound> {
    for address in resolved.iter().filter(|address| !(skip_loopback && address.ip().is_loopback())) {
        match bind(*address) {
            Ok(listener) => return bound(listener, None),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return bound(wait_for_port(*address, *address, hello)?, None);
            }
            // Not an address of this host. Any other error comes again with the wildcard address.
            Err(_) => {}
        }
    }
    let port = resolved.first().map_or(0, SocketAddr::port);
    let wildcard = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let listener = match bind(wildcard) {
        Ok(listener) => listener,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            wait_for_port(wildcard, SocketAddr::from((Ipv4Addr::LOCALHOST, port)), hello)?
        }
        Err(error) => return Err(Error::io(format!("cannot listen on port {port} (MASTER_PORT)"), error)),
    };
    bound(listener, Some(advertised_ip(resolved)))
}

fn bound(listener: TcpListener, advertised: Option<IpAddr>) -> Result<Bound> {
    let mut own =
        listener.local_addr().map_err(|error| Error::io("cannot read the address of the store", error))?;
    // The IPv6 wildcard takes IPv4 as well, which every host has.
    if own.ip().is_unspecified() {
        own.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    Ok(Bound { listener, own, advertised })
}

/// Binds `address`. The IPv6 wildcard stands for both families, even on a host without IPv6.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let open = |address: SocketAddr| -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            socket.set_only_v6(false)?;
        }
        // Otherwise closed connections of a run that has just ended would keep the port.
        #[cfg(unix)]
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(TcpListener::from(socket))
    };
    match open(address) {
        Err(error)
            if address.is_ipv6()
                && address.ip().is_unspecified()
                && error.kind() != io::ErrorKind::AddrInUse =>
        {
            open((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        other => other,
    }
}

/// Waits for the port of `address`, which is in use, if its holder is a store that is about to end. `hello`, which is
/// sent to the holder at `probe`, tells a store that lives on that its rank was claimed twice.
fn wait_for_port(address: SocketAddr, probe: SocketAddr, hello: &Request) -> Result<TcpListener> {
    let until = Deadline::after(FREE_LIMIT);
    loop {
        let seen = match ClientConnection::open(probe, hello, Deadline::after(PROBE_LIMIT)) {
            Err(CallError::Refused(error)) if !matches!(error.kind(), ErrorKind::PeerFinished(_)) => {
                return Err(error);
            }
            Err(error @ (CallError::Silent(_) | CallError::Foreign(_))) => {
                return Err(in_use(probe, &error.to_string()));
            }
            Err(error) => error.to_string(),
            Ok(_) => return Err(in_use(probe, "another burn-ddp store")),
        };
        match bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(Error::io(format!("cannot listen on {address}"), error)),
        }
        if until.passed() {
            return Err(in_use(probe, &seen));
        }
        std::thread::sleep(BACKOFF);
    }
}

fn in_use(address: SocketAddr, seen: &str) -> Error {
    Error::new(
        ErrorKind::Io,
        format!(
            "{address} is in use by another program: rank 0 cannot serve the store there ({seen}). Choose \
             another MASTER_PORT. Under torchrun the port may be held by its agent: with --standalone or \
             --rdzv-backend=c10d, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives the ranks a free port; the \
             static rendezvous always keeps it"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::RankInfo;
    use crate::rank::Rank;
    use crate::store::claim::Claim;

    fn hello() -> Request {
        Request::Hello {
            claim: Claim::of(&RankInfo { rank: Rank(0), ..RankInfo::solo() }),
            client: 0,
            serves: true,
        }
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_first_local_address_is_taken() {
        // 192.0.2.0/24 is reserved for documentation, so no host has it.
        let bound = listen(&[at("192.0.2.1:0"), at("127.0.0.2:0")], false, &hello()).unwrap();
        assert_eq!(bound.own.ip(), at("127.0.0.2:0").ip());
        assert!(bound.advertised.is_none());
    }

    #[test]
    fn behind_a_nat_all_interfaces_are_taken() {
        let bound = listen(&[at("192.0.2.1:0")], false, &hello()).unwrap();
        assert!(bound.listener.local_addr().unwrap().ip().is_unspecified());
        assert_eq!(bound.own.ip(), at("127.0.0.1:0").ip());
        assert!(bound.advertised.is_some_and(|ip| !ip.is_unspecified()));
    }

    #[test]
    fn a_loopback_name_does_not_keep_other_nodes_out() {
        let bound = listen(&[at("127.0.1.1:0")], true, &hello()).unwrap();
        assert!(bound.listener.local_addr().unwrap().ip().is_unspecified());
        assert!(bound.advertised.is_some());
    }
}
