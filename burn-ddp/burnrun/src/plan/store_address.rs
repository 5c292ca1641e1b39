//! The address of the store: from flags, else from MASTER_ADDR and MASTER_PORT, else a default.

use std::ffi::OsString;

use burn_ddp_comm::{Error, Result};

use crate::options::Options;

/// Default port on several nodes, where no node can choose a free one for the others.
const DEFAULT_PORT: u16 = 29500;

/// The address at which rank 0 serves the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreAddress {
    pub host: String,
    /// Any free port if `None`.
    pub port: Option<u16>,
}

impl StoreAddress {
    /// Finds the address. `lookup` reads the environment, which `--standalone` makes this ignore.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](burn_ddp_comm::ErrorKind::Config) if a variable is malformed, or if nodes could not find
    /// the store.
    pub fn resolve(options: &Options, lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let lookup = |name: &str| lookup(name).filter(|_| !options.standalone);
        Ok(Self { host: host(options, lookup)?, port: port(options, lookup)? })
    }
}

fn host(options: &Options, lookup: impl Fn(&str) -> Option<OsString>) -> Result<String> {
    let given = match &options.master_addr {
        Some(host) => Some(host.clone()),
        None => text("MASTER_ADDR", lookup)?,
    };
    match (given, &options.local_addr) {
        (Some(host), _) => Ok(without_brackets(host)),
        (None, _) if options.nnodes == 1 => Ok("127.0.0.1".into()),
        (None, Some(local_addr)) if options.node_rank == 0 => Ok(local_addr.clone()),
        _ => Err(Error::config(format!(
            "--nnodes {} needs --master-addr: the address of node 0, as the other nodes reach it",
            options.nnodes
        ))),
    }
}

fn port(options: &Options, lookup: impl Fn(&str) -> Option<OsString>) -> Result<Option<u16>> {
    let given = match options.master_port {
        Some(port) => Some(port),
        None => text("MASTER_PORT", lookup)?.map(|text| parse_port(&text)).transpose()?,
    };
    match (given, options.nnodes) {
        (None | Some(0), 1) => Ok(None),
        (None, _) => Ok(Some(DEFAULT_PORT)),
        (Some(0), _) => {
            Err(Error::config("port 0 on several nodes: all of them must know one real --master-port"))
        }
        (port, _) => Ok(port),
    }
}

/// Returns the value of the variable `name`, trimmed; `None` if it is unset or blank.
fn text(name: &str, lookup: impl Fn(&str) -> Option<OsString>) -> Result<Option<String>> {
    let Some(value) = lookup(name) else { return Ok(None) };
    match value.to_str().map(str::trim) {
        Some("") => Ok(None),
        Some(text) => Ok(Some(text.to_string())),
        None => Err(Error::config(format!(
            "{name}={} is not text (UTF-8): set it anew, or unset it",
            value.to_string_lossy()
        ))),
    }
}

fn parse_port(text: &str) -> Result<u16> {
    text.parse().map_err(|_| {
        Error::config(format!("MASTER_PORT={text}: not a port; set it to a number from 1 to 65535"))
    })
}

/// Removes the brackets that an IPv6 address has in URLs. Programs append the port to MASTER_ADDR by themselves.
fn without_brackets(host: String) -> String {
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.map(str::to_string).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(options: &Options, pairs: &[(&str, &str)]) -> Result<StoreAddress> {
        StoreAddress::resolve(options, |name| {
            pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.into())
        })
    }

    #[test]
    fn flags_come_before_the_environment_and_defaults() {
        let one = Options::default();
        let foreign = [("MASTER_ADDR", "far"), ("MASTER_PORT", "7")];
        let expect = |host: &str, port| StoreAddress { host: host.into(), port };
        assert_eq!(resolve(&one, &[]).unwrap(), expect("127.0.0.1", None));
        assert_eq!(resolve(&one, &foreign).unwrap(), expect("far", Some(7)));
        assert_eq!(resolve(&one, &[("MASTER_PORT", "0")]).unwrap(), expect("127.0.0.1", None));
        let standalone = Options { standalone: true, ..one.clone() };
        assert_eq!(resolve(&standalone, &foreign).unwrap(), expect("127.0.0.1", None));
        let typed = Options { master_addr: Some("near".into()), master_port: Some(9), ..one };
        assert_eq!(resolve(&typed, &foreign).unwrap(), expect("near", Some(9)));
        let bracketed = Options { master_addr: Some("[fd77::1]".into()), ..Options::default() };
        assert_eq!(resolve(&bracketed, &[]).unwrap(), expect("fd77::1", None));
        assert_eq!(resolve(&Options::default(), &[("MASTER_ADDR", "[::1]")]).unwrap(), expect("::1", None));
        let two = Options { nnodes: 2, ..Options::default() };
        assert_eq!(resolve(&two, &[("MASTER_ADDR", "far")]).unwrap(), expect("far", Some(29500)));
        let addressed = Options { local_addr: Some("10.0.0.1".into()), ..two };
        assert_eq!(resolve(&addressed, &[]).unwrap(), expect("10.0.0.1", Some(29500)));
    }

    #[test]
    fn an_address_that_is_not_text_is_refused_by_name() {
        use std::os::unix::ffi::OsStringExt;
        let one = Options::default();
        for refused in ["MASTER_ADDR", "MASTER_PORT"] {
            let lookup = |name: &str| (name == refused).then(|| OsString::from_vec(b"h\xffst".into()));
            let error = StoreAddress::resolve(&one, lookup).expect_err("must be refused");
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(refused), "{error}");
            StoreAddress::resolve(&Options { standalone: true, ..one.clone() }, lookup).unwrap();
        }
    }

    #[test]
    fn a_store_that_nodes_cannot_find_is_refused() {
        let two = Options { nnodes: 2, ..Options::default() };
        for (options, pairs, word) in [
            (&two, vec![], "--master-addr"),
            (
                &Options { node_rank: 1, local_addr: Some("10.0.0.2".into()), ..two.clone() },
                vec![],
                "--master-addr",
            ),
            (&two, vec![("MASTER_ADDR", "far"), ("MASTER_PORT", "0")], "port 0"),
            (&Options::default(), vec![("MASTER_PORT", "http")], "MASTER_PORT=http"),
        ] {
            let error = resolve(options, &pairs).expect_err("must be refused");
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(word), "{error} lacks {word}");
        }
    }
}
