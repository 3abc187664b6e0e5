//! The worst days: the majority is gone for good, or all of it is. What is left, or what was backed up,
//! becomes a cluster again, and a command that would make two of one refuses.

use std::{
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::{Value, json};
use tests::{Cluster, Customer, eventually, source::ECHO};

use crate::forward::{deploy, running};

const TOLD: &str = "
import os

def invoke(input, context):
    return {'secret': os.environ['TOLD']}
";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn refused(output: &Output, because: &str) {
    let told = said(output);
    assert!(!output.status.success(), "it must be refused: {told}");
    assert!(told.contains(because), "not because of {because:?}: {told}");
}

/// Retries through the time until instances are there.
async fn answers(me: &Customer, id: &str, input: &Value) -> Value {
    eventually("the agent answers", async || {
        let answer = me.invoke(id, input).await;
        if answer.status == 200 { Ok(answer.data(200)) } else { Err(format!("{answer:?}")) }
    })
    .await
}

async fn make_cloud(me: &Customer, name: &str) -> String {
    let request = me.request(reqwest::Method::POST, "/v1/clouds").json(&json!({ "name": name }));
    let made = me.send(request).await.data(201);
    made["id"].as_str().expect("made").to_owned()
}

#[tokio::test]
async fn a_node_that_is_left_alone_goes_on_once_the_others_are_given_up() {
    let mut cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "left", ECHO, 3).await;
    let mut clouds = vec![];
    for n in 0..20 {
        clouds.push(make_cloud(&cluster.customer(n % 3), &format!("cloud-{n}")).await);
    }
    let job = me.job(&id, json!({ "input": "kept" })).await;
    me.ended(&job).await;
    let others = [1, 2].map(|node| cluster.nodes[node].id.clone());
    refused(&cluster.operate(0, &["cluster", "recover"]), "another node is using");
    cluster.terminate(0);
    refused(&cluster.operate(0, &["cluster", "recover"]), "answers");
    cluster.kill(1);
    cluster.kill(2);
    let told = cluster.operate(0, &["cluster", "recover"]);
    refused(&told, "Nothing was changed");
    assert!(others.iter().all(|id| said(&told).contains(id)), "{}", said(&told));
    refused(&cluster.operate(0, &["cluster", "recover", "--give-up", &others[0]]), &others[1]);
    let stranger = cluster.nodes[0].id.clone();
    refused(
        &cluster.operate(0, &["cluster", "recover", "--give-up", &stranger]),
        "not another node",
    );
    let done = cluster.operate(0, &["cluster", "recover", "--give-up", &others.join(",")]);
    assert!(done.status.success(), "{}", said(&done));
    cluster.restart(&[0]);
    let me = cluster.customer(0);
    for cloud in &clouds {
        me.get(&format!("/v1/clouds/{cloud}")).await.data(200);
    }
    assert_eq!(me.ended(&job).await["output"]["echo"], "kept");
    assert_eq!(answers(&me, &id, &json!(1)).await["output"]["echo"], 1);
    let on = running(&me, &id, 3).await;
    assert!(on.iter().all(|node| *node == cluster.nodes[0].id), "all instances are here: {on:?}");
    let nodes = me.get("/v1/cluster").await.data(200);
    assert_eq!(nodes["nodes"], json!({ "active": 1, "removed": 2 }), "{nodes:#}");
    make_cloud(&me, "after").await;
    let grown = cluster.grow_at(0);
    let newest = cluster.customer(grown);
    for cloud in &clouds {
        newest.get(&format!("/v1/clouds/{cloud}")).await.data(200);
    }
    refused(&cluster.operate(1, &["cluster", "recover"]), "answers");
}

/// Two nodes of five that together have every shard, if there are such.
async fn pair_with_everything(cluster: &Cluster) -> Option<[usize; 2]> {
    let groups = cluster.customer(0).get("/v1/cluster/shards").await.data(200);
    let groups = groups["items"].as_array().expect("a list").clone();
    let has = |group: &Value, node: usize| {
        let voters = group["voters"].as_array().expect("a list");
        voters.contains(&json!(cluster.nodes[node].id))
    };
    let all = |pair: [usize; 2]| groups.iter().all(|group| pair.iter().any(|one| has(group, *one)));
    let one_lacks = |pair: [usize; 2]| groups.iter().any(|group| !has(group, pair[0]));
    let mut pairs = (0..5).flat_map(|a| (0..5).map(move |b| [a, b])).filter(|[a, b]| a != b);
    pairs.find(|pair| all(*pair) && one_lacks(*pair))
}

