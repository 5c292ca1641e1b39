//! Starts the ranks, waits for them and ends them: one loop over one queue of events.
//!
//! ```text
//!  starting ──► running ──rank failed──► failed ──────report grace over──────┐
//!     │            │                       │                                 │ SIGTERM
//!     │            └──────── stop signal ──┴─(passed on)─► terminating ◄─────┘
//!     │                                                        │ grace period over, or stop signal repeated
//!     └─────────── a rank cannot be started ─────────────► killing (SIGKILL)
//!
//!  any of these ──all ranks have ended──► ending orphans ──► draining output ──► done
//! ```
//!
//! - **Failed**: the other ranks keep running for a moment, so that they can report what they saw. Ranks that fail
//!   meanwhile are listed in the error; `failures.rs` decides which rank is named as the first.
//! - **Terminating, killing**: all process groups were signalled. Killing lasts at most [`KILL_TIMEOUT`].
//! - **Ending orphans**: processes that remain in the groups of ended ranks get SIGTERM and SIGKILL too.
//! - **Draining output**: the launcher waits until all output is written, but not for a process that left its rank's
//!   group and holds a pipe open, nor, after a failure or a stop signal, for a console without a reader.
//!
//! Every wait is bounded, except for running ranks and, after a success, for a console without a reader. The launcher
//! returns when no process of a rank's group remains, and the error with the last lines of the failed rank is printed
//! after that.

mod events;
mod failures;
mod ranks;

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, Result};
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2};

use self::events::{Event, SignalEvents};
use self::failures::{Failure, FailureReport, Failures, OtherFailure, stopped_by};
use self::ranks::Ranks;
use crate::options::{Options, Tty};
use crate::output::log_files::LogFiles;
use crate::output::routing::Routing;
use crate::output::terminal::Terminal;
use crate::plan::Plan;
use crate::process::exit::RankExit;
use crate::process::subreaper::Subreaper;
use crate::signals::{self, STOP_SIGNALS};

/// Maximum time that a process may take to end after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// Stop signals that follow the first one within this time count as the same request: `timeout` and some schedulers
/// send their signal twice at once.
const DUPLICATE_WINDOW: Duration = Duration::from_millis(200);
/// Interval at which groups are checked for orphans; not every system tells the launcher when an orphan ends.
const ORPHAN_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time after the last rank's end that a pipe may stay open without output.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the progress of output is checked after [`DRAIN_TIMEOUT`].
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of bytes that ended ranks can have left in one pipe, prefixes included. If more comes, a living
/// process writes it.
const MAX_LEFT_IN_PIPE: u64 = 2 << 20;
/// Maximum time that the console may accept no output at the end of a launch that failed or was stopped.
const STUCK_CONSOLE_TIMEOUT: Duration = Duration::from_secs(5);

/// States of the loop. All but `Running` end at the given time.
#[derive(Clone, Copy, Debug)]
enum State {
    Running,
    Failed(Instant),
    Terminating(Instant),
    Killing(Instant),
}

/// The first stop signal.
#[derive(Clone, Copy, Debug)]
struct StopRequest {
    signal: i32,
    received: Instant,
}

impl StopRequest {
    /// Returns true if `signal` is a second request, which kills the ranks. A terminal that closes sends SIGHUP more
    /// than once, so SIGHUP never is.
    fn is_repeated_by(&self, signal: i32) -> bool {
        signal != SIGHUP && self.received.elapsed() >= DUPLICATE_WINDOW
    }
}

/// Starts the ranks of `plan` and returns when they have ended.
///
/// # Errors
/// Those of [`Launcher::run`](crate::Launcher::run).
pub(crate) fn run(options: &Options, plan: &Plan) -> Result<()> {
    let (sender, events) = mpsc::channel();
    let _signals = SignalEvents::start(sender.clone())?;
    let _subreaper = Subreaper::enable();
    let (terminal, log_files, notice) = open_terminal_and_files(options, plan)?;
    let routing = Routing { options, terminal_lent: terminal.is_some() };
    let log_directory = log_files.directory.clone();
    let mut supervisor = Supervisor {
        options,
        ranks: Ranks::new(sender)?,
        state: State::Running,
        failures: Failures::default(),
        stop: None,
        terminal,
        events,
    };
    if let Some(notice) = notice {
        supervisor.ranks.print_notice(notice);
    }
    let started = supervisor.ranks.start(plan, routing, log_files);
    if started.is_err() {
        supervisor.kill();
    }
    supervisor.wait_for_ranks();
    supervisor.end_orphans();
    let output_lost = supervisor.drain_output();
    let mut outcome = started.and_then(|()| supervisor.outcome(plan));
    if output_lost {
        outcome = outcome.map_err(|error| {
            let lost = "nobody reads the console; the last output for it is lost";
            Error::new(error.kind(), format!("{error}\n{lost}"))
        });
    }
    match log_directory {
        Some(directory) => directory.clean_up(outcome),
        None => outcome,
    }
}

