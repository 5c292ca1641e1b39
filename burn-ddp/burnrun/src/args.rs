//! The command line of `burnrun`. Names and defaults are torchrun's, so that its command lines work here.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use burn_ddp_comm::{Error, Result};
use clap::Parser;
use clap::builder::FalseyValueParser;

use crate::launcher::Launcher;
use crate::options::{Options, Streams, Tty};

const ABOUT: &str = "Starts one process per rank and supervises them";

const AFTER_HELP: &str = "\
Flags that torchrun has can also be given in the environment: PET_NPROC_PER_NODE for --nproc-per-node, and \
so on.

Exit code: that of the rank that failed first, or 128 + signal; 2 for wrong usage, 127 when PROGRAM is not \
found, 126 when it cannot be executed.

Examples:
  burnrun --nproc-per-node 2 ./train --steps 100
  burnrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 4 ./train";

/// The command line of `burnrun`, as typed. [`Args::launcher`] turns it into a launch.
#[derive(Clone, Debug, Parser)]
#[command(name = "burnrun", version, about = ABOUT, long_about = ABOUT, after_help = AFTER_HELP)]
pub struct Args {
    /// Processes on this node: a number, or `auto` or `cpu` for one per CPU core
    #[arg(short = 'n', long, alias = "nproc_per_node", value_name = "N", default_value = "1")]
    #[arg(env = "PET_NPROC_PER_NODE", hide_env = true)]
    nproc_per_node: ProcessCount,

    /// Number of nodes, each running burnrun once
    #[arg(long, value_name = "N", default_value = "1", env = "PET_NNODES", hide_env = true)]
    nnodes: NodeCount,

    /// Index of this node, from 0
    #[arg(long, alias = "node_rank", value_name = "I", default_value = "0")]
    #[arg(env = "PET_NODE_RANK", hide_env = true)]
    node_rank: usize,

    /// Address of node 0, where rank 0 serves the store; also read from MASTER_ADDR. One node: 127.0.0.1
    #[arg(long, alias = "master_addr", value_name = "HOST", env = "PET_MASTER_ADDR", hide_env = true)]
    master_addr: Option<String>,

    /// Port of the store; also read from MASTER_PORT. One node: a free one, several: 29500
    #[arg(long, alias = "master_port", value_name = "PORT", env = "PET_MASTER_PORT", hide_env = true)]
    master_port: Option<u16>,

    /// One node and a free port, whatever MASTER_ADDR and MASTER_PORT say
    #[arg(long, conflicts_with_all = ["master_addr", "master_port"])]
    #[arg(env = "PET_STANDALONE", hide_env = true, value_parser = FalseyValueParser::new())]
    standalone: bool,

    /// Address or interface of this node that its ranks bind and advertise (BURN_DDP_IFACE)
    #[arg(long, alias = "local_addr", value_name = "ADDR", env = "PET_LOCAL_ADDR", hide_env = true)]
    local_addr: Option<String>,

    /// Name of the run, equal on all nodes; ranks of different runs refuse each other
    #[arg(long, visible_alias = "rdzv-id", alias = "rdzv_id", value_name = "ID")]
    #[arg(env = "PET_RDZV_ID", hide_env = true)]
    run_id: Option<String>,

    /// Directory for files of output: DIR/ID/attempt_0/LOCAL_RANK/{stdout,stderr}.log
    #[arg(long, alias = "log_dir", value_name = "DIR", env = "PET_LOG_DIR", hide_env = true)]
    log_dir: Option<PathBuf>,

    /// Send streams to files instead of the console: 1 standard output, 2 standard error, 3 both
    #[arg(short, long, value_name = "0-3", default_value = "0", env = "PET_REDIRECTS", hide_env = true)]
    redirects: Streams,

    /// Send streams to files and to the console: 1 standard output, 2 standard error, 3 both
    #[arg(short, long, value_name = "0-3", default_value = "0", env = "PET_TEE", hide_env = true)]
    tee: Streams,

    /// Show only these local ranks on the console, for instance 0,1; the last lines of a failed rank always show
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", value_delimiter = ',')]
    #[arg(env = "PET_LOCAL_RANKS_FILTER", hide_env = true)]
    local_ranks_filter: Option<Vec<usize>>,

    /// Give rank 0 this terminal, for programs that draw on it; the other ranks write to files
    #[arg(long)]
    tty_rank0: bool,

    /// Seconds between SIGTERM and SIGKILL after a rank failed
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    grace: Duration,

    /// Seconds between a signal to burnrun, which is passed on, and SIGKILL
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    signal_grace: Duration,

    // Flags of torchrun that burnrun lacks. They are declared so that the error can say what to do instead.
    #[arg(long, alias = "max_restarts", default_value = "0", env = "PET_MAX_RESTARTS", hide = true)]
    max_restarts: usize,
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", hide = true)]
    rdzv_endpoint: Option<String>,
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", hide = true)]
    rdzv_backend: Option<String>,
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", hide = true)]
    monitor_interval: Option<f64>,

