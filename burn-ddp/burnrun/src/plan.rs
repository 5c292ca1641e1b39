//! The plan: which commands, with which environments. Pure, so that every case is a unit test and none starts
//! a process: the environment is a lookup closure, and port, cores and host are values.

use std::ffi::OsString;

use super::options::Options;
use burn_ddp_comm::{Error, Result};

/// The port of the store on several nodes, where no node can choose a free one for the others.
const PORT: u16 = 29500;

/// Variables by which libraries choose their number of threads: rayon, OpenMP, OpenBLAS, matrixmultiply. None of
/// them knows that other ranks share the cores.
const THREADS: [&str; 4] =
    ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MATMUL_NUM_THREADS"];

/// Where rank 0 is to serve the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoreAt {
    pub host: String,
    /// `None`: any free one.
    pub port: Option<u16>,
}

/// What a plan needs to know that is neither an option nor in the environment.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    pub program: OsString,
    pub store_host: String,
    pub store_port: u16,
    pub cores: usize,
    /// Name of this node.
    pub host: String,
    /// An id no other run has.
    pub own_run_id: String,
}

/// One rank to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Child {
    pub rank: usize,
    pub local_rank: usize,
    /// What is written in front of each of its lines.
    pub prefix: String,
    /// What it gets on top of the launcher's own environment.
    pub env: Vec<(&'static str, String)>,
}

/// What to start, and what to say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub program: OsString,
    pub args: Vec<OsString>,
    pub children: Vec<Child>,
    pub run_id: String,
    pub host: String,
    pub notice: String,
}

impl Plan {
    /// Whether the ranks are given the variable `name`.
    pub(super) fn gives(&self, name: &str) -> bool {
        self.children.iter().any(|child| child.env.iter().any(|(given, _)| *given == name))
    }
}

/// Where the store is, from flags, MASTER_ADDR and MASTER_PORT, and defaults, in this order.
pub(super) fn store(options: &Options, lookup: impl Fn(&str) -> Option<OsString>) -> Result<StoreAt> {
    let lookup = |name: &str| match lookup(name).filter(|_| !options.standalone) {
        None => Ok(None),
        Some(value) => match value.to_str().map(str::trim) {
            Some("") => Ok(None),
            Some(text) => Ok(Some(text.to_string())),
            None => Err(Error::config(format!(
                "{name}={} is not text (UTF-8): set it anew, or unset it",
                value.to_string_lossy()
            ))),
        },
    };
    let single = options.nnodes == 1;
    let own = if options.node == 0 { options.local_addr.clone() } else { None };
    let typed = match &options.master_addr {
        Some(host) => Some(host.clone()),
        None => lookup("MASTER_ADDR")?,
    };
    let host = match typed {
        Some(host) => unbracketed(host),
        None if single => "127.0.0.1".into(),
        None => own.ok_or_else(|| {
            Error::config(format!(
                "--nnodes {} needs --master-addr: the address of node 0, as the other nodes reach it",
                options.nnodes
            ))
        })?,
    };
    let given = match options.master_port {
        Some(port) => Some(port),
        None => lookup("MASTER_PORT")?.map(|text| port(&text)).transpose()?,
    };
    let port = match given {
        Some(0) if !single => {
            return Err(Error::config(
                "port 0 on several nodes: all of them must know one real --master-port",
            ));
        }
        Some(0) => None,
        None if !single => Some(PORT),
        port => port,
    };
    Ok(StoreAt { host, port })
}

fn port(text: &str) -> Result<u16> {
    text.parse().map_err(|_| {
        Error::config(format!("MASTER_PORT={text}: not a port; set it to a number from 1 to 65535"))
    })
}

/// An IPv6 address without the brackets it has in URLs: MASTER_ADDR is an address, and its readers add the port.
fn unbracketed(host: String) -> String {
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.map(str::to_string).unwrap_or(host)
}

