//! The part of the environment that describes this process among its peers.
//!
//! The variables are those of torchrun, which burnrun sets too. They are read through a lookup closure and not from
//! `std::env` directly, so that tests inject an environment and two ranks can live in one test process. The four
//! required variables are set together or not at all: with half of them each process would believe in another world,
//! and all would wait for each other.

use crate::error::{Error, Result};
use crate::rank::Rank;

/// The environment of one rank, as a launcher gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// Position among all processes (`RANK`).
    pub rank: Rank,
    /// Number of processes (`WORLD_SIZE`).
    pub world_size: usize,
    /// Position among the processes of this node (`LOCAL_RANK`), which chooses the device.
    pub local_rank: usize,
    /// Number of processes on this node (`LOCAL_WORLD_SIZE`).
    pub local_world_size: usize,
    /// Index of this node (`GROUP_RANK`).
    pub node: usize,
    /// Host and port of the store that rank 0 serves (`MASTER_ADDR`, `MASTER_PORT`); `None` in a world of one
    /// that no launcher started.
    pub master: Option<(String, u16)>,
    /// Name of the run (`TORCHELASTIC_RUN_ID`); ranks of different runs refuse each other.
    pub run_id: String,
    /// Number of times that the launcher has restarted the ranks (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: usize,
}

/// Variables that must be set together.
const REQUIRED: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
const OPTIONAL: [&str; 5] =
    ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"];

/// Looks up variables of the process environment, after it has refused those of `names` that are not UTF-8: they would
/// count as unset.
///
/// # Errors
/// `Config` naming the first variable that is not UTF-8.
pub(crate) fn process_environment(names: &[&str]) -> Result<impl Fn(&str) -> Option<String>> {
    match names.iter().find(|name| std::env::var_os(name).is_some_and(|value| value.to_str().is_none())) {
        Some(name) => {
            Err(Error::config(format!("the value of {name} is not UTF-8: set it anew or unset it")))
        }
        None => Ok(|name: &str| std::env::var(name).ok()),
    }
}

impl RankInfo {
    /// The world of one: rank 0 of 1, no store, no socket.
    pub fn solo() -> Self {
        Self {
            rank: Rank(0),
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            node: 0,
            master: None,
            run_id: "none".into(),
            restart_count: 0,
        }
    }

    /// Reads the process environment; see [`RankInfo::from_lookup`].
    ///
    /// # Errors
    /// Those of [`RankInfo::from_lookup`], and `Config` naming a variable whose value is not UTF-8.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(process_environment(&[&REQUIRED[..], &OPTIONAL].concat())?)
    }

    /// Reads the variables through `lookup`. None of the required four means a world of one.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::error::ErrorKind::Config) when only some of RANK, WORLD_SIZE, MASTER_ADDR
    /// and MASTER_PORT are set (the missing ones are named), when a number does not parse (variable and value
    /// are named), when a rank lies outside its world, or when a value makes no sense (a world of 0, an empty address,
    /// port 0 with several ranks).
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let (set, missing): (Vec<&str>, Vec<&str>) =
            REQUIRED.into_iter().partition(|name| lookup(name).is_some());
        if set.is_empty() {
            return Ok(Self::solo());
        }
        if !missing.is_empty() {
            return Err(Error::config(format!(
                "the environment has {} but not {}: start the program under burnrun (or another launcher) \
                 that sets all of them, or unset all for a world of one",
                set.join(", "),
                missing.join(", "),
            )));
        }
        let text = |name: &str| lookup(name).unwrap_or_default();
        let world_size: usize = number("WORLD_SIZE", &text("WORLD_SIZE"))?;
        let rank: usize = number("RANK", &text("RANK"))?;
        let port = number("MASTER_PORT", &text("MASTER_PORT"))?;
        let port = u16::try_from(port)
            .map_err(|_| Error::config(format!("MASTER_PORT={port}: ports end at 65535")))?;
        let address = text("MASTER_ADDR");
        if world_size == 0 {
            return Err(Error::config("WORLD_SIZE=0: a world has at least one process"));
        }
        check_below("RANK", rank, "WORLD_SIZE", world_size)?;
        if address.trim().is_empty() {
            return Err(Error::config("MASTER_ADDR is empty: set it to the host of rank 0"));
        }
        if port == 0 && world_size > 1 {
            return Err(Error::config("MASTER_PORT=0: all ranks must know one real port"));
        }
        let optional = |name: &str, default: usize| match lookup(name) {
            Some(value) => number(name, &value),
            None => Ok(default),
        };
        let local_rank = optional("LOCAL_RANK", rank)?;
        let local_world_size = optional("LOCAL_WORLD_SIZE", world_size.max(local_rank.saturating_add(1)))?;
        check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)?;
        Ok(Self {
            rank: Rank(rank),
            world_size,
            local_rank,
            local_world_size,
            node: optional("GROUP_RANK", 0)?,
            master: Some((address, port)),
            run_id: lookup("TORCHELASTIC_RUN_ID").unwrap_or_else(|| "none".into()),
            restart_count: optional("TORCHELASTIC_RESTART_COUNT", 0)?,
        })
    }
}

