//! The one-way rule: a module uses only what stands below it.

use std::collections::BTreeSet;
use std::path::Path;

/// Floors from the ground up; modules of one floor do not use each other, unless they are on the ground.
const FLOORS: &[&[&str]] = &[
    &["error", "rank", "deadline", "dtype", "options"],
    &["store", "transport", "bucket"],
    &["rendezvous", "control", "collective"],
    &["join"],
    &["communicator"],
    &["norm", "process_group"],
    &["parameters"],
    &["reducer"],
    &["replica"],
    &["backend"],
    &["nn", "data"],
    &["learner"],
];

/// Modules beside the house, and all that they may use.
const BESIDE: &[(&str, &[&str])] = &[("launch", &["error", "rank", "store"]), ("bin", &[])];

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

/// Modules of the crate that `source` names.
fn used(source: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in source.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        for rest in line.split("crate::").skip(1) {
            let names = rest.strip_prefix('{').map_or(rest, |list| list.split('}').next().unwrap_or(list));
            let several = rest.starts_with('{');
            for name in names.split(',') {
                let name: String =
                    name.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                found.insert(name);
                if !several {
                    break;
                }
            }
        }
    }
    found
}

/// What is wrong with `module` using `name`.
fn wrong(module: &str, name: &str) -> Option<String> {
    // Names re-exported at the root are types; the rule is about modules.
    if name == module || !name.chars().next().is_some_and(char::is_lowercase) {
        return None;
    }
    if let Some((_, allowed)) = BESIDE.iter().find(|(known, _)| *known == module) {
        return (!allowed.contains(&name))
            .then(|| format!("{module} uses {name}, but may use only {allowed:?}"));
    }
    match (floor(module), floor(name)) {
        (Some(0), Some(0)) => None,
        (Some(upper), Some(lower)) if lower < upper => None,
        (None, _) => {
            Some(format!("{module} has no floor: give it one in this test and in docs/architecture.md"))
        }
        (_, None) => Some(format!("{module} uses {name}, which has no floor")),
        _ => Some(format!("{module} uses {name}, which does not stand below it")),
    }
}

fn check(folder: &Path, module: Option<&str>, wrongs: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the crate") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() {
            check(&path, Some(module.unwrap_or(&name)), wrongs);
        } else if module.is_some() || name != "lib" {
            let source = std::fs::read_to_string(&path).expect("a source");
            let module = module.unwrap_or(&name);
            wrongs.extend(used(&source).iter().filter_map(|name| wrong(module, name)));
        }
    }
}

#[test]
fn every_module_uses_only_what_stands_below_it() {
    let mut wrongs = Vec::new();
    check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut wrongs);
    assert!(wrongs.is_empty(), "{wrongs:#?}");
}

#[test]
fn a_wrong_arrow_would_be_found() {
    assert_eq!(used("use crate::{rank, store::Store};\nlet x = crate::replica::new();").len(), 3);
    assert!(wrong("store", "replica").is_some() && wrong("store", "transport").is_some());
    assert!(wrong("launch", "replica").is_some() && wrong("nowhere", "rank").is_some());
    assert!(wrong("replica", "store").is_none() && wrong("rank", "error").is_none());
}
