//! Addresses of this host that its peers can use.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

use if_addrs::Interface;

use crate::error::{Error, Result};

/// The address to listen on and to advertise to peers: the `choice` of BURN_DDP_IFACE, which is the name of an
/// interface or an address of this host, else `seen`, the local end of the connection to the store.
///
/// # Errors
/// `Config` naming the interfaces of this host when the choice is none of them, or when there is no choice and `seen`
/// is a link-local address, which peers cannot use.
pub fn local_address(choice: Option<&str>, seen: IpAddr) -> Result<IpAddr> {
    let seen = seen.to_canonical();
    let Some(choice) = choice.map(str::trim) else {
        // A link-local address belongs to an interface, which only this host knows.
        if matches!(seen, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
            return Err(Error::config(format!(
                "MASTER_ADDR leads through {seen}, an address that peers cannot use (it is link-local): set \
                 BURN_DDP_IFACE to an interface with another address, or MASTER_ADDR to another address"
            )));
        }
        return Ok(seen);
    };
    let interfaces = if_addrs::get_if_addrs().map_err(|error| {
        Error::io(format!("cannot list the interfaces for BURN_DDP_IFACE={choice}"), error)
    })?;
    if let Ok(address) = choice.parse::<IpAddr>() {
        // The list of interfaces does not tell all addresses of this host: it has one entry for all of 127.0.0.0/8.
        return match TcpListener::bind((address, 0)) {
            Ok(_) => Ok(address),
            Err(error) => {
                Err(no_such_interface(choice, &format!("not an address of this host ({error})"), &interfaces))
            }
        };
    }
    let mut found: Vec<IpAddr> = interfaces
        .iter()
        .filter(|interface| interface.name == choice && !interface.is_link_local())
        .map(Interface::ip)
        .collect();
    // The address family of the connection to the store is known to work.
    found.sort_by_key(|ip| (ip.is_ipv4() != seen.is_ipv4(), ip.is_ipv6()));
    found
        .first()
        .copied()
        .ok_or_else(|| no_such_interface(choice, "no interface with an address", &interfaces))
}

fn no_such_interface(choice: &str, problem: &str, interfaces: &[Interface]) -> Error {
    let found: Vec<String> =
        interfaces.iter().map(|interface| format!("{} {}", interface.name, interface.ip())).collect();
    Error::config(format!(
        "BURN_DDP_IFACE={choice}: {problem}; this host has {}",
        if found.is_empty() { "no interface".into() } else { found.join(", ") }
    ))
}

/// The address at which other hosts reach this one: the source address of packets to `targets`, else the address of the
/// first interface.
pub(crate) fn advertised_ip(targets: &[SocketAddr]) -> IpAddr {
    // Connecting a datagram socket chooses a route and sends nothing.
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
    use crate::error::ErrorKind;

    #[test]
    fn the_address_is_seen_or_chosen() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(local_address(None, ip("10.1.2.3")).unwrap(), ip("10.1.2.3"));
        assert_eq!(local_address(None, ip("::ffff:10.1.2.3")).unwrap(), ip("10.1.2.3"));
        assert_eq!(local_address(Some("127.0.0.2"), ip("10.1.2.3")).unwrap(), ip("127.0.0.2"));
        let error = local_address(None, ip("fe80::1")).expect_err("of one link only");
        assert!(error.to_string().contains("BURN_DDP_IFACE"), "{error}");
        let interfaces = if_addrs::get_if_addrs().unwrap();
        let lo = interfaces.iter().find(|interface| interface.ip() == ip("127.0.0.1")).unwrap();
        assert_eq!(local_address(Some(&lo.name), ip("10.1.2.3")).unwrap(), ip("127.0.0.1"));
        for choice in ["nosuch0", "192.0.2.1", ""] {
            let error = local_address(Some(choice), ip("10.1.2.3")).expect_err("not of this host");
            assert_eq!(error.kind(), ErrorKind::Config);
            for word in [format!("BURN_DDP_IFACE={choice}"), format!("{} 127.0.0.1", lo.name)] {
                assert!(error.to_string().contains(&word), "{error} lacks {word}");
            }
        }
    }
}
