//! The plan of a launch: the program, and the environment of each rank.
//!
//! Planning is pure, so that every case is a unit test and no test starts a process: the environment is a lookup
//! closure, and port, cores and host name are values in [`LaunchContext`].

pub(crate) mod store_address;
pub(crate) mod store_port;

use std::ffi::OsString;

use crate::options::Options;

/// Variables from which libraries read their number of threads: rayon, OpenMP, OpenBLAS, matrixmultiply. None of these
/// libraries knows that other ranks share the cores.
const THREAD_VARIABLES: [&str; 4] =
    ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MATMUL_NUM_THREADS"];

/// Facts that a plan depends on and that are neither an option nor in the environment.
#[derive(Clone, Debug)]
pub(crate) struct LaunchContext {
    pub program: OsString,
    pub store_host: String,
    pub store_port: u16,
    pub cores: usize,
    /// Name of this node.
    pub host: String,
    /// An id that no other run has.
    pub unique_run_id: String,
}

/// One rank to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRank {
    pub rank: usize,
    pub local_rank: usize,
    /// Text in front of each line of its output.
    pub prefix: String,
    /// Variables in addition to the launcher's own environment.
    pub environment: Vec<(&'static str, String)>,
}

/// Everything to start on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub program: OsString,
    pub args: Vec<OsString>,
    pub ranks: Vec<PlannedRank>,
    pub run_id: String,
    pub host: String,
    /// The line that tells the user which values were chosen.
    pub summary: String,
}

impl Plan {
    /// Plans the ranks of this node. `lookup` reads the launcher's environment.
    pub fn new(
        options: &Options,
        context: &LaunchContext,
        lookup: impl Fn(&str) -> Option<OsString>,
    ) -> Self {
        let planner = Planner::new(options, context, lookup);
        Self {
            program: context.program.clone(),
            args: options.args.clone(),
            ranks: (0..options.nproc).map(|local_rank| planner.rank(local_rank)).collect(),
            summary: planner.summary(),
            host: context.host.clone(),
            run_id: planner.run_id,
        }
    }

    /// Returns true if the launcher sets the variable `name` for any rank.
    pub fn sets(&self, name: &str) -> bool {
        self.ranks.iter().any(|planned| planned.environment.iter().any(|(set, _)| *set == name))
    }
}

/// Values that all ranks of this node share.
struct Planner<'a> {
    options: &'a Options,
    context: &'a LaunchContext,
    run_id: String,
    /// Those of [`THREAD_VARIABLES`] that the user has not set.
    thread_variables: Vec<&'static str>,
    threads_per_rank: usize,
    /// True if NCCL prints, and the user has not chosen a file for it. Its output goes to files then, since on the
    /// console it would be mixed into the lines of the ranks.
    nccl_debug_to_files: bool,
}

impl<'a> Planner<'a> {
    fn new(
        options: &'a Options,
        context: &'a LaunchContext,
        lookup: impl Fn(&str) -> Option<OsString>,
    ) -> Self {
        let is_set = |name: &str| lookup(name).is_some_and(|value| !value.is_empty());
        Self {
            options,
            context,
            // All nodes must agree on the id, so only a single node can generate one.
            run_id: match &options.run_id {
                Some(id) => id.clone(),
                None if options.nnodes == 1 => context.unique_run_id.clone(),
                None => "none".into(),
            },
            thread_variables: THREAD_VARIABLES.into_iter().filter(|name| lookup(name).is_none()).collect(),
            threads_per_rank: (context.cores / options.nproc).max(1),
            nccl_debug_to_files: is_set("NCCL_DEBUG") && !is_set("NCCL_DEBUG_FILE"),
        }
    }

    fn rank(&self, local_rank: usize) -> PlannedRank {
        let rank = self.options.node_rank * self.options.nproc + local_rank;
        let prefix = match self.options.nnodes {
            1 => format!("[rank {rank}] "),
            _ => format!("[{}:rank {rank}] ", self.context.host),
        };
        PlannedRank { rank, local_rank, prefix, environment: self.environment(rank, local_rank) }
    }

    fn environment(&self, rank: usize, local_rank: usize) -> Vec<(&'static str, String)> {
        let Self { options, context, .. } = self;
        let mut environment = vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", (options.nnodes * options.nproc).to_string()),
            ("LOCAL_WORLD_SIZE", options.nproc.to_string()),
            ("GROUP_RANK", options.node_rank.to_string()),
            ("GROUP_WORLD_SIZE", options.nnodes.to_string()),
            ("MASTER_ADDR", context.store_host.clone()),
            ("MASTER_PORT", context.store_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", "0".into()),
            ("TORCHELASTIC_MAX_RESTARTS", "0".into()),
            ("TORCHELASTIC_RUN_ID", self.run_id.clone()),
        ];
        environment.extend(options.local_addr.clone().map(|address| ("BURN_DDP_IFACE", address)));
        let threads = self.threads_per_rank.to_string();
        environment.extend(self.thread_variables.iter().map(|name| (*name, threads.clone())));
        if self.nccl_debug_to_files {
            environment.push(("NCCL_DEBUG_FILE", self.nccl_debug_file(&rank.to_string())));
        }
        environment
    }

