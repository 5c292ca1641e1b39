//! The started ranks of this node, and the threads that write their output.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use burn_ddp_comm::{Error, Result};
use rustix::process::Signal;

use super::events::Event;
use crate::options::Stream;
use crate::output::console::Console;
use crate::output::copier::{Copier, LastLines};
use crate::output::log_files::{LogDirectory, LogFiles};
use crate::output::routing::{RankIo, Routing};
use crate::plan::Plan;
use crate::process::RankProcess;
use crate::process::watchdog::Watchdog;

/// One started rank.
pub(crate) struct StartedRank {
    pub process: RankProcess,
    /// `None` for the rank that has the terminal.
    pub last_lines: Option<Arc<LastLines>>,
}

impl StartedRank {
    /// Returns true if the rank has, or had, the terminal.
    pub fn has_terminal(&self) -> bool {
        self.last_lines.is_none()
    }
}

/// All started ranks, in the order of their local ranks.
pub(crate) struct Ranks {
    pub started: Vec<StartedRank>,
    /// Number of threads that have not yet sent [`Event::WriterFinished`].
    pub active_writers: usize,
    pub console: Arc<Console>,
    /// `None` once the last notice was given.
    notices: Option<Sender<String>>,
    /// Notices that wait until rank 0 has returned the terminal; `None` if it does not have it.
    held_notices: Option<Vec<String>>,
    events: Sender<Event>,
    watchdog: Watchdog,
}

impl Ranks {
    /// Starts the thread for notices and the watchdog, but no rank yet.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](burn_ddp_comm::ErrorKind::Io) if the console or the thread cannot be had.
    pub fn new(events: Sender<Event>) -> Result<Self> {
        let (notices, lines) = mpsc::channel::<String>();
        let console = Arc::new(Console::of_this_process()?);
        let mut ranks = Self {
            started: Vec::new(),
            active_writers: 0,
            console: console.clone(),
            notices: Some(notices),
            held_notices: None,
            events,
            watchdog: Watchdog::start(),
        };
        // A thread of their own, because the supervisor must not wait for a console without a reader.
        ranks.spawn_writer(move || {
            for line in lines {
                console.write(Stream::Err, format!("burnrun: {line}\n").as_bytes());
            }
        })?;
        Ok(ranks)
    }

    /// Starts all ranks of `plan`. If that fails, the ranks that did start are in `started`.
    ///
    /// # Errors
    /// The error of [`RankProcess::start`], or [`ErrorKind::Io`](burn_ddp_comm::ErrorKind::Io) if a thread cannot
    /// start.
    pub fn start(&mut self, plan: &Plan, routing: Routing<'_>, log_files: LogFiles) -> Result<()> {
        let directory = log_files.directory.as_ref().map(LogDirectory::path);
        self.print_summary(plan, directory, routing.terminal_lent);
        self.held_notices = routing.terminal_lent.then(Vec::new);

        for (planned, [out_file, err_file]) in plan.ranks.iter().zip(log_files.files) {
            let io = routing.io(planned.local_rank);
            let (process, mut handles) = RankProcess::start(plan, planned, io)?;
            self.watchdog.add(process.pid);
            let last_lines = (io != RankIo::Terminal).then(Arc::<LastLines>::default);
            self.started.push(StartedRank { process, last_lines: last_lines.clone() });
            let Some(last_lines) = last_lines else { continue };
            let copier = |stream, file| Copier {
                stream,
                prefix: planned.prefix.clone(),
                console: routing.is_shown(planned.local_rank, stream).then(|| self.console.clone()),
                file,
                last_lines: last_lines.clone(),
            };
            let (out, err) = (copier(Stream::Out, out_file), copier(Stream::Err, err_file));
            self.spawn_copier(out, handles.stdout.take())?;
            self.spawn_copier(err, handles.stderr.take())?;
        }
        Ok(())
    }

    fn print_summary(&self, plan: &Plan, log_directory: Option<&Path>, terminal_lent: bool) {
        let mut lines = format!("burnrun: {}\n", plan.summary);
        if let Some(directory) = log_directory {
            let output = if terminal_lent { "output of the other ranks" } else { "output" };
            lines += &format!("burnrun: {output} goes to {}\n", directory.display());
        }
        self.console.write(Stream::Err, lines.as_bytes());
    }

    fn spawn_copier(&mut self, copier: Copier, pipe: Option<impl Read + Send + 'static>) -> Result<()> {
        match pipe {
            Some(pipe) => self.spawn_writer(move || copier.run(pipe)),
            None => Ok(()),
        }
    }

    fn spawn_writer(&mut self, write: impl FnOnce() + Send + 'static) -> Result<()> {
        let events = self.events.clone();
        std::thread::Builder::new()
            .name("output".into())
            .spawn(move || {
                write();
                let _ = events.send(Event::WriterFinished);
            })
            .map_err(|error| Error::io("cannot start a thread for output", error))?;
        self.active_writers += 1;
        Ok(())
    }

    /// Prints a line about the launch, without waiting until it is written.
    pub fn print_notice(&mut self, line: String) {
        match (&mut self.held_notices, &self.notices) {
            (Some(held), _) => held.push(line),
            (None, Some(notices)) => {
                let _ = notices.send(line);
            }
            (None, None) => {}
        }
    }

    /// Prints the notices that waited for the terminal.
    pub fn print_held_notices(&mut self) {
        for line in self.held_notices.take().unwrap_or_default() {
            self.print_notice(line);
        }
    }

    /// Ends the thread for notices once it has printed them all.
    pub fn close_notices(&mut self) {
        self.print_held_notices();
        self.notices = None;
    }

    /// Returns the ranks that have not ended.
    pub fn running(&self) -> impl Iterator<Item = &RankProcess> {
        self.started.iter().map(|started| &started.process).filter(|process| process.exit.is_none())
    }

    /// Returns the ranks, ended and reaped, in whose groups processes remain.
    pub fn with_orphans(&self) -> impl Iterator<Item = &RankProcess> {
        let processes = self.started.iter().map(|started| &started.process);
        processes.filter(|process| process.exit.is_some() && process.has_orphans())
    }

    /// Sends `signal` to all process groups, also to those of ended ranks, which may have left processes behind.
    pub fn signal(&self, signal: Signal) {
        self.started.iter().for_each(|started| started.process.signal(signal));
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.console.close();
    }
}
