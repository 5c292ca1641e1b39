//! The port of the store: chosen, or checked, before anything is started.
//!
//! Rank 0 binds the port, some hundred milliseconds after the launcher found it. A port that is only looked up
//! can be taken in between, by a second launcher or by any outgoing connection. So the launcher keeps a socket
//! bound to it that never listens: on Linux, rank 0 may bind the same port (both sockets have SO_REUSEADDR, and
//! none of them listens yet), while nobody is *given* the port any more. Other systems refuse rank 0 then, so
//! there the port is let go before the start, and the small window stays.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{SystemTime, UNIX_EPOCH};

use socket2::{Domain, Socket, Type};

use super::plan::StoreAt;
use burn_ddp_comm::{Error, ErrorKind, Result};

/// The store's port, free when it was looked at and, on Linux, kept from others while this lives.
pub(super) struct Port {
    number: u16,
    _held: Option<Socket>,
}

impl Port {
    /// Finds a free port, or checks the given one where rank 0 is `here`.
    pub fn reserve(store: &StoreAt, here: bool) -> Result<Self> {
        match store.port {
            None => Self::free(&store.host),
            Some(number) => {
                if here {
                    check(&store.host, number)?;
                }
                Ok(Self { number, _held: None })
            }
        }
    }

    /// The port as a number.
    pub fn number(&self) -> u16 {
        self.number
    }

    fn free(host: &str) -> Result<Self> {
        // A name that is not this machine's own (yet) does not matter here: rank 0 will say so.
        let mut candidates = resolve(host, 0);
        candidates.push(SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut last = None;
        for address in candidates {
            match bind(address).and_then(|socket| Ok((port_of(&socket)?, socket))) {
                Ok((number, socket)) => {
                    let held = cfg!(target_os = "linux").then_some(socket);
                    return Ok(Self { number, _held: held });
                }
                Err(error) => last = Some(error),
            }
        }
        let error = last.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into());
        Err(Error::io("cannot find a free port for the store: give one by --master-port", error))
    }
}

/// Says now what rank 0 would say later: that somebody else listens on the port. All else is left to rank 0.
/// Binding is enough to know; listening, if only for a moment, could catch a rank of another node.
fn check(host: &str, number: u16) -> Result<()> {
    for address in resolve(host, number) {
        if let Err(error) = bind(address)
            && error.kind() == std::io::ErrorKind::AddrInUse
        {
            let message = format!(
                "the store cannot be served at {address}: the address is in use by another process; give another \
                 --master-port, or none on a single node for a free one"
            );
            return Err(Error::new(ErrorKind::Io, message));
        }
    }
    Ok(())
}

fn resolve(host: &str, port: u16) -> Vec<SocketAddr> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default()
}

fn bind(address: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn port_of(socket: &Socket) -> std::io::Result<u16> {
    let address = socket.local_addr()?.as_socket();
    address.map(|address| address.port()).ok_or_else(|| std::io::ErrorKind::AddrNotAvailable.into())
}

/// A name that no other run on this host has, now or before.
pub(super) fn unique_run_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_micros(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    fn free() -> Port {
        Port::reserve(&StoreAt { host: "127.0.0.1".into(), port: None }, true).unwrap()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_held_port_is_rank_0s_and_nobody_elses() {
        let held: Vec<Port> = (0..200).map(|_| free()).collect();
        let numbers: BTreeSet<u16> = held.iter().map(Port::number).collect();
        assert_eq!(numbers.len(), held.len(), "a held port was given out twice");
        TcpListener::bind(("127.0.0.1", held[0].number())).expect("rank 0 can serve on the held port");
        TcpListener::bind(("0.0.0.0", held[1].number())).expect("also on all addresses");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = listener.local_addr().unwrap().port();
        let store = StoreAt { host: "127.0.0.1".into(), port: Some(number) };
        let error = Port::reserve(&store, true).err().expect("must be refused").to_string();
        assert!(error.contains(&format!("127.0.0.1:{number}")) && error.contains("in use"), "{error}");
        assert_eq!(Port::reserve(&store, false).unwrap().number(), number, "other nodes do not serve it");
        drop(listener);
        Port::reserve(&store, true).unwrap();
    }
}
