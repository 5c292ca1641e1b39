//! The started ranks of this node, and where their output goes.

use std::fs::File;
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
use burn_ddp_comm::{Error, Result};

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
    pub console: Arc<Console>,
    notices: Option<Sender<String>>,
    /// Notices kept back while rank 0 draws on the terminal.
    held: Option<Vec<String>>,
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
            held: None,
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

    /// Starts all children of `plan`; when it fails, those that were started are in `started`.
    pub fn start(&mut self, options: &Options, plan: &Plan, files: Files) -> Result<()> {
        let lent = files.lent;
        let routing = Routing { options, lent };
        self.announce(plan, files.logs.as_ref().map(Logs::directory), lent);
        self.held = lent.then(Vec::new);

        for (child, [out_file, err_file]) in plan.children.iter().zip(files.each) {
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
    pub fn notice(&mut self, line: String) {
        match (&mut self.held, &self.notices) {
            (Some(held), _) => held.push(line),
            (None, Some(notices)) => {
                let _ = notices.send(line);
            }
            (None, None) => {}
        }
    }

    /// The terminal is the launcher's again: says what was kept back.
    pub fn release_notices(&mut self) {
        for line in self.held.take().unwrap_or_default() {
            self.notice(line);
        }
    }

    /// The last notice was given: lets their thread come to its end.
    pub fn no_more_notices(&mut self) {
        self.release_notices();
        self.notices = None;
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

/// The files of all ranks, open before the first one runs, so that a disk that cannot be written starts nothing.
pub(super) struct Files {
    /// `None` if no rank writes to a file.
    pub logs: Option<Logs>,
    each: Vec<[Option<File>; 2]>,
    lent: bool,
}

impl Files {
    /// Opens what `plan` needs. With `lent`, local rank 0 gets the terminal.
    pub fn open(options: &Options, plan: &Plan, lent: bool) -> Result<Self> {
        let routing = Routing { options, lent };
        let wanted = plan.children.iter().any(|child| routing.files(child) != Streams::default());
        if !wanted {
            let each = plan.children.iter().map(|_| [None, None]).collect();
            return Ok(Self { logs: None, each, lent });
        }
        let logs = Logs::create(options, &plan.run_id)?;
        let each = plan.children.iter().map(|child| logs.open(child.local_rank, routing.files(child)));
        match each.collect() {
            Ok(each) => Ok(Self { logs: Some(logs), each, lent }),
            Err(error) => {
                logs.remove(false);
                Err(error)
            }
        }
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