    /// Program to start and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

impl Args {
    /// Turns the flags into a launch.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](burn_ddp_comm::ErrorKind::Config) for flags of torchrun that are not supported yet and for
    /// flags that contradict each other.
    pub fn launcher(self) -> Result<Launcher> {
        self.reject_unsupported_flags()?;
        let nproc = match self.nproc_per_node {
            ProcessCount::Count(count) => count,
            ProcessCount::PerCore => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let mut command = self.command.into_iter();
        let options = Options {
            nproc,
            nnodes: self.nnodes.0,
            node_rank: self.node_rank,
            standalone: self.standalone,
            master_addr: self.master_addr,
            master_port: self.master_port,
            local_addr: self.local_addr,
            run_id: self.run_id,
            log_dir: self.log_dir,
            redirects: self.redirects,
            tee: self.tee,
            local_ranks_filter: self.local_ranks_filter,
            tty: if self.tty_rank0 { Tty::Always } else { Tty::Never },
            grace: self.grace,
            signal_grace: self.signal_grace,
            program: command.next(),
            args: command.collect(),
            ..Options::default()
        };
        options.check()?;
        Ok(Launcher::with_options(options))
    }

    fn reject_unsupported_flags(&self) -> Result<()> {
        if self.max_restarts > 0 {
            return Err(Error::config(format!(
                "--max-restarts {}: restarting is not supported yet, only 0 is; resume from a checkpoint by hand",
                self.max_restarts
            )));
        }
        if let Some(endpoint) = &self.rdzv_endpoint {
            return Err(Error::config(format!(
                "--rdzv-endpoint {endpoint}: elastic rendezvous is not supported yet; use --nnodes N --node-rank I \
                 --master-addr HOST --master-port PORT"
            )));
        }
        match self.rdzv_backend.as_deref() {
            None | Some("static") => Ok(()),
            Some(backend) => Err(Error::config(format!(
                "--rdzv-backend {backend}: only `static` is supported; use --master-addr and --master-port"
            ))),
        }
    }
}

/// Value of `--nproc-per-node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessCount {
    Count(usize),
    PerCore,
}

impl FromStr for ProcessCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" | "cpu" => Ok(Self::PerCore),
            "gpu" | "cuda" | "xpu" => Err("devices are not counted here: give the number".into()),
            _ => match text.parse() {
                Ok(0) => Err("a node runs at least one process".into()),
                Ok(count) => Ok(Self::Count(count)),
                Err(_) => Err("expected a number, `auto` or `cpu`".into()),
            },
        }
    }
}

/// Value of `--nnodes`: `N`, or torchrun's `N:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NodeCount(usize);

impl FromStr for NodeCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (min.parse(), max.parse()) {
            (Ok(0), _) | (_, Ok(0)) => Err("there is at least one node".into()),
            (Ok::<usize, _>(min), Ok(max)) if min == max => Ok(Self(min)),
            (Ok(_), Ok(_)) => Err("a changing number of nodes is not supported yet: give one number".into()),
            _ => Err("expected a number".into()),
        }
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn options(words: &str) -> Result<Options, String> {
        let words = std::iter::once("burnrun").chain(words.split_whitespace());
        let args = Args::try_parse_from(words).map_err(|error| error.to_string())?;
        args.launcher().map(|launcher| launcher.options().clone()).map_err(|error| error.to_string())
    }

    fn refused(words: &str, part: &str) {
        let message = options(words).expect_err("must be refused");
        assert!(message.contains(part), "{words}: {message}");
    }

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn flags_after_the_program_are_the_programs() {
        let options = options("--nproc-per-node 3 ./train --nproc-per-node 9 -r x -- y").unwrap();
        assert_eq!(options.nproc, 3);
        assert_eq!(options.program, Some("./train".into()));
        assert_eq!(options.args, ["--nproc-per-node", "9", "-r", "x", "--", "y"].map(OsString::from));
    }

    #[test]
    fn torchruns_spellings_work() {
        let options = options(
            "--nnodes=2:2 --node_rank=1 --nproc_per_node=cpu --master_addr=h --master_port=29400 --rdzv-id=j7 \
             --max-restarts=0 --monitor-interval 5 --rdzv-backend static -r 1 -t 3 --local-ranks-filter 0 p",
        )
        .unwrap();
        assert_eq!((options.nnodes, options.node_rank), (2, 1));
        assert_eq!((options.master_addr.as_deref(), options.master_port), (Some("h"), Some(29400)));
        assert_eq!(options.run_id.as_deref(), Some("j7"));
        assert_eq!(options.redirects, Streams { out: true, err: false });
        assert_eq!(options.tee, Streams::BOTH);
        assert_eq!(options.local_ranks_filter, Some(vec![0]));
        assert!(options.nproc >= 1);
    }

    #[test]
    fn unsupported_flags_are_refused_with_the_way_out() {
        refused("--nproc-per-node 0 p", "at least one process");
        refused("--nproc-per-node gpu p", "give the number");
        refused("--nproc-per-node two p", "expected a number");
        refused("--nnodes 1:4 p", "not supported yet");
        refused("--nnodes 0 p", "at least one node");
        refused("--max-restarts 3 p", "--max-restarts 3");
        refused("--rdzv-endpoint h:1 p", "--master-addr");
        refused("--rdzv-backend c10d p", "static");
        refused("--standalone --master-port 1 p", "--standalone");
        refused("--standalone --nnodes 2 p", "--standalone");
        refused("--grace=-1 p", "--grace");
        refused("--redirects 4 p", "expected 0");
        refused("--no-such-flag p", "--no-such-flag");
        refused("", "PROGRAM");
    }

    #[test]
    fn help_lists_only_what_does_something() {
        let help = Args::command().render_long_help().to_string();
        assert!(help.contains("--nproc-per-node"));
        for absent in ["--max-restarts", "--rdzv-endpoint", "--rdzv-backend", "--monitor-interval"] {
            assert!(!help.contains(absent), "{absent}");
        }
    }
}