/// The children of this node.
pub(super) fn plan(
    options: &Options,
    around: &Surroundings,
    lookup: impl Fn(&str) -> Option<OsString>,
) -> Plan {
    let single = options.nnodes == 1;
    // All nodes must agree on the id, and only a single node can make one up.
    let run_id = match &options.run_id {
        Some(id) => id.clone(),
        None if single => around.own_run_id.clone(),
        None => "none".into(),
    };
    let threads = (around.cores / options.nproc).max(1);
    // What NCCL prints is not to be mixed with the lines of ranks, which it would cut.
    let given = |name: &str| lookup(name).is_some_and(|value| !value.is_empty());
    let nccl_files = given("NCCL_DEBUG") && !given("NCCL_DEBUG_FILE");
    let nccl_file = |rank: &str| {
        let name = format!("nccl.{}.rank{rank}.log", around.host);
        options.log_dir.clone().unwrap_or_default().join(name).to_string_lossy().into_owned()
    };
    let free: Vec<&'static str> = THREADS.into_iter().filter(|name| lookup(name).is_none()).collect();
    let world_size = options.nnodes * options.nproc;

    let child = |local_rank: usize| {
        let rank = options.node * options.nproc + local_rank;
        let mut env = vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_WORLD_SIZE", options.nproc.to_string()),
            ("GROUP_RANK", options.node.to_string()),
            ("GROUP_WORLD_SIZE", options.nnodes.to_string()),
            ("MASTER_ADDR", around.store_host.clone()),
            ("MASTER_PORT", around.store_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", "0".into()),
            ("TORCHELASTIC_MAX_RESTARTS", "0".into()),
            ("TORCHELASTIC_RUN_ID", run_id.clone()),
        ];
        env.extend(options.local_addr.clone().map(|address| ("BURN_DDP_IFACE", address)));
        env.extend(free.iter().map(|name| (*name, threads.to_string())));
        env.extend(nccl_files.then(|| ("NCCL_DEBUG_FILE", nccl_file(&rank.to_string()))));
        let prefix =
            if single { format!("[rank {rank}] ") } else { format!("[{}:rank {rank}] ", around.host) };
        Child { rank, local_rank, prefix, env }
    };

    let mut notice = notice(options, around, &free, threads);
    if nccl_files {
        notice += &format!(", NCCL_DEBUG to {}", nccl_file("N"));
    }
    Plan {
        program: around.program.clone(),
        args: options.args.clone(),
        children: (0..options.nproc).map(child).collect(),
        notice,
        host: around.host.clone(),
        run_id,
    }
}

