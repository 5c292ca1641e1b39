//! The one loop that waits for everything: ends of ranks, signals, deadlines, ends of output.
//!
//! Its rules are few. The first failure gives the exit code, since it most often is the cause: the others get a
//! moment to say what they saw, then SIGTERM, then SIGKILL. Those that fail in that moment by themselves are listed
//! with it, for when the cause is among them. One of them takes its place: a rank that was killed or crashed within a second
//! of the first, which left with a code. The kernel closes a process's connections before it tells its parent, so a peer may
//! notice, report and leave in between. Every wait is bounded. The launcher leaves when nothing of the
//! ranks is left, and only then says the last words.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{
    SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGQUIT, SIGSEGV, SIGUSR1, SIGUSR2,
};

use super::options::{Options, Tty};
use super::plan::Plan;
use super::process::{Adoption, End};
use super::ranks::{Files, Ranks};
use super::signals::{self, SignalEvents};
use super::terminal::Terminal;
use super::verdict::{self, AlsoFailed, Evidence};
use burn_ddp_comm::{Error, Result};

/// How long the death of a rank may take from the moment in which its peers can notice it.
const UNSEEN_DEATH: Duration = Duration::from_secs(1);
/// How long a rank may take to die of SIGKILL.
const DEATH: Duration = Duration::from_secs(2);
/// Signals by which a process does not end because of another's end.
const NOT_CHOSEN: [i32; 5] = [SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE];
/// How long after the last rank its pipes may stay open, held by a process that left the rank's group.
const LAST_OUTPUT: Duration = Duration::from_secs(2);
/// The most that ended ranks can have left in one pipe, prefixes included; more comes from somebody alive.
const LEFT_IN_PIPE: u64 = 2 << 20;
/// How long a console may take none of the output of a launch that failed or was stopped; somebody may wait for
/// the launcher to end, who cannot know that it waits for a reader.
const STUCK: Duration = Duration::from_secs(5);
/// `timeout` and some schedulers send the same signal twice at once; only a later one means impatience.
const IMPATIENCE: Duration = Duration::from_millis(200);
/// Not every system tells when an orphan of a rank ends, so their groups are looked at this often.
const ORPHANS: Duration = Duration::from_millis(20);

/// What the loop wakes up for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A child changed its state.
    Child,
    /// The launcher got this signal.
    Signal(i32),
    /// A thread that writes to the console has finished.
    Quiet,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Running,
    /// A rank failed; until then the others may report.
    Reporting(Instant),
    /// All were asked to end; then comes SIGKILL.
    Ending(Instant),
    /// All were killed; then the launcher leaves, whatever is left.
    Killed(Instant),
}

/// Starts the ranks of `plan` and returns when they have ended.
pub(super) fn run(options: &Options, plan: &Plan) -> Result<()> {
    let (sender, events) = mpsc::channel();
    let _signals = SignalEvents::watch(sender.clone())?;
    let _adoption = Adoption::begin();
    let mut terminal = Terminal::lend(options.tty)?;
    let mut files = Files::open(options, plan, terminal.is_some());
    let mut without_terminal = None;
    if let (Err(error), Some(_), Tty::Auto) = (&files, &terminal, options.tty) {
        without_terminal = Some(format!("{error}; so rank 0 writes into a pipe instead of the terminal"));
        terminal = None;
        files = Files::open(options, plan, false);
    }
    let files = files?;
    let logs = files.logs.clone();
    let ranks = Ranks::new(sender)?;
    let mut launch = Launch {
        options,
        ranks,
        phase: Phase::Running,
        failed: None,
        also_failed: Vec::new(),
        stop: None,
        terminal,
        events,
    };
    without_terminal.into_iter().for_each(|line| launch.ranks.notice(line));
    let started = launch.ranks.start(options, plan, files);
    if started.is_err() {
        launch.kill();
    }
    launch.supervise();
    launch.sweep();
    let stuck = launch.drain();
    let mut outcome = started.and_then(|()| launch.verdict(plan));
    if stuck {
        outcome = outcome.map_err(|error| {
            let lost = "nobody reads the console; the last output for it is lost";
            Error::new(error.kind(), format!("{error}\n{lost}"))
        });
    }
    match logs {
        Some(logs) => logs.finish(outcome),
        None => outcome,
    }
}

