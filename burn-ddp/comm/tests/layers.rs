//! Order of the modules of burn-ddp-comm, burn-ddp and burnrun, read from their sources.
//!
//! Packages enforce the order between themselves. Inside a package, a module may use only modules that stand before it
//! in the lists below, and no two files import each other. Parent modules that re-export their children, and tests, are
//! exempt.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Modules of burn-ddp-comm, lowest first.
const COMM: &str = "rank error dtype deadline environment options operation watched net store rendezvous transport \
                    control shm topology reduction collective group";
/// Modules of burn-ddp, lowest first.
const DDP: &str = "bucket communicator norm process_group parameters reducer replica backend nn data learner";
/// Modules of burnrun, lowest first.
const BURNRUN: &str = "sys signals options plan output process supervisor launcher args main";

/// Import of module path `to` in the file of module path `from`.
type Import = (Vec<String>, Vec<String>);

/// Reads the sources below `folder`: module path and text without comments and tests.
fn read(folder: &Path, module: &[String], files: &mut Vec<(Vec<String>, String)>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path: PathBuf = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let inner = [module, std::slice::from_ref(&name)].concat();
        match name.as_str() {
            "tests" => {}
            _ if path.is_dir() => read(&path, &inner, files),
            _ => {
                let source = std::fs::read_to_string(&path).expect("a source");
                let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
                let code = code.lines().map(|line| line.split("//").next().unwrap_or_default());
                let module = if name == "mod" || name == "lib" { module.to_vec() } else { inner };
                files.push((module, code.collect::<Vec<_>>().join("\n")));
            }
        }
    }
}

/// Adds all paths of the tree that `text` begins with, as in `a::{b, c::d}`, and returns the rest of the text.
fn expand<'a>(mut text: &'a str, mut path: Vec<String>, found: &mut Vec<Vec<String>>) -> &'a str {
    loop {
        text = text.trim_start();
        if let Some(mut rest) = text.strip_prefix('{') {
            while !rest.trim_start().starts_with('}') && !rest.trim_start().is_empty() {
                rest = expand(rest, path.clone(), found).trim_start();
                rest = rest.trim_start_matches(|c| c != ',' && c != '}').trim_start_matches(',');
            }
            return rest.trim_start().trim_start_matches('}');
        }
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        match &text[..end] {
            "super" => drop(path.pop()),
            name => path.push(name.to_owned()),
        }
        match text[end..].strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                found.push(path);
                return &text[end..];
            }
        }
    }
}

/// Imports of a package: each path that begins with `crate` or `super`, cut to the module whose file it names.
fn imports(files: &[(Vec<String>, String)]) -> BTreeSet<Import> {
    let mut all = BTreeSet::new();
    for (from, code) in files {
        let mut found = Vec::new();
        for (start, keyword) in code.match_indices("crate::").chain(code.match_indices("super::")) {
            if !code[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
                let (text, path) = match keyword {
                    "crate::" => (&code[start + keyword.len()..], Vec::new()),
                    _ => (&code[start..], from.clone()),
                };
                expand(text, path, &mut found);
            }
        }
        for mut to in found {
            while !to.is_empty() && files.iter().all(|(module, _)| *module != to) {
                to.pop();
            }
            all.insert((from.clone(), to));
        }
    }
    all
}

/// Describes every import that breaks a rule.
fn violations(imports: &BTreeSet<Import>, order: &str) -> Vec<String> {
    let order: Vec<_> = order.split_whitespace().collect();
    let mut wrong = Vec::new();
    for (from, to) in imports.iter().filter(|(from, to)| from != to && !from.is_empty() && !to.is_empty()) {
        let place = |module: &[String]| order.iter().position(|known| *known == module[0]);
        let (user, used) = (from.join("::"), to.join("::"));
        match (place(from), place(to)) {
            (Some(upper), Some(lower)) if lower <= upper => {}
            (Some(_), Some(_)) => wrong.push(format!("{user} uses {used}, which stands after it")),
            _ => wrong.push(format!(
                "{user} uses {used}, and one of them is not in the order: add it to this test"
            )),
        }
        if user < used && imports.contains(&(to.clone(), from.clone())) {
            wrong.push(format!("{user} and {used} use each other"));
        }
    }
    wrong
}

#[test]
fn modules_use_only_what_stands_before_them_and_no_two_files_use_each_other() {
    for (folder, order) in [("src", COMM), ("../src", DDP), ("../burnrun/src", BURNRUN)] {
        let mut files = Vec::new();
        read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &[], &mut files);
        let wrong = violations(&imports(&files), order);
        assert!(files.len() > 10 && wrong.is_empty(), "{folder}: {wrong:#?}");
    }
}

#[test]
fn a_wrong_import_is_found() {
    let file = |module: &str, code: &str| (module.split("::").map(String::from).collect(), code.to_owned());
    let files = [
        file("store", "use crate::{rank::Rank, control::{self, Link}};"),
        file("control::link", "use super::\n    super::rank::Rank;"),
        file("control", ""),
        file("rank", "fn f() { crate::store::get() }"),
    ];
    let wrong = violations(&imports(&files), COMM);
    let wanted = ["rank uses store", "rank and store use each other", "store uses control"];
    assert_eq!(wrong.len(), wanted.len(), "{wrong:#?}");
    assert!(wanted.iter().all(|wanted| wrong.iter().any(|wrong| wrong.contains(wanted))), "{wrong:#?}");
}
