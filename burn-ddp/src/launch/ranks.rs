//! The started ranks of this node, and where their output goes.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use rustix::process::Signal;

use super::logs::Logs;
use super::options::{Options, Streams};
use super::output::{Console, Route, Stream, Tail};
use super::plan::{Child, Plan};
use super::process::{RankProcess, Stdin};
use super::supervise::Event;
use super::watch::Watch;
use crate::error::{Error, Result};

/// One started rank.
pub(super) struct Started {
    pub process: RankProcess,
    /// Its last lines; `None` for the one that has the terminal.
    pub tail: Option<Arc<Tail>>,
}

/// All of them, and the threads that write for them.
pub(super) struct Ranks {
    pub started: Vec<Started>,
    /// Threads that have not yet reported [`Event::Quiet`].
    pub writers: usize,
    console: Arc<Console>,
    notices: Option<Sender<String>>,
    events: Sender<Event>,
    watch: Watch,
}

impl Ranks {
    /// No rank yet.
    pub fn new(events: Sender<Event>) -> Result<Self> {
        let (notices, lines) = mpsc::channel::<String>();
        let console = Arc::new(Console::standard()?);
        let mut ranks = Self {
            started: Vec::new(),
            writers: 0,
            console: console.clone(),
            notices: Some(notices),
            events,
            watch: Watch::start(),
        };
        // Notices have a thread of their own: the supervisor must not wait for a console that nobody reads.
        ranks.writer(move || {
            for line in lines {
                console.write(Stream::Err, format!("burnrun: {line}\n").as_bytes());
            }
        })?;
        Ok(ranks)
    }

    /// Starts all children of `plan`; when it fails, those that were started are in `started`. With `lent`, local
    /// rank 0 gets the terminal.
    pub fn start(&mut self, options: &Options, plan: &Plan, lent: bool) -> Result<()> {
        let routing = Routing { options, lent };
        let wanted = plan.children.iter().any(|child| routing.files(child) != Streams::default());
        let logs = if wanted { Some(Logs::create(options, &plan.run_id)?) } else { None };
        // Before the first rank runs, so that a read-only disk starts nothing and the order of lines is the usual.
        let files = plan.children.iter().map(|child| match &logs {
            Some(logs) => logs.open(child.local_rank, routing.files(child)),
            None => Ok([None, None]),
        });
        let files: Vec<_> = files.collect::<Result<_>>()?;
        self.announce(plan, logs.as_ref().map(Logs::directory), lent);

        for (child, [out_file, err_file]) in plan.children.iter().zip(files) {
            let stdin = routing.stdin(child);
            let (process, mut handles) = RankProcess::start(plan, child, stdin)?;
            self.watch.add(process.pid);
            let tail = (stdin != Stdin::Terminal).then(Arc::<Tail>::default);
            self.started.push(Started { process, tail: tail.clone() });
            let Some(tail) = tail else { continue };
            let route = |stream, file| Route {
                stream,
                prefix: child.prefix.clone(),
                console: routing.shows(child, stream).then(|| self.console.clone()),
                file,
                tail: tail.clone(),
            };
            let (out, err) = (route(Stream::Out, out_file), route(Stream::Err, err_file));
            self.copy(out, handles.stdout.take())?;
            self.copy(err, handles.stderr.take())?;
        }
        Ok(())
    }

    fn announce(&self, plan: &Plan, directory: Option<&Path>, lent: bool) {
        let mut lines = format!("burnrun: {}\n", plan.notice);
        if let Some(directory) = directory {
            let whose = if lent { "output of the other ranks" } else { "output" };
            lines += &format!("burnrun: {whose} goes to {}\n", directory.display());
        }
        self.console.write(Stream::Err, lines.as_bytes());
    }

    fn copy(&mut self, route: Route, pipe: Option<impl Read + Send + 'static>) -> Result<()> {
        match pipe {
            Some(pipe) => self.writer(move || route.copy(pipe)),
            None => Ok(()),
        }
    }

    fn writer(&mut self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let events = self.events.clone();
        std::thread::Builder::new()
            .name("output".into())
            .spawn(move || {
                work();
                let _ = events.send(Event::Quiet);
            })
            .map_err(|error| Error::io("cannot start a thread for output", error))?;
        self.writers += 1;
        Ok(())
    }

    /// Says something about the launch, without waiting until it is written.
    pub fn notice(&self, line: String) {
        if let Some(notices) = &self.notices {
            let _ = notices.send(line);
        }
    }

    /// The last notice was given: lets their thread come to its end.
    pub fn no_more_notices(&mut self) {
        self.notices = None;
    }

    /// Whether somebody waits for the console.
    pub fn is_writing(&self) -> bool {
        self.console.is_writing()
    }

    /// Those that have not ended.
    pub fn running(&self) -> impl Iterator<Item = &RankProcess> {
        self.started.iter().map(|started| &started.process).filter(|process| process.end.is_none())
    }

    /// Those that have ended, collected, while processes remain in their groups.
    pub fn left_behind(&self) -> impl Iterator<Item = &RankProcess> {
        let ended =
            self.started.iter().map(|started| &started.process).filter(|process| process.end.is_some());
        ended.filter(|process| process.left_behind())
    }

    /// Signals all groups; those of ended ranks too, since what they left behind is theirs.
    pub fn signal(&self, signal: Signal) {
        self.started.iter().for_each(|started| started.process.signal(signal));
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.console.close();
    }
}

/// Which rank reads and writes where.
struct Routing<'a> {
    options: &'a Options,
    lent: bool,
}

impl Routing<'_> {
    fn stdin(&self, child: &Child) -> Stdin {
        match (self.lent, child.local_rank) {
            (false, _) => Stdin::Pipes,
            (true, 0) => Stdin::Terminal,
            (true, _) => Stdin::PipesBesideTerminal,
        }
    }

    fn files(&self, child: &Child) -> Streams {
        let (redirects, tee) = (self.options.redirects, self.options.tee);
        match self.stdin(child) {
            Stdin::Pipes => Streams { out: redirects.out | tee.out, err: redirects.err | tee.err },
            Stdin::PipesBesideTerminal => Streams::BOTH,
            Stdin::Terminal => Streams::default(),
        }
    }

    fn shows(&self, child: &Child, stream: Stream) -> bool {
        let listed = self.options.shown.as_ref().is_none_or(|shown| shown.contains(&child.local_rank));
        let (redirected, copied) = match stream {
            Stream::Out => (self.options.redirects.out, self.options.tee.out),
            Stream::Err => (self.options.redirects.err, self.options.tee.err),
        };
        !self.lent && listed && (copied || !redirected)
    }
}
