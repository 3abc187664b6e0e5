//! What is too long for the log lies on two nodes, whoever comes and goes, and is what was stored.

use std::{collections::BTreeSet, fs, path::PathBuf};

use serde_json::json;
use tests::{Cluster, Customer, eventually};

const LONG: [(&str, &str); 1] =
    [("agent.py", "def invoke(input, context):\n    return input * 300000\n")];

/// The blobs of a node.
fn blobs(cluster: &Cluster, node: usize) -> BTreeSet<PathBuf> {
    let folders = fs::read_dir(cluster.folder(node).join("blobs")).expect("blobs");
    let folders = folders.flatten().filter(|entry| entry.file_name().len() == 2);
    let files = folders.flat_map(|entry| fs::read_dir(entry.path()).expect("a folder").flatten());
    files.filter(|file| file.file_name().len() == 64).map(|file| file.path()).collect()
}

/// A job whose output is a blob; its id, and the nodes that have the output.
async fn long_output(cluster: &Cluster, me: &Customer) -> (String, Vec<usize>) {
    let agent = me.deploy("long", &LONG).await;
    let before: Vec<_> = (0..3).map(|node| blobs(cluster, node)).collect();
    let id = me.job(&agent, json!({ "input": "x" })).await;
    let done = me.ended(&id).await;
    assert_eq!(done["status"], "completed", "{done}");
    let has = |node: &usize| blobs(cluster, *node) != before[*node];
    (id, (0..3).filter(has).collect())
}

async fn is_there(me: &Customer, job: &str) {
    let job = me.get(&format!("/v1/jobs/{job}")).await.data(200);
    assert!(job["output"].as_str() == Some(&"x".repeat(300_000)), "another output");
}

#[tokio::test]
async fn an_output_outlives_all_nodes_that_had_it() {
    let cluster = Cluster::of(3);
    let (job, holders) = long_output(&cluster, &cluster.customer(0)).await;
    assert_eq!(holders.len(), 2);
    let last = (0..3).find(|node| !holders.contains(node)).expect("the third");
    let me = cluster.customer(last);
    for leaver in holders {
        let left = cluster.operate(leaver, &["leave", "--within", "60s"]);
        assert!(left.status.success(), "{}", String::from_utf8_lossy(&left.stderr));
        cluster.ends(leaver).await;
    }
    eventually("the last one leads", async || {
        let answer = me.get("/readyz").await;
        if answer.status == 200 { Ok(()) } else { Err(answer.status.to_string()) }
    })
    .await;
    is_there(&me, &job).await;
}

#[tokio::test]
async fn a_flipped_bit_in_an_output_is_not_shown() {
    let cluster = Cluster::of(3);
    let (job, holders) = long_output(&cluster, &cluster.customer(0)).await;
    let me = cluster.customer(holders[0]);
    for path in blobs(&cluster, holders[0]) {
        let mut bytes = fs::read(&path).expect("a blob");
        bytes[100] ^= 1;
        fs::write(&path, bytes).expect("it is written");
    }
    is_there(&me, &job).await;
}
