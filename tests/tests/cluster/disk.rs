//! Disks that lie and disks that are full, under real nodes.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tests::{Cluster, Customer, Node, eventually, skipped};

const NEEDLE: &str = "a-needle-in-the-tables";

/// Flips one bit wherever a file has these bytes; how often.
fn flip(file: &Path, needle: &[u8]) -> usize {
    let mut bytes = std::fs::read(file).expect("the file");
    let places: Vec<usize> = (0..bytes.len().saturating_sub(needle.len()))
        .filter(|place| bytes[*place..].starts_with(needle))
        .collect();
    places.iter().for_each(|place| bytes[place + 3] ^= 4);
    std::fs::write(file, bytes).expect("written");
    places.len()
}

async fn is_written(file: &Path, needle: &str) {
    eventually("the node has it on disk", async || {
        let bytes = std::fs::read(file).expect("the tables");
        let is_there = bytes.windows(needle.len()).any(|part| part == needle.as_bytes());
        if is_there { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
}

async fn make_cloud(me: &Customer, name: &str) -> Option<String> {
    made_by(me.request(reqwest::Method::POST, "/v1/clouds").json(&json!({ "name": name }))).await
}

/// The id that the answer tells; an answer that breaks off, as the node ends, tells none.
async fn made_by(request: reqwest::RequestBuilder) -> Option<String> {
    let answer = request.timeout(Duration::from_secs(5)).send().await.ok()?;
    let is_made = answer.status() == 201;
    let body: Value = answer.json().await.ok()?;
    is_made.then(|| body["data"]["id"].as_str().expect("an id").to_owned())
}

#[tokio::test]
async fn a_node_whose_disk_lies_serves_nothing_and_is_made_anew_from_its_peers() {
    let mut cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let cloud = make_cloud(&me, NEEDLE).await.expect("made");
    let old = cluster.nodes[2].id.clone();
    let tables = cluster.folder(2).join("state.redb");
    is_written(&tables, NEEDLE).await;
    // The file keeps the version of its tables before the last one, and goes back to it; the log tells the rest
    // again. Here both have what is damaged.
    for name in ["a-version-later", "two-versions-later"] {
        make_cloud(&me, name).await.expect("made");
        is_written(&tables, name).await;
    }
    cluster.terminate(2);
    assert!(flip(&tables, b"display_name") > 0);
    let refused = cluster.start_and_fail(2);
    assert!(refused.contains("roost rejoin"), "it says what to do: {refused}");
    let nodes = me.get("/v1/cluster/nodes").await.data(200);
    let first = nodes["items"][0]["peer_address"].as_str().expect("an address").to_owned();
    let anew = cluster.operate(2, &["rejoin", &first]);
    assert!(anew.status.success(), "{}", String::from_utf8_lossy(&anew.stderr));
    let folder = cluster.folder(2).to_owned();
    let place = cluster.adopt(folder);
    let anew = cluster.customer(place);
    assert_eq!(anew.get(&format!("/v1/clouds/{cloud}")).await.data(200)["name"], NEEDLE);
    let was = me.get(&format!("/v1/cluster/nodes/{old}")).await.data(200);
    assert_eq!(was["status"], "removed");
    eventually("one of three may be lost again", async || {
        let glance = me.get("/v1/cluster").await.data(200);
        if glance["failure_tolerance"] == 1 { Ok(()) } else { Err(glance.to_string()) }
    })
    .await;
}

/// A small disk of its own; it goes with its value.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn of(megabytes: u64) -> Option<Self> {
        let place = tempfile::tempdir().expect("a folder").keep();
        let size = format!("size={megabytes}m");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&place);
        let mounted = mount.stderr(Stdio::null()).status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(place))
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Leaves no more than this free.
    fn fill(&self, left_kib: u64) {
        let free = Command::new("df").args(["-k", "--output=avail"]).arg(&self.0).output();
        let free = String::from_utf8_lossy(&free.expect("df runs").stdout).into_owned();
        let free: u64 = free.lines().last().and_then(|line| line.trim().parse().ok()).expect("KiB");
        let bytes = vec![b'x'; usize::try_from((free - left_kib) * 1024).expect("it fits")];
        std::fs::write(self.filler(), bytes).expect("there is room");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[tokio::test]
async fn a_full_disk_loses_nothing_and_the_node_goes_on_when_there_is_room() {
    let Some(disk) = SmallDisk::of(160) else { return skipped("mount") };
    let mut node = Node::on(&disk.0);
    let me = node.customer();
    let mut made = vec![];
    for n in 0..20 {
        made.push(make_cloud(&me, &format!("before-{n}")).await.expect("made"));
    }
    disk.fill(256);
    let until = Instant::now() + Duration::from_secs(60);
    let mut refused = 0;
    for n in 0.. {
        // Long notes fill the log fast.
        let notes: serde_json::Map<String, Value> =
            (0..40).map(|note| (format!("note-{note}"), json!("x".repeat(480)))).collect();
        let body = json!({ "name": format!("while-full-{n}"), "metadata": notes });
        let request = me.request(reqwest::Method::POST, "/v1/clouds").json(&body);
        match made_by(request).await {
            Some(id) => made.push(id),
            None => refused += 1,
        }
        assert!(Instant::now() < until, "the disk never filled: {} made", made.len());
        if refused > 0 {
            break;
        }
    }
    eventually("the node ends", async || {
        if node.has_ended() { Ok(()) } else { Err("it still runs".to_owned()) }
    })
    .await;
    std::fs::remove_file(disk.filler()).expect("room");
    node.restart();
    let me = node.customer();
    for id in &made {
        me.get(&format!("/v1/clouds/{id}")).await.data(200);
    }
    make_cloud(&me, "after").await.expect("it writes again");
}