fn number(name: &str, value: &str) -> Result<usize> {
    value.trim().parse().map_err(|_| {
        Error::config(format!("{name}={value}: not a number that {name} can have; set it to a whole number"))
    })
}

fn check_below(name: &str, value: usize, limit_name: &str, limit: usize) -> Result<()> {
    if value < limit {
        return Ok(());
    }
    Err(Error::config(format!("{name}={value} is outside of {limit_name}={limit}: ranks begin at 0")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn read(pairs: &[(&str, &str)]) -> Result<RankInfo> {
        let find =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        RankInfo::from_lookup(find)
    }

    const FULL: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

    fn refused(pairs: &[(&str, &str)], words: &[&str]) {
        let error = read(pairs).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::Config);
        for word in words {
            assert!(error.to_string().contains(word), "{error} lacks {word}");
        }
    }

    fn with<'a>(name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
        FULL.iter().map(|pair| if pair.0 == name { (name, value) } else { *pair }).collect()
    }

    #[test]
    fn nothing_is_a_world_of_one() {
        assert_eq!(read(&[]).unwrap(), RankInfo::solo());
        assert_eq!(read(&[("LOCAL_RANK", "3")]).unwrap().world_size, 1);
    }

    #[test]
    fn everything_is_read() {
        let info = read(&FULL).unwrap();
        assert_eq!((info.rank, info.world_size, info.local_rank), (Rank(1), 2, 1));
        assert_eq!(info.master, Some(("localhost".into(), 29500)));
    }

    #[test]
    fn a_part_is_refused_by_name() {
        refused(&[("RANK", "0")], &["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]);
        refused(&FULL[..3], &["MASTER_PORT"]);
    }

    #[test]
    fn wrong_values_are_named() {
        refused(&with("WORLD_SIZE", "two"), &["WORLD_SIZE=two"]);
        refused(&with("RANK", "2"), &["RANK=2", "WORLD_SIZE=2"]);
        refused(&with("RANK", "-1"), &["RANK=-1"]);
        refused(&with("WORLD_SIZE", "0"), &["WORLD_SIZE=0"]);
        refused(&with("MASTER_PORT", "70000"), &["MASTER_PORT=70000"]);
        refused(&with("MASTER_ADDR", " "), &["MASTER_ADDR"]);
        let more = |name, value| FULL.into_iter().chain([(name, value)]).collect::<Vec<_>>();
        refused(&more("LOCAL_WORLD_SIZE", "0"), &["LOCAL_RANK=1", "LOCAL_WORLD_SIZE=0"]);
        refused(&more("LOCAL_RANK", "-3"), &["LOCAL_RANK=-3"]);
    }
}
