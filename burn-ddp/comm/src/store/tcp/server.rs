//! The thread that serves the store on rank 0.
//!
//! One thread that polls, not a thread for each connection: it can be stopped and joined whatever its clients
//! do, and a world of a thousand ranks costs it a thousand sockets and no stacks. Its sockets never block, so a
//! client that stops reading or sends garbage holds up nobody but itself.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::board::{Board, ConnectionId};
use super::connection::Connection;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::Claim;

/// Time for the last answers to leave when the server ends; only a client that does not read uses it up.
const FAREWELL_LIMIT: Duration = Duration::from_secs(1);
/// Rest of the listener after an accept that failed, for want of file descriptors for instance.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The running server. Dropping it says farewell to every client, ends the thread and frees the port.
pub(super) struct Server {
    stop: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves on `listener` on behalf of `owner`.
    pub(super) fn start(listener: TcpListener, owner: Claim) -> Result<Self> {
        let failed = |error: io::Error| Error::io("cannot start the server of the store", error);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let serving = Serving {
            listener,
            stopped,
            board: Board::new(owner),
            connections: BTreeMap::new(),
            next: 0,
            accept_rest: Deadline::after(Duration::ZERO),
        };
        let thread = std::thread::Builder::new()
            .name("burn-ddp-store".into())
            .spawn(move || serving.run())
            .map_err(failed)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A failed write means that the thread is gone already, which the join finds out as well.
        let _ = self.stop.write(&[1]);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the server of the store has panicked");
        }
    }
}

struct Serving {
    listener: TcpListener,
    stopped: UnixStream,
    board: Board,
    connections: BTreeMap<ConnectionId, Connection>,
    next: ConnectionId,
    accept_rest: Deadline,
}

/// What one poll has found.
#[derive(Default)]
struct Ready {
    stop: bool,
    accept: bool,
    connections: Vec<(ConnectionId, PollFlags)>,
}

impl Serving {
    fn run(mut self) {
        loop {
            let ready = match self.poll(self.next_deadline()) {
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
                // Anything else, an error included, is found out by reading.
                if !(flags - PollFlags::OUT).is_empty() {
                    connection.receive(id, &mut self.board);
                }
            }
            self.settle();
        }
        self.farewell();
    }

    /// Answers whoever can be answered now, and forgets the connections that are over.
    fn settle(&mut self) {
        loop {
            for connection in self.connections.values_mut() {
                connection.settle(&self.board);
            }
            let (board, before) = (&mut self.board, self.connections.len());
            self.connections.retain(|id, connection| {
                if connection.is_over() {
                    board.leave(*id);
                }
                !connection.is_over()
            });
            // Who leaves may be what the others have to hear about.
            if self.connections.len() == before {
                return;
            }
        }
    }

    fn farewell(&mut self) {
        for connection in self.connections.values_mut() {
            connection.dismiss(self.board.farewell());
        }
        let deadline = Deadline::after(FAREWELL_LIMIT);
        loop {
            self.connections.retain(|_, connection| !connection.is_over());
            if self.connections.is_empty() || deadline.passed() {
                return;
            }
            let Ok(ready) = self.poll(Some(deadline.remaining())) else { return };
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
                    if let Ok(connection) = Connection::new(stream) {
                        self.connections.insert(self.next, connection);
                        self.next += 1;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!("the store cannot accept a connection: {error}");
                    self.accept_rest = Deadline::after(ACCEPT_REST);
                    return;
                }
            }
        }
    }

    fn next_deadline(&self) -> Option<Duration> {
        let rest = Some(self.accept_rest.remaining()).filter(|rest| !rest.is_zero());
        self.connections.values().filter_map(Connection::next_deadline).chain(rest).min()
    }

    /// Waits until something can be done, at most `limit`.
    fn poll(&self, limit: Option<Duration>) -> io::Result<Ready> {
        // The listener goes last: it is left out while it rests.
        let mut fds = vec![PollFd::new(&self.stopped, PollFlags::IN)];
        fds.extend(
            self.connections
                .values()
                .map(|connection| PollFd::new(connection.stream(), connection.interest())),
        );
        if self.accept_rest.passed() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        // Rounded up: a wait that ends too early finds nothing to do and spins.
        let limit = limit.map(|limit| Timespec::try_from(limit + Duration::from_millis(1)).unwrap_or(A_DAY));
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let hit = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        Ok(Ready {
            stop: hit(fds.first()),
            accept: hit(fds.get(self.connections.len() + 1)),
            connections: self.connections.keys().copied().zip(fds[1..].iter().map(PollFd::revents)).collect(),
        })
    }
}

/// For a wait that is longer than the system can count.
const A_DAY: Timespec = Timespec { tv_sec: 86_400, tv_nsec: 0 };