struct Launch<'a> {
    options: &'a Options,
    ranks: Ranks,
    phase: Phase,
    /// Index of the rank that failed first, and when that was seen.
    failed: Option<(usize, Instant)>,
    /// Those that failed before the others were asked to end.
    also_failed: Vec<(usize, End)>,
    /// The signal that stops the launch, and when it came.
    stop: Option<(i32, Instant)>,
    /// Where local rank 0 has the terminal, or had it.
    terminal: Option<Terminal>,
    events: Receiver<Event>,
}

impl Launch<'_> {
    /// The next event, or `None` once `until` has come.
    fn next(&mut self, until: Option<Instant>) -> Option<Event> {
        let event = match until {
            None => self.events.recv().ok(),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() { None } else { self.events.recv_timeout(left).ok() }
            }
        };
        if event == Some(Event::Quiet) {
            self.ranks.writers -= 1;
        }
        event
    }

    /// Returns when all ranks have ended or could not be ended.
    fn supervise(&mut self) {
        loop {
            self.look();
            if self.ranks.running().next().is_none() {
                return;
            }
            let until = match self.phase {
                Phase::Running => None,
                Phase::Reporting(until) | Phase::Ending(until) | Phase::Killed(until) => Some(until),
            };
            match (self.next(until), self.phase) {
                (Some(Event::Signal(signal)), _) => self.on_signal(signal),
                (Some(Event::Child | Event::Quiet), _) => {}
                (None, Phase::Running) => return,
                (None, Phase::Reporting(_)) => self.end(Signal::TERM, self.options.grace),
                (None, Phase::Ending(_)) => {
                    self.notice_running("did not end when asked to: SIGKILL");
                    self.kill();
                }
                (None, Phase::Killed(_)) => {
                    self.notice_running("did not die of SIGKILL: leaving it behind");
                    return;
                }
            }
        }
    }

    fn notice_running(&mut self, what: &str) {
        let lines: Vec<String> = self.ranks.running().map(|rank| format!("{rank} {what}")).collect();
        lines.into_iter().for_each(|line| self.ranks.notice(line));
    }

    /// Asks all to end.
    fn end(&mut self, signal: Signal, grace: Duration) {
        self.ranks.signal(signal);
        self.phase = Phase::Ending(Instant::now() + grace);
    }

    fn kill(&mut self) {
        self.ranks.signal(Signal::KILL);
        self.phase = Phase::Killed(Instant::now() + DEATH);
    }

    /// Looks which ranks have ended since the last look.
    fn look(&mut self) {
        let mut ended: Vec<(usize, End)> = Vec::new();
        for (index, rank) in self.ranks.started.iter_mut().enumerate() {
            ended.extend(rank.process.poll().map(|end| (index, end)));
        }
        // Of several that are seen at once, one that was killed did not choose to follow another.
        ended.sort_by_key(|(index, end)| (!matches!(end, End::Signal(_)), *index));
        for (index, end) in ended {
            let had_terminal = self.ranks.started[index].tail.is_none();
            if had_terminal && let Some(terminal) = &mut self.terminal {
                terminal.restore(matches!(end, End::Signal(_)));
                self.ranks.release_notices();
            }
            match end {
                End::Code(0) => {}
                // A key in the terminal reaches rank 0 only, and means the launch.
                End::Signal(signal) if had_terminal && [SIGINT, SIGQUIT].contains(&signal) => {
                    self.on_signal(signal);
                }
                _ => self.on_failure(index, end),
            }
        }
        for started in self.ranks.started.iter().filter(|started| started.tail.is_none()) {
            started.process.resume_if_stopped();
        }
    }

    fn on_failure(&mut self, index: usize, end: End) {
        match (self.phase, self.failed) {
            (Phase::Running, None) => {
                self.failed = Some((index, Instant::now()));
                let others = self.ranks.running().count();
                if others > 0 {
                    let seconds = self.options.report.as_secs_f32();
                    self.ranks.notice(format!(
                        "{} {end}; the {others} still running have {seconds} s to report before SIGTERM",
                        self.ranks.started[index].process
                    ));
                    self.phase = Phase::Reporting(Instant::now() + self.options.report);
                }
            }
            (Phase::Running | Phase::Reporting(_), Some((first, seen))) => {
                self.ranks.notice(format!(
                    "{} {end}, after rank {}",
                    self.ranks.started[index].process, self.ranks.started[first].process.rank
                ));
                match (end, self.ranks.started[first].process.end) {
                    (End::Signal(signal), Some(code @ End::Code(_)))
                        if NOT_CHOSEN.contains(&signal) && seen.elapsed() < UNSEEN_DEATH =>
                    {
                        self.failed = Some((index, seen));
                        self.also_failed.push((first, code));
                    }
                    _ => self.also_failed.push((index, end)),
                }
            }
            _ => {}
        }
    }

    fn on_signal(&mut self, signal: i32) {
        let Some(named) = Signal::from_named_raw(signal) else { return };
        if [SIGUSR1, SIGUSR2].contains(&signal) {
            self.ranks.signal(named);
            return;
        }
        let now = Instant::now();
        let Some((_, first)) = self.stop else {
            self.stop = Some((signal, now));
            let name = signals::name(signal);
            self.ranks.notice(format!("{name} received and passed on; once more kills the ranks at once"));
            match self.phase {
                Phase::Running => self.end(named, self.options.signal_grace),
                Phase::Reporting(_) => self.end(named, self.options.grace),
                Phase::Ending(_) => self.ranks.signal(named),
                Phase::Killed(_) => {}
            }
            return;
        };
        // A closing terminal sends SIGHUP more than once, without anybody being impatient.
        if signal != SIGHUP && now.duration_since(first) >= IMPATIENCE {
            self.kill();
        }
    }

    /// Ends what the ranks left behind in their process groups.
    fn sweep(&mut self) {
        self.ranks.started.iter().for_each(|started| started.process.collect());
        if self.ranks.left_behind().next().is_none() {
            return;
        }
        let until = match self.phase {
            Phase::Killed(_) => Instant::now(),
            Phase::Ending(until) => until,
            Phase::Running | Phase::Reporting(_) => {
                let mut lines = Vec::new();
                for rank in self.ranks.left_behind() {
                    rank.signal(Signal::TERM);
                    lines.push(format!("{rank} left processes behind: ending them"));
                }
                lines.into_iter().for_each(|line| self.ranks.notice(line));
                Instant::now() + self.options.grace
            }
        };
        self.wait_for_orphans(until);
        self.ranks.left_behind().for_each(|rank| rank.signal(Signal::KILL));
        self.wait_for_orphans(Instant::now() + DEATH);
    }

    fn wait_for_orphans(&mut self, until: Instant) {
        while Instant::now() < until && self.ranks.left_behind().next().is_some() {
            if self.impatient(Instant::now() + ORPHANS) {
                return;
            }
        }
    }

    /// Waits for one event or until then; whether a signal asked to hurry.
    fn impatient(&mut self, until: Instant) -> bool {
        match self.next(Some(until)) {
            Some(Event::Signal(signal)) if signals::STOP.contains(&signal) => {
                let now = Instant::now();
                let (_, first) = *self.stop.get_or_insert((signal, now));
                signal != SIGHUP && (first == now || now.duration_since(first) >= IMPATIENCE)
            }
            _ => false,
        }
    }

    /// Waits until all output is written; returns whether the console was stuck and output is lost. A process that
    /// left its rank's group may hold a pipe open for ever, and is not waited for; a console that is slow to read
    /// is, and one that does not read at all only by a launch that went well.
    fn drain(&mut self) -> bool {
        self.ranks.no_more_notices();
        let mut written = self.ranks.console.written();
        let most = written + LEFT_IN_PIPE * self.ranks.writers as u64;
        let mut last_progress = Instant::now();
        let mut until = last_progress + LAST_OUTPUT;
        while self.ranks.writers > 0 {
            if self.impatient(until) {
                break;
            }
            let now = Instant::now();
            if now < until {
                continue;
            }
            if !self.ranks.console.is_writing() || self.ranks.console.written() > most {
                break;
            }
            if self.ranks.console.written() != written {
                written = self.ranks.console.written();
                last_progress = now;
            }
            let went_well = self.failed.is_none() && self.stop.is_none();
            if !went_well && now.duration_since(last_progress) >= STUCK {
                return true;
            }
            until = now + LAST_OUTPUT / 10;
        }
        false
    }

    fn verdict(&self, plan: &Plan) -> Result<()> {
        if let Some((index, _)) = self.failed {
            let also = self.also_failed.iter().map(|&(index, end)| {
                let started = &self.ranks.started[index];
                let line = started.tail.as_ref().and_then(|tail| tail.last());
                AlsoFailed { rank: started.process.rank, end, line }
            });
            let evidence = Evidence {
                host: &plan.host,
                prefix: &plan.children[index].prefix,
                lines: self.ranks.started[index].tail.as_ref().map(|tail| tail.lines()),
                others: also.collect(),
            };
            return Err(verdict::failure(&self.ranks.started[index].process, &evidence));
        }
        match self.stop {
            Some((signal, _)) => Err(verdict::stopped(signal)),
            None => Ok(()),
        }
    }
}