/// The one line that says what is chosen for the user.
fn notice(options: &Options, around: &Surroundings, free: &[&str], threads: usize) -> String {
    let processes = match options.nproc {
        1 => "1 process".to_string(),
        nproc => format!("{nproc} processes"),
    };
    let node = match options.nnodes {
        1 => String::new(),
        nnodes => format!(" on node {} of {nnodes}", options.node),
    };
    let host = &around.store_host;
    let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    let mut line = format!("{processes}{node}, store {host}:{}", around.store_port);
    if let Some((first, rest)) = free.split_first() {
        line += &format!(", {first}={threads} each");
        if !rest.is_empty() {
            line += &format!(" (and {})", rest.join(", "));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around() -> Surroundings {
        Surroundings {
            program: "prog".into(),
            store_host: "127.0.0.1".into(),
            store_port: 4321,
            cores: 8,
            host: "here".into(),
            own_run_id: "own".into(),
        }
    }

    fn nothing(_: &str) -> Option<OsString> {
        None
    }

    fn value<'a>(child: &'a Child, name: &str) -> Option<&'a str> {
        child.env.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn one_node() {
        let plan = plan(&Options { nproc: 3, ..Options::default() }, &around(), nothing);
        assert_eq!(plan.children.len(), 3);
        let last = &plan.children[2];
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
            plan.notice,
            "3 processes, store 127.0.0.1:4321, RAYON_NUM_THREADS=2 each (and OMP_NUM_THREADS, \
             OPENBLAS_NUM_THREADS, MATMUL_NUM_THREADS)"
        );
    }

    #[test]
    fn the_second_of_two_nodes() {
        let options = Options {
            nproc: 2,
            nnodes: 2,
            node: 1,
            local_addr: Some("10.0.0.2".into()),
            run_id: Some("job".into()),
            ..Options::default()
        };
        let plan = plan(&options, &Surroundings { store_host: "::1".into(), ..around() }, nothing);
        let ranks: Vec<_> = plan.children.iter().map(|child| (child.rank, child.local_rank)).collect();
        assert_eq!(ranks, [(2, 0), (3, 1)]);
        assert_eq!(value(&plan.children[0], "WORLD_SIZE"), Some("4"));
        assert_eq!(value(&plan.children[0], "GROUP_RANK"), Some("1"));
        assert_eq!(value(&plan.children[0], "BURN_DDP_IFACE"), Some("10.0.0.2"));
        assert_eq!(value(&plan.children[0], "TORCHELASTIC_RUN_ID"), Some("job"));
        assert_eq!(plan.children[0].prefix, "[here:rank 2] ");
        assert!(plan.notice.starts_with("2 processes on node 1 of 2, store [::1]:4321"), "{}", plan.notice);
    }

    #[test]
    fn threads_are_shared_out_and_the_users_choice_is_kept() {
        let many = plan(&Options { nproc: 20, ..Options::default() }, &around(), nothing);
        assert_eq!(value(&many.children[0], "RAYON_NUM_THREADS"), Some("1"));
        let chosen = |name: &str| (name == "RAYON_NUM_THREADS").then(|| "5".into());
        let kept = plan(&Options { nproc: 2, ..Options::default() }, &around(), chosen);
        assert_eq!(value(&kept.children[0], "RAYON_NUM_THREADS"), None);
        assert_eq!(value(&kept.children[0], "OMP_NUM_THREADS"), Some("4"));
        assert!(kept.notice.contains("OMP_NUM_THREADS=4 each"), "{}", kept.notice);
    }

    #[test]
    fn what_nccl_prints_has_a_file_a_rank() {
        let options = Options { nproc: 2, log_dir: Some("logs".into()), ..Options::default() };
        let debug = |name: &str| (name == "NCCL_DEBUG").then(|| "INFO".into());
        let files = plan(&options, &around(), debug);
        assert_eq!(value(&files.children[1], "NCCL_DEBUG_FILE"), Some("logs/nccl.here.rank1.log"));
        assert!(files.notice.ends_with("NCCL_DEBUG to logs/nccl.here.rankN.log"), "{}", files.notice);
        for lookup in [nothing as fn(&str) -> Option<OsString>, |_| Some("set".into())] {
            assert_eq!(value(&plan(&options, &around(), lookup).children[1], "NCCL_DEBUG_FILE"), None);
        }
    }

    fn at(options: &Options, pairs: &[(&str, &str)]) -> Result<StoreAt> {
        store(options, |name| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.into()))
    }

    #[test]
    fn where_the_store_is() {
        let one = Options::default();
        let foreign = [("MASTER_ADDR", "far"), ("MASTER_PORT", "7")];
        let expect = |host: &str, port| StoreAt { host: host.into(), port };
        assert_eq!(at(&one, &[]).unwrap(), expect("127.0.0.1", None));
        assert_eq!(at(&one, &foreign).unwrap(), expect("far", Some(7)));
        assert_eq!(at(&one, &[("MASTER_PORT", "0")]).unwrap(), expect("127.0.0.1", None));
        let standalone = Options { standalone: true, ..one.clone() };
        assert_eq!(at(&standalone, &foreign).unwrap(), expect("127.0.0.1", None));
        let typed = Options { master_addr: Some("near".into()), master_port: Some(9), ..one };
        assert_eq!(at(&typed, &foreign).unwrap(), expect("near", Some(9)));
        let bracketed = Options { master_addr: Some("[fd77::1]".into()), ..Options::default() };
        assert_eq!(at(&bracketed, &[]).unwrap(), expect("fd77::1", None));
        assert_eq!(at(&Options::default(), &[("MASTER_ADDR", "[::1]")]).unwrap(), expect("::1", None));
        let two = Options { nnodes: 2, ..Options::default() };
        assert_eq!(at(&two, &[("MASTER_ADDR", "far")]).unwrap(), expect("far", Some(29500)));
        let addressed = Options { local_addr: Some("10.0.0.1".into()), ..two };
        assert_eq!(at(&addressed, &[]).unwrap(), expect("10.0.0.1", Some(29500)));
    }

    #[test]
    fn an_address_that_is_not_text_is_refused_by_name() {
        use std::os::unix::ffi::OsStringExt;
        let one = Options::default();
        for refused in ["MASTER_ADDR", "MASTER_PORT"] {
            let lookup = |name: &str| (name == refused).then(|| OsString::from_vec(b"h\xffst".into()));
            let error = store(&one, lookup).expect_err("must be refused");
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(refused), "{error}");
            store(&Options { standalone: true, ..one.clone() }, lookup).unwrap();
        }
    }

    #[test]
    fn a_store_nobody_can_find_is_refused() {
        let two = Options { nnodes: 2, ..Options::default() };
        for (options, pairs, word) in [
            (&two, vec![], "--master-addr"),
            (
                &Options { node: 1, local_addr: Some("10.0.0.2".into()), ..two.clone() },
                vec![],
                "--master-addr",
            ),
            (&two, vec![("MASTER_ADDR", "far"), ("MASTER_PORT", "0")], "port 0"),
            (&Options::default(), vec![("MASTER_PORT", "http")], "MASTER_PORT=http"),
        ] {
            let error = at(options, &pairs).expect_err("must be refused");
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(word), "{error} lacks {word}");
        }
    }
}