#[tokio::test]
async fn what_two_survivors_have_together_is_recovered_on_one() {
    let mut cluster = Cluster::with(5, &[("ROOST_CLUSTER__SHARDS", "4")]);
    eventually("shards are on three nodes each", async || {
        let groups = cluster.customer(0).get("/v1/cluster/shards").await.data(200);
        let items = groups["items"].as_array().expect("a list").clone();
        let three = |group: &Value| group["voters"].as_array().map(Vec::len) == Some(3);
        if items[1..].iter().all(three) { Ok(()) } else { Err(groups.to_string()) }
    })
    .await;
    let pair = pair_with_everything(&cluster).await.expect("four shards of five nodes have a pair");
    let [keeper, helper] = pair;
    let me = cluster.customer(keeper);
    let id = deploy(&me, "spread", ECHO, 1).await;
    let mut jobs = vec![];
    for n in 0..24 {
        jobs.push((n, cluster.customer(n % 5).job(&id, json!({ "input": n })).await));
    }
    for (_, job) in &jobs {
        me.ended(job).await;
    }
    (0..5).filter(|node| !pair.contains(node)).for_each(|node| cluster.kill(node));
    pair.iter().for_each(|node| cluster.terminate(*node));
    refused(&cluster.operate(keeper, &["cluster", "recover"]), "--from");
    let folder = cluster.folder(helper).display().to_string();
    let gone: Vec<String> =
        (0..5).filter(|node| *node != keeper).map(|node| cluster.nodes[node].id.clone()).collect();
    let command = ["cluster", "recover", "--from", &folder, "--give-up", &gone.join(",")];
    let done = cluster.operate(keeper, &command);
    assert!(done.status.success(), "{}", said(&done));
    cluster.restart(&[keeper]);
    let me = cluster.customer(keeper);
    for (n, job) in &jobs {
        assert_eq!(me.ended(job).await["output"]["echo"], json!(n));
    }
    assert_eq!(answers(&me, &id, &json!("again")).await["output"]["echo"], "again");
}

/// A job whose output is too long for the log.
async fn long_job(me: &Customer, id: &str) -> (String, String) {
    let long = "x".repeat(200_000);
    let job = me.job(id, json!({ "input": long })).await;
    me.ended(&job).await;
    (job, long)
}

fn copied_keys(from: &Path, to: &Path) -> PathBuf {
    let folder = to.join("kept-keys");
    std::fs::create_dir(&folder).expect("made");
    for name in ["pepper.key", "master.key", "signing.key"] {
        std::fs::copy(from.join("keys").join(name), folder.join(name)).expect("copied");
    }
    folder
}

