//! The thread that serves the store on rank 0.
//!
//! One thread polls all connections. It can be stopped and joined whatever its clients do, and a world of a thousand
//! ranks costs a thousand sockets and no further thread. Its sockets never block, so a client that stops reading or
//! sends garbage delays no other client.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::registry::{ConnectionId, Registry};
use super::server_connection::ServerConnection;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::net::poll::{Waker, wait};
use crate::store::claim::Claim;

/// Time for the last answers to leave when the server ends; only a client that does not read uses it up.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(1);
/// Pause of the listener after a failed accept, for want of file descriptors for instance.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The running server. Dropping it sends every client a last answer, ends the thread and frees the port.
pub(super) struct Server {
    stop: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves on `listener` on behalf of `owner`.
    ///
    /// # Errors
    /// `Io` when the thread cannot be started.
    pub(super) fn start(listener: TcpListener, owner: Claim) -> Result<Self> {
        let failed = |error: io::Error| Error::io("cannot start the server of the store", error);
        let stop = Arc::new(Waker::new()?);
        listener.set_nonblocking(true).map_err(failed)?;
        let event_loop = EventLoop {
            listener,
            stop: stop.clone(),
            registry: Registry::new(owner),
            connections: BTreeMap::new(),
            next: 0,
            accept_after: Deadline::after(Duration::ZERO),
        };
        let thread = std::thread::Builder::new()
            .name("burn-ddp-store".into())
            .spawn(move || event_loop.run())
            .map_err(failed)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the server of the store has panicked");
        }
    }
}

struct EventLoop {
    listener: TcpListener,
    /// Readable when the server is to end.
    stop: Arc<Waker>,
    registry: Registry,
    connections: BTreeMap<ConnectionId, ServerConnection>,
    next: ConnectionId,
    accept_after: Deadline,
}

/// Descriptors that one wait has found ready.
struct Ready {
    stop: bool,
    accept: bool,
    connections: Vec<(ConnectionId, PollFlags)>,
}

impl EventLoop {
    fn run(mut self) {
        loop {
            let ready = match self.wait(self.time_limit()) {
                Ok(ready) if ready.stop => break,
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!("the server of the store ends: {error}");
                    break;
                }
            };
            if ready.accept {
                self.accept();
            }
            for (id, flags) in ready.connections {
                let Some(connection) = self.connections.get_mut(&id) else { continue };
                if flags.contains(PollFlags::OUT) {
                    connection.flush();
                }
                // Reading reveals everything else, errors included.
                if !(flags - PollFlags::OUT).is_empty() {
                    connection.receive(id, &mut self.registry);
                }
            }
            self.update_connections();
        }
        self.shut_down();
    }

    /// Answers all clients that can be answered now, and drops closed connections.
    fn update_connections(&mut self) {
        loop {
            for connection in self.connections.values_mut() {
                connection.update(&self.registry);
            }
            let (registry, before) = (&mut self.registry, self.connections.len());
            self.connections.retain(|id, connection| {
                if connection.is_closed() {
                    registry.connection_closed(*id);
                }
                !connection.is_closed()
            });
            // The end of one connection may be the answer to the clients of others.
            if self.connections.len() == before {
                return;
            }
        }
    }

    fn shut_down(&mut self) {
        for connection in self.connections.values_mut() {
            connection.answer_and_close(self.registry.last_response());
        }
        // A waker that stays readable would end each wait at once.
        self.stop.clear();
        let deadline = Deadline::after(SHUTDOWN_LIMIT);
        loop {
            self.connections.retain(|_, connection| !connection.is_closed());
            if self.connections.is_empty() || deadline.passed() {
                return;
            }
            let Ok(ready) = self.wait(deadline.remaining()) else { return };
            for (id, flags) in ready.connections {
                if let Some(connection) = self.connections.get_mut(&id)
                    && !flags.is_empty()
                {
                    connection.flush();
                }
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Ok(connection) = ServerConnection::new(stream) {
                        self.connections.insert(self.next, connection);
                        self.next += 1;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!("the store cannot accept a connection: {error}");
                    self.accept_after = Deadline::after(ACCEPT_BACKOFF);
                    return;
                }
            }
        }
    }

    /// Time after which there is something to do even if all descriptors stay silent.
    fn time_limit(&self) -> Duration {
        let backoff = Some(self.accept_after.remaining()).filter(|left| !left.is_zero());
        let limits = self.connections.values().filter_map(ServerConnection::time_limit);
        limits.chain(backoff).min().unwrap_or(Duration::MAX)
    }

    fn wait(&self, limit: Duration) -> Result<Ready> {
        // The listener goes last, because it is left out during its backoff.
        let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
        let connections = self.connections.values();
        fds.extend(connections.map(|connection| PollFd::new(connection.stream(), connection.interest())));
        if self.accept_after.passed() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        wait(&mut fds, limit)?;
        let is_ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        Ok(Ready {
            stop: is_ready(fds.first()),
            accept: is_ready(fds.get(self.connections.len() + 1)),
            connections: self.connections.keys().copied().zip(fds[1..].iter().map(PollFd::revents)).collect(),
        })
    }
}
