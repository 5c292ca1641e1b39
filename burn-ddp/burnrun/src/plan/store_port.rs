//! The port of the store: chosen, or checked, before any rank starts.
//!
//! Rank 0 binds the port some hundred milliseconds after the launcher found it. In between, a second launcher or any
//! outgoing connection could take a port that was only looked up. So the launcher keeps a socket bound to the port that
//! never listens. On Linux, rank 0 can bind the same port, because both sockets have SO_REUSEADDR and neither listens
//! yet, while the system gives the port to no other process. Other systems would refuse rank 0, so there the launcher
//! closes its socket before the start, and a small window remains.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{SystemTime, UNIX_EPOCH};

use burn_ddp_comm::{Error, ErrorKind, Result};
use socket2::{Domain, Socket, Type};

use super::store_address::StoreAddress;

/// The port of the store. A port that was chosen here is, on Linux, reserved while this value lives.
pub(crate) struct StorePort {
    number: u16,
    _reserved: Option<Socket>,
}

impl StorePort {
    /// Chooses a free port if `store` names none. Otherwise checks that its port is free, if rank 0 is on this node.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if no port is free or if another process uses the given one.
    pub fn reserve(store: &StoreAddress, rank0_is_local: bool) -> Result<Self> {
        match store.port {
            None => Self::choose(&store.host),
            Some(number) => {
                if rank0_is_local {
                    check_not_in_use(&store.host, number)?;
                }
                Ok(Self { number, _reserved: None })
            }
        }
    }

    /// The port number.
    pub fn number(&self) -> u16 {
        self.number
    }

    fn choose(host: &str) -> Result<Self> {
        // If `host` is no address of this machine, any port will do here: rank 0 reports the error.
        let mut candidates = resolve(host, 0);
        candidates.push(SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut last_error = None;
        for address in candidates {
            match bind(address).and_then(|socket| Ok((port_of(&socket)?, socket))) {
                Ok((number, socket)) => {
                    let reserved = cfg!(target_os = "linux").then_some(socket);
                    return Ok(Self { number, _reserved: reserved });
                }
                Err(error) => last_error = Some(error),
            }
        }
        let error = last_error.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into());
        Err(Error::io("cannot find a free port for the store: give one by --master-port", error))
    }
}

/// Returns the error that rank 0 would meet if another process listens on the port; rank 0 reports all other errors.
/// This binds and does not listen, since a listening socket could accept a connection from a rank of another node.
fn check_not_in_use(host: &str, number: u16) -> Result<()> {
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

/// Returns a run id that no other run on this host has or had.
pub(crate) fn unique_run_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_micros(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    fn free() -> StorePort {
        StorePort::reserve(&StoreAddress { host: "127.0.0.1".into(), port: None }, true).unwrap()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_held_port_is_kept_for_rank_0() {
        let held: Vec<StorePort> = (0..200).map(|_| free()).collect();
        let numbers: BTreeSet<u16> = held.iter().map(StorePort::number).collect();
        assert_eq!(numbers.len(), held.len(), "a held port was given out twice");
        TcpListener::bind(("127.0.0.1", held[0].number())).expect("rank 0 can serve on the held port");
        TcpListener::bind(("0.0.0.0", held[1].number())).expect("also on all addresses");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = listener.local_addr().unwrap().port();
        let store = StoreAddress { host: "127.0.0.1".into(), port: Some(number) };
        let error = StorePort::reserve(&store, true).err().expect("must be refused").to_string();
        assert!(error.contains(&format!("127.0.0.1:{number}")) && error.contains("in use"), "{error}");
        assert_eq!(
            StorePort::reserve(&store, false).unwrap().number(),
            number,
            "other nodes do not serve it"
        );
        drop(listener);
        StorePort::reserve(&store, true).unwrap();
    }
}