#[tokio::test]
async fn a_backup_becomes_a_cluster_with_everything_in_it() {
    let mut cluster = Cluster::of(3);
    let me = cluster.customer(1);
    me.put("/v1/secrets/TOLD", &json!({ "value": "a secret thing" })).await.data(200);
    let mut wanted = me.wanted("told", &[("agent.py", TOLD)]).await;
    wanted["environment"] = json!({ "TOLD": "${secrets.TOLD}" });
    let told = me.deploy_as(&wanted).await;
    let echo = deploy(&me, "echo", ECHO, 2).await;
    let (job, long) = long_job(&me, &echo).await;
    let place = tempfile::tempdir().expect("a folder");
    let file = place.path().join("all.backup");
    let (shown, keys) = (file.display().to_string(), copied_keys(cluster.folder(0), place.path()));
    let taken = cluster.operate(1, &["cluster", "backup", &shown]);
    assert!(taken.status.success(), "{}", said(&taken));
    refused(&cluster.operate(1, &["cluster", "backup", &shown]), "exists");
    let after = make_cloud(&me, "after-the-backup").await;
    (0..3).for_each(|node| cluster.kill(node));

    let restore = |file: &Path, keys: &Path, folder: &str| {
        let data = place.path().join(folder);
        let arguments = ["cluster", "restore", &file.display().to_string(), "--keys"];
        let arguments: Vec<String> = arguments
            .iter()
            .map(|word| (*word).to_owned())
            .chain([keys.display().to_string(), "--data".to_owned(), data.display().to_string()])
            .collect();
        (tests::roost(&arguments), data)
    };
    let bytes = std::fs::read(&file).expect("the backup");
    assert!(!bytes.windows(14).any(|part| part == b"a secret thing"), "no secret in plain");
    let torn = place.path().join("torn.backup");
    std::fs::write(&torn, &bytes[..bytes.len() - 10]).expect("written");
    let (output, folder) = restore(&torn, &keys, "from-torn");
    refused(&output, "no whole backup");
    assert!(!folder.exists(), "nothing is left of a restore that failed");
    let others = place.path().join("other-keys");
    std::fs::create_dir(&others).expect("made");
    refused(&restore(&file, &others, "without-keys").0, "pepper.key");
    for name in ["pepper.key", "master.key", "signing.key"] {
        std::fs::write(others.join(name), "ab".repeat(32)).expect("written");
    }
    refused(&restore(&file, &others, "wrong-keys").0, "not the keys");
    let (output, folder) = restore(&file, &keys, "restored");
    assert!(output.status.success(), "{}", said(&output));
    refused(&restore(&file, &keys, "restored").0, "not empty");

    let first = cluster.adopt(folder);
    let me = cluster.customer(first);
    assert_eq!(answers(&me, &told, &json!({})).await["output"]["secret"], "a secret thing");
    assert_eq!(answers(&me, &echo, &json!(2)).await["output"]["echo"], 2);
    assert_eq!(me.ended(&job).await["output"]["echo"].as_str().map(str::len), Some(long.len()));
    assert_eq!(me.get(&format!("/v1/clouds/{after}")).await.status, 404, "it was made later");
    let nodes = me.get("/v1/cluster").await.data(200);
    assert_eq!(nodes["nodes"], json!({ "active": 1 }), "{nodes:#}");
    make_cloud(&me, "after-the-restore").await;
    let second = cluster.grow_at(first);
    assert_eq!(answers(&cluster.customer(second), &echo, &json!(3)).await["output"]["echo"], 3);
}

#[tokio::test]
async fn snapshots_are_listed_and_given_by_every_node() {
    let cluster = Cluster::of(2);
    let [one, two] = [0, 1].map(|node| cluster.customer(node));
    let begun = one.call("/v1/cluster/snapshots").await.data(201);
    assert_eq!(begun["status"], "creating");
    let path = format!("/v1/cluster/snapshots/{}", begun["id"].as_str().expect("an id"));
    let ready = eventually("it is ready", async || {
        let now = two.get(&path).await.data(200);
        if now["status"] == "ready" { Ok(now) } else { Err(now.to_string()) }
    })
    .await;
    let archive = two.request(reqwest::Method::GET, &format!("{path}/archive"));
    let archive = archive.send().await.expect("an answer");
    assert_eq!(archive.status(), 200);
    let archive = archive.bytes().await.expect("the file");
    assert_eq!(json!(archive.len()), ready["bytes"]);
    assert_eq!(json!(tests::sha256_hex(&archive)), ready["sha256"]);
    let listed = two.get("/v1/cluster/snapshots").await.data(200);
    assert_eq!(listed["items"], json!([ready]));
    let key = one.request(reqwest::Method::POST, "/v1/cluster/snapshots");
    let keyed = one.send(key.header("idempotency-key", "k")).await;
    assert_eq!((keyed.status, keyed.code()), (400, "VALIDATION_ERROR"));
    assert_eq!(cluster.tester(0).get("/v1/cluster/snapshots").await.status, 403, "no test key");
    assert_eq!(two.delete(&path).await.data(200)["deleted"], true);
    let gone = one.get(&path).await;
    assert_eq!((gone.status, gone.code()), (404, "SNAPSHOT_NOT_FOUND"));
    assert_eq!(one.get("/v1/cluster/snapshots/snap_1").await.code(), "SNAPSHOT_NOT_FOUND");
}
