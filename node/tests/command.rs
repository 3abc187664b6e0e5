//! The binary as a program: what it prints, what it refuses, and how it ends.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Command, Output, Stdio},
};

fn roost(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roost"));
    command.args(arguments).envs(variables.iter().copied());
    command.output().expect("the binary runs")
}

fn said(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_setting_is_listed_with_its_origin() {
    let output = roost(&["config"], &[("ROOST_HEALTH__INTERVAL", "2s")]);
    assert!(output.status.success());
    let text = said(&output.stdout);
    assert!(text.contains("health.interval = \"2s\"  # ROOST_HEALTH__INTERVAL"), "{text}");
    assert!(text.lines().count() > 25 && text.lines().all(|line| line.contains(" = ")), "{text}");
}

#[test]
fn an_unknown_setting_is_an_error_that_names_it() {
    let output = roost(&["config"], &[("ROOST_HEALTH__INTERWAL", "2s")]);
    assert!(!output.status.success());
    assert!(said(&output.stderr).contains("health.interwal"), "{}", said(&output.stderr));
}

#[test]
fn more_nodes_than_make_sense_on_one_machine_are_refused() {
    let output = roost(&["dev", "--nodes", "30", "--port", "0"], &[]);
    assert!(!output.status.success());
    assert!(said(&output.stderr).contains("--nodes 30"), "{}", said(&output.stderr));
}

#[test]
fn a_folder_of_no_node_is_told_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().to_str().expect("a plain path");
    for command in ["serve", "token"] {
        let output = roost(&[command, "--data", data], &[]);
        assert!(!output.status.success());
        let words = said(&output.stderr);
        assert!(words.contains("belongs to no node"), "{command}: {words}");
    }
    let output = roost(&["join", "--data", data, "--token", "nonsense", "127.0.0.1:1"], &[]);
    assert!(said(&output.stderr).contains("no join token"), "{}", said(&output.stderr));
}

#[test]
fn the_document_is_printed_whole() {
    let output = roost(&["openapi"], &[]);
    assert!(
        output.status.success()
            && output.stdout.starts_with(b"{")
            && output.stdout.ends_with(b"}\n")
    );
}

#[test]
fn the_settings_file_that_is_shipped_has_every_setting_with_its_default() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/roost.toml");
    let listed = |arguments: &[&str]| {
        let output = roost(arguments, &[]);
        assert!(output.status.success(), "{}", said(&output.stderr));
        said(&output.stdout)
    };
    let defaults = listed(&["config"]);
    let shipped = listed(&["--config", file.to_str().expect("a plain path"), "config"]);
    for (default, shipped) in defaults.lines().zip(shipped.lines()) {
        let (setting, _) = default.rsplit_once("  # ").expect("an origin");
        let (same, origin) = shipped.rsplit_once("  # ").expect("an origin");
        assert_eq!(setting, same, "deploy/roost.toml has another value");
        assert!(origin.ends_with("roost.toml"), "deploy/roost.toml lacks {setting}");
    }
}

#[test]
fn a_node_keeps_no_memory_that_it_does_not_use_for_long() {
    let folder = tempfile::tempdir().expect("a folder");
    let begun_with = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roost"));
        command.args(["dev", "--json", "--port", "0", "--data"]).arg(folder.path());
        command.env_remove("MIMALLOC_PURGE_DELAY").envs(variables.iter().copied());
        let mut node = command.stdout(Stdio::piped()).spawn().expect("the binary runs");
        let output = node.stdout.take().expect("its output is ours");
        BufReader::new(output).read_line(&mut String::new()).expect("it says that it is ready");
        let environment = fs::read(format!("/proc/{}/environ", node.id())).expect("it runs");
        node.kill().expect("it runs");
        node.wait().expect("it ends");
        said(&environment).split('\0').find(|one| one.starts_with("MIMALLOC")).map(str::to_owned)
    };
    assert_eq!(begun_with(&[]).as_deref(), Some("MIMALLOC_PURGE_DELAY=20"));
    let own = [("MIMALLOC_PURGE_DELAY", "500")];
    assert_eq!(
        begun_with(&own).as_deref(),
        Some("MIMALLOC_PURGE_DELAY=500"),
        "as the operator says"
    );
}
