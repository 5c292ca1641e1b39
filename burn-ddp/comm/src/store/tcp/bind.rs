//! Where rank 0 listens.
//!
//! MASTER_ADDR is what the *others* dial. Whether it is an address of this host is found out by binding it and
//! never by comparing host names, which have too many spellings. Behind a NAT, and where `/etc/hosts` gives a
//! node's own name a loopback address that other nodes cannot reach, rank 0 listens on all interfaces instead.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::link::{Link, Obstacle};
use super::protocol::Request;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};

/// Time for whoever holds the port to show that it is a store.
const PROBE_LIMIT: Duration = Duration::from_secs(1);
/// Time for a port to become free whose holder is just leaving.
const FREE_LIMIT: Duration = Duration::from_secs(2);
const FREE_PAUSE: Duration = Duration::from_millis(50);
const BACKLOG: i32 = 1024;

/// A listening socket and the two addresses that belong to it.
pub(super) struct Bound {
    pub(super) listener: TcpListener,
    /// Where this process connects to itself.
    pub(super) own: SocketAddr,
    /// Where others reach this host, when the connection to itself does not tell.
    pub(super) outward: Option<IpAddr>,
}

/// Listens on the first of `resolved` that is an address of this host, else on all interfaces. A loopback
/// address is passed over when `elsewhere`: it was found by name, and some ranks are on other nodes.
pub(super) fn listen(resolved: &[SocketAddr], elsewhere: bool, hello: &Request) -> Result<Bound> {
    for address in resolved.iter().filter(|address| !(elsewhere && address.ip().is_loopback())) {
        match bind(*address) {
            Ok(listener) => return bound(listener, None),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return bound(wait_for_port(*address, *address, hello)?, None);
            }
            // Not an address of this host. What is wrong for another reason is wrong for the wildcard too.
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
    bound(listener, Some(outward(resolved)))
}

fn bound(listener: TcpListener, outward: Option<IpAddr>) -> Result<Bound> {
    let mut own =
        listener.local_addr().map_err(|error| Error::io("cannot read the address of the store", error))?;
    match own.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => own.set_ip(Ipv4Addr::LOCALHOST.into()),
        // The IPv6 wildcard takes IPv4 as well, which is the one that no host is without.
        IpAddr::V6(ip) if ip.is_unspecified() => own.set_ip(Ipv4Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(Bound { listener, own, outward })
}

/// Binds `address`; the IPv6 wildcard stands for both families, also on a host without IPv6.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let open = |address: SocketAddr| -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            socket.set_only_v6(false)?;
        }
        // Connections of a run that has just ended must not keep the port.
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

/// The port of `address` is taken: asks its holder, at `probe`, who it is. A store hears by this hello that
/// there are two of its rank; whoever is only on its way out gets the time to leave.
fn wait_for_port(address: SocketAddr, probe: SocketAddr, hello: &Request) -> Result<TcpListener> {
    let until = Deadline::after(FREE_LIMIT);
    loop {
        let seen = match Link::open(probe, hello, Deadline::after(PROBE_LIMIT)) {
            Err(Obstacle::Refused(error)) if !matches!(error.kind(), ErrorKind::PeerFinished(_)) => {
                return Err(error);
            }
            Err(obstacle @ (Obstacle::Silent(_) | Obstacle::Foreign(_))) => {
                return Err(in_use(probe, &obstacle.to_string()));
            }
            Err(obstacle) => obstacle.to_string(),
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
        std::thread::sleep(FREE_PAUSE);
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

/// The address by which this host is seen from outside: the one it would send from towards `targets`, else
/// that of its first interface.
fn outward(targets: &[SocketAddr]) -> IpAddr {
    // Connecting a datagram socket chooses the route and sends nothing.
    let source = |target: &SocketAddr| -> io::Result<IpAddr> {
        let any: IpAddr =
            if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(target)?;
        Ok(socket.local_addr()?.ip())
    };
    let routed = targets.iter().filter_map(|target| source(target).ok());
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = interfaces
        .iter()
        .filter(|interface| interface.is_oper_up() && !interface.is_link_local())
        .map(|interface| interface.ip())
        .partition(IpAddr::is_ipv4);
    routed
        .chain(v4)
        .chain(v6)
        .find(|ip| !ip.is_loopback() && !ip.is_unspecified())
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::{Rank, RankInfo};
    use crate::store::Claim;

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
        assert!(bound.outward.is_none());
    }

    #[test]
    fn behind_a_nat_all_interfaces_are_taken() {
        let bound = listen(&[at("192.0.2.1:0")], false, &hello()).unwrap();
        assert!(bound.listener.local_addr().unwrap().ip().is_unspecified());
        assert_eq!(bound.own.ip(), at("127.0.0.1:0").ip());
        assert!(bound.outward.is_some_and(|ip| !ip.is_unspecified()));
    }

    #[test]
    fn a_loopback_name_does_not_keep_other_nodes_out() {
        let bound = listen(&[at("127.0.1.1:0")], true, &hello()).unwrap();
        assert!(bound.listener.local_addr().unwrap().ip().is_unspecified());
        assert!(bound.outward.is_some());
    }
}