/// Opens the terminal for rank 0, if it gets one, and the log files. With [`Tty::Auto`], log files that cannot be
/// opened are a reason to do without the terminal; the third value then is a notice that says so.
fn open_terminal_and_files(
    options: &Options,
    plan: &Plan,
) -> Result<(Option<Terminal>, LogFiles, Option<String>)> {
    let terminal = Terminal::prepare_to_lend(options.tty)?;
    let open = |terminal_lent| LogFiles::open(plan, Routing { options, terminal_lent });
    match open(terminal.is_some()) {
        Ok(log_files) => Ok((terminal, log_files, None)),
        Err(error) if terminal.is_some() && options.tty == Tty::Auto => {
            drop(terminal);
            let notice = format!("{error}; so rank 0 writes into a pipe instead of the terminal");
            Ok((None, open(false)?, Some(notice)))
        }
        Err(error) => Err(error),
    }
}

struct Supervisor<'a> {
    options: &'a Options,
    ranks: Ranks,
    state: State,
    failures: Failures,
    stop: Option<StopRequest>,
    /// `Some` if local rank 0 has, or had, the terminal.
    terminal: Option<Terminal>,
    events: Receiver<Event>,
}

impl Supervisor<'_> {
    /// Waits for the next event; returns `None` at `deadline`.
    fn next_event(&mut self, deadline: Option<Instant>) -> Option<Event> {
        let event = match deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() { None } else { self.events.recv_timeout(left).ok() }
            }
        };
        if event == Some(Event::WriterFinished) {
            self.ranks.active_writers -= 1;
        }
        event
    }

    /// Returns when all ranks have ended, or when a rank did not end after SIGKILL.
    fn wait_for_ranks(&mut self) {
        loop {
            self.handle_exits();
            if self.ranks.running().next().is_none() {
                return;
            }
            let deadline = match self.state {
                State::Running => None,
                State::Failed(at) | State::Terminating(at) | State::Killing(at) => Some(at),
            };
            match (self.next_event(deadline), self.state) {
                (Some(Event::Signal(signal)), _) => self.handle_signal(signal),
                (Some(Event::ChildChanged | Event::WriterFinished), _) => {}
                (None, State::Running) => return,
                (None, State::Failed(_)) => self.terminate(Signal::TERM, self.options.grace),
                (None, State::Terminating(_)) => {
                    self.notice_running("did not end when asked to: SIGKILL");
                    self.kill();
                }
                (None, State::Killing(_)) => {
                    self.notice_running("did not die of SIGKILL: leaving it behind");
                    return;
                }
            }
        }
    }

    fn notice_running(&mut self, what: &str) {
        let lines: Vec<String> = self.ranks.running().map(|rank| format!("{rank} {what}")).collect();
        lines.into_iter().for_each(|line| self.ranks.print_notice(line));
    }

    fn terminate(&mut self, signal: Signal, grace: Duration) {
        self.ranks.signal(signal);
        self.state = State::Terminating(Instant::now() + grace);
    }

    fn kill(&mut self) {
        self.ranks.signal(Signal::KILL);
        self.state = State::Killing(Instant::now() + KILL_TIMEOUT);
    }

    /// Handles the ranks that have ended since the last call.
    fn handle_exits(&mut self) {
        let mut ended: Vec<(usize, RankExit)> = Vec::new();
        for (index, started) in self.ranks.started.iter_mut().enumerate() {
            ended.extend(started.process.poll_exit().map(|exit| (index, exit)));
        }
        // Of several ranks that ended, one that was killed comes first: it did not exit because another one ended.
        ended.sort_by_key(|(index, exit)| (!matches!(exit, RankExit::Signal(_)), *index));
        for (index, exit) in ended {
            let had_terminal = self.ranks.started[index].has_terminal();
            if had_terminal && let Some(terminal) = &mut self.terminal {
                terminal.restore(matches!(exit, RankExit::Signal(_)));
                self.ranks.print_held_notices();
            }
            match exit {
                RankExit::Code(0) => {}
                // Ctrl-C in the terminal reaches rank 0 only, and is meant for the launch.
                RankExit::Signal(signal) if had_terminal && [SIGINT, SIGQUIT].contains(&signal) => {
                    self.handle_signal(signal);
                }
                _ => self.handle_failure(Failure { index, exit }),
            }
        }
        for started in self.ranks.started.iter().filter(|started| started.has_terminal()) {
            started.process.resume_if_stopped();
        }
    }

    fn handle_failure(&mut self, failure: Failure) {
        if !matches!(self.state, State::Running | State::Failed(_)) {
            return;
        }
        let exit = failure.exit;
        let process = &self.ranks.started[failure.index].process;
        if let Some(first) = self.failures.first() {
            let first = self.ranks.started[first.index].process.rank;
            self.ranks.print_notice(format!("{process} {exit}, after rank {first}"));
        } else if let others @ 1.. = self.ranks.running().count() {
            let seconds = self.options.report_grace.as_secs_f32();
            self.ranks.print_notice(format!(
                "{process} {exit}; the {others} still running have {seconds} s to report before SIGTERM"
            ));
            self.state = State::Failed(Instant::now() + self.options.report_grace);
        }
        self.failures.record(failure, Instant::now());
    }

    fn handle_signal(&mut self, signal: i32) {
        let Some(named) = Signal::from_named_raw(signal) else { return };
        if [SIGUSR1, SIGUSR2].contains(&signal) {
            self.ranks.signal(named);
            return;
        }
        if let Some(stop) = self.stop {
            if stop.is_repeated_by(signal) {
                self.kill();
            }
            return;
        }
        self.stop = Some(StopRequest { signal, received: Instant::now() });
        let name = signals::name(signal);
        self.ranks.print_notice(format!("{name} received and passed on; once more kills the ranks at once"));
        match self.state {
            State::Running => self.terminate(named, self.options.signal_grace),
            State::Failed(_) => self.terminate(named, self.options.grace),
            State::Terminating(_) => self.ranks.signal(named),
            State::Killing(_) => {}
        }
    }

    /// Ends the processes that ranks left behind in their process groups.
    fn end_orphans(&mut self) {
        self.ranks.started.iter().for_each(|started| started.process.reap());
        if self.ranks.with_orphans().next().is_none() {
            return;
        }
        let deadline = match self.state {
            State::Killing(_) => Instant::now(),
            State::Terminating(at) => at,
            State::Running | State::Failed(_) => {
                let mut lines = Vec::new();
                for rank in self.ranks.with_orphans() {
                    rank.signal(Signal::TERM);
                    lines.push(format!("{rank} left processes behind: ending them"));
                }
                lines.into_iter().for_each(|line| self.ranks.print_notice(line));
                Instant::now() + self.options.grace
            }
        };
        self.wait_for_orphans(deadline);
        self.ranks.with_orphans().for_each(|rank| rank.signal(Signal::KILL));
        self.wait_for_orphans(Instant::now() + KILL_TIMEOUT);
    }

    fn wait_for_orphans(&mut self, deadline: Instant) {
        while Instant::now() < deadline && self.ranks.with_orphans().next().is_some() {
            if self.wait_or_stop(Instant::now() + ORPHAN_CHECK_INTERVAL) {
                return;
            }
        }
    }

    /// Waits for one event, at most until `deadline`. Returns true if it is a signal to stop at once.
    fn wait_or_stop(&mut self, deadline: Instant) -> bool {
        match self.next_event(Some(deadline)) {
            Some(Event::Signal(signal)) if STOP_SIGNALS.contains(&signal) => match self.stop {
                Some(stop) => stop.is_repeated_by(signal),
                None => {
                    self.stop = Some(StopRequest { signal, received: Instant::now() });
                    signal != SIGHUP
                }
            },
            _ => false,
        }
    }

    /// Waits until all output is written; returns true if output is lost because the console has no reader.
    ///
    /// A console that is slow to read is waited for. One that does not read at all is waited for without limit only if
    /// the launch succeeded. A process that left its rank's group is not waited for, even if it holds a pipe open.
    fn drain_output(&mut self) -> bool {
        self.ranks.close_notices();
        let mut written = self.ranks.console.written();
        let max_written = written + MAX_LEFT_IN_PIPE * self.ranks.active_writers as u64;
        let mut last_progress = Instant::now();
        let mut deadline = last_progress + DRAIN_TIMEOUT;
        while self.ranks.active_writers > 0 {
            if self.wait_or_stop(deadline) {
                break;
            }
            let now = Instant::now();
            if now < deadline {
                continue;
            }
            if !self.ranks.console.is_writing() || self.ranks.console.written() > max_written {
                break;
            }
            if self.ranks.console.written() != written {
                written = self.ranks.console.written();
                last_progress = now;
            }
            let succeeded = self.failures.first().is_none() && self.stop.is_none();
            if !succeeded && now.duration_since(last_progress) >= STUCK_CONSOLE_TIMEOUT {
                return true;
            }
            deadline = now + DRAIN_CHECK_INTERVAL;
        }
        false
    }

    fn outcome(&self, plan: &Plan) -> Result<()> {
        let Some(Failure { index, exit }) = self.failures.first() else {
            return self.stop.map_or(Ok(()), |stop| Err(stopped_by(stop.signal)));
        };
        let others = self.failures.others().iter().map(|failure| {
            let started = &self.ranks.started[failure.index];
            let line = started.last_lines.as_ref().and_then(|lines| lines.most_telling());
            OtherFailure { rank: started.process.rank, exit: failure.exit, line }
        });
        let first = &self.ranks.started[index];
        let report = FailureReport {
            process: first.process.to_string(),
            exit,
            host: &plan.host,
            prefix: &plan.ranks[index].prefix,
            last_lines: first.last_lines.as_ref().map(|lines| lines.lines()),
            others: others.collect(),
        };
        Err(report.into_error())
    }
}