    fn nccl_debug_file(&self, rank: &str) -> String {
        let name = format!("nccl.{}.rank{rank}.log", self.context.host);
        self.options.log_dir.clone().unwrap_or_default().join(name).to_string_lossy().into_owned()
    }

    fn summary(&self) -> String {
        let processes = match self.options.nproc {
            1 => "1 process".to_string(),
            nproc => format!("{nproc} processes"),
        };
        let node = match self.options.nnodes {
            1 => String::new(),
            nnodes => format!(" on node {} of {nnodes}", self.options.node_rank),
        };
        let host = &self.context.store_host;
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let mut line = format!("{processes}{node}, store {host}:{}", self.context.store_port);
        if let Some((first, rest)) = self.thread_variables.split_first() {
            line += &format!(", {first}={} each", self.threads_per_rank);
            if !rest.is_empty() {
                line += &format!(" (and {})", rest.join(", "));
            }
        }
        if self.nccl_debug_to_files {
            line += &format!(", NCCL_DEBUG to {}", self.nccl_debug_file("N"));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> LaunchContext {
        LaunchContext {
            program: "prog".into(),
            store_host: "127.0.0.1".into(),
            store_port: 4321,
            cores: 8,
            host: "here".into(),
            unique_run_id: "own".into(),
        }
    }

    fn unset(_: &str) -> Option<OsString> {
        None
    }

    fn value<'a>(planned: &'a PlannedRank, name: &str) -> Option<&'a str> {
        planned.environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn one_node() {
        let plan = Plan::new(&Options { nproc: 3, ..Options::default() }, &context(), unset);
        assert_eq!(plan.ranks.len(), 3);
        let last = &plan.ranks[2];
        for (name, expected) in [
            ("RANK", "2"),
            ("LOCAL_RANK", "2"),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "4321"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RUN_ID", "own"),
            ("RAYON_NUM_THREADS", "2"),
            ("MATMUL_NUM_THREADS", "2"),
        ] {
            assert_eq!(value(last, name), Some(expected), "{name}");
        }
        assert_eq!(value(last, "BURN_DDP_IFACE"), None);
        assert_eq!(last.prefix, "[rank 2] ");
        assert_eq!(
            plan.summary,
            "3 processes, store 127.0.0.1:4321, RAYON_NUM_THREADS=2 each (and OMP_NUM_THREADS, \
             OPENBLAS_NUM_THREADS, MATMUL_NUM_THREADS)"
        );
    }

    #[test]
    fn the_second_of_two_nodes() {
        let options = Options {
            nproc: 2,
            nnodes: 2,
            node_rank: 1,
            local_addr: Some("10.0.0.2".into()),
            run_id: Some("job".into()),
            ..Options::default()
        };
        let plan = Plan::new(&options, &LaunchContext { store_host: "::1".into(), ..context() }, unset);
        let ranks: Vec<_> = plan.ranks.iter().map(|planned| (planned.rank, planned.local_rank)).collect();
        assert_eq!(ranks, [(2, 0), (3, 1)]);
        assert_eq!(value(&plan.ranks[0], "WORLD_SIZE"), Some("4"));
        assert_eq!(value(&plan.ranks[0], "GROUP_RANK"), Some("1"));
        assert_eq!(value(&plan.ranks[0], "BURN_DDP_IFACE"), Some("10.0.0.2"));
        assert_eq!(value(&plan.ranks[0], "TORCHELASTIC_RUN_ID"), Some("job"));
        assert_eq!(plan.ranks[0].prefix, "[here:rank 2] ");
        assert!(plan.summary.starts_with("2 processes on node 1 of 2, store [::1]:4321"), "{}", plan.summary);
    }

    #[test]
    fn threads_are_shared_out_and_the_users_choice_is_kept() {
        let many = Plan::new(&Options { nproc: 20, ..Options::default() }, &context(), unset);
        assert_eq!(value(&many.ranks[0], "RAYON_NUM_THREADS"), Some("1"));
        let chosen = |name: &str| (name == "RAYON_NUM_THREADS").then(|| "5".into());
        let kept = Plan::new(&Options { nproc: 2, ..Options::default() }, &context(), chosen);
        assert_eq!(value(&kept.ranks[0], "RAYON_NUM_THREADS"), None);
        assert_eq!(value(&kept.ranks[0], "OMP_NUM_THREADS"), Some("4"));
        assert!(kept.summary.contains("OMP_NUM_THREADS=4 each"), "{}", kept.summary);
    }

    #[test]
    fn nccl_debug_output_goes_to_one_file_per_rank() {
        let options = Options { nproc: 2, log_dir: Some("logs".into()), ..Options::default() };
        let debug = |name: &str| (name == "NCCL_DEBUG").then(|| "INFO".into());
        let files = Plan::new(&options, &context(), debug);
        assert_eq!(value(&files.ranks[1], "NCCL_DEBUG_FILE"), Some("logs/nccl.here.rank1.log"));
        assert!(files.summary.ends_with("NCCL_DEBUG to logs/nccl.here.rankN.log"), "{}", files.summary);
        for lookup in [unset as fn(&str) -> Option<OsString>, |_| Some("set".into())] {
            assert_eq!(value(&Plan::new(&options, &context(), lookup).ranks[1], "NCCL_DEBUG_FILE"), None);
        }
    }
}
