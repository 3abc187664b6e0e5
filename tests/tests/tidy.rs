//! Rules about the tree itself, checked like any other rule.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Which crate may know which. A missing name is a missing right.
const MAY_KNOW: [(&str, &[&str]); 7] = [
    ("actors/domain", &[]),
    ("actors", &["domain"]),
    ("api", &["domain", "actors"]),
    ("node/cluster", &["domain", "actors"]),
    ("node", &["domain", "actors", "api", "cluster"]),
    ("openapi", &["api"]),
    ("tests", &["domain", "actors", "api", "cluster", "node", "openapi"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the workspace")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

fn all_sources() -> Vec<(String, String)> {
    let mut paths = vec![];
    sources(&root(), &mut paths);
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("readable");
        let name = path.strip_prefix(root()).expect("inside").display().to_string();
        (name, text)
    };
    paths.into_iter().map(read).collect()
}

#[test]
fn crates_know_only_what_they_may() {
    for (folder, allowed) in MAY_KNOW {
        let manifest =
            fs::read_to_string(root().join(folder).join("Cargo.toml")).expect("readable");
        for name in ["domain", "actors", "api", "cluster", "node", "openapi"] {
            let knows = manifest.lines().any(|line| line.starts_with(&format!("{name}.workspace")));
            assert!(!knows || allowed.contains(&name), "{folder} must not depend on {name}");
        }
    }
}

#[test]
fn every_file_opens_with_what_it_is_for() {
    for (name, text) in all_sources() {
        assert!(text.starts_with("//! "), "{name} must open with a `//!` paragraph");
    }
}

#[test]
fn openraft_is_known_to_one_folder() {
    for (name, text) in all_sources() {
        let may =
            name.starts_with("node/cluster/src/raft") || name.starts_with("node/cluster/tests");
        let uses = text.lines().any(|line| line.trim_start().starts_with("use openraft"));
        assert!(may || !uses, "{name} must not use openraft");
    }
}

#[test]
fn statuses_are_chosen_in_one_file() {
    // A malformed id, a query or a layer names its problem; only `error.rs` maps reasons.
    for (name, text) in all_sources().into_iter().filter(|(name, _)| name.starts_with("actors/")) {
        assert!(!text.contains("StatusCode"), "{name} must not know HTTP statuses");
    }
}

#[test]
fn the_tree_speaks_of_itself_alone() {
    let unfinished = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
    ];
    for (name, text) in all_sources() {
        for word in unfinished {
            assert!(!text.contains(word), "{name} says {word}");
        }
    }
}
