//! `kill -9` of the node that leads the directory, again and again: how long until writes work, and until the
//! others know that it is dead.

use std::time::{Duration, Instant};

use serde_json::json;
use tests::{Cluster, Customer};

/// How often the leader is killed.
const KILLS: usize = 20;

pub(crate) async fn of_the_directory(cluster: &mut Cluster, id: &str) {
    let path = format!("/v1/agents/{id}");
    let (mut gaps, mut known) = (vec![], vec![]);
    for round in 0..KILLS {
        let glance = cluster.customer(round % 3).get("/v1/cluster").await.data(200);
        let leader = cluster.place(glance["leader"].as_str().expect("a leader"));
        let me = cluster.customer((leader + 1) % 3);
        me.get(&path).await.data(200);
        cluster.kill(leader);
        let began = Instant::now();
        let (gap, seen) = tokio::join!(
            until_written(&me, &path, round, began),
            until_known(&me, &cluster.nodes[leader].id, began)
        );
        gaps.push(gap);
        known.push(seen);
        cluster.restart(&[leader]);
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    for (what, mut times) in [("writes work again", gaps), ("its death is known", known)] {
        times.sort_unstable();
        println!(
            "failover of the directory, {KILLS} kills, until {what}: median {} ms, worst {} ms",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
}

async fn until_written(me: &Customer, path: &str, round: usize, began: Instant) -> u128 {
    loop {
        let write = me.request(reqwest::Method::PATCH, path);
        let write = write.json(&json!({ "metadata": { "round": round.to_string() } }));
        if write.send().await.is_ok_and(|answer| answer.status() == 200) {
            return began.elapsed().as_millis();
        }
    }
}

async fn until_known(me: &Customer, node: &str, began: Instant) -> u128 {
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let all = me.get("/v1/cluster/nodes?consistency=stale").await;
        let rows = all.body["data"]["items"].as_array().cloned().unwrap_or_default();
        if rows.iter().any(|row| row["id"] == node && row["alive"] == false) {
            return began.elapsed().as_millis();
        }
    }
}
