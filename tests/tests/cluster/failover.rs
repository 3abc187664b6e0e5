//! A node dies, pauses or comes back: nothing acknowledged is lost, and it is over in a moment.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tests::{Cluster, Customer, eventually, source::ECHO};

use crate::forward::{deploy, running};

const SLOW: &str = "
import time

def invoke(input, context):
    time.sleep(input['sleep'])
    return {'attempt': context['attempt']}
";

/// Makes clouds until told to stop; gives the names that were acknowledged with their ids.
async fn make_clouds(me: &Customer, prefix: &str, until: Instant) -> BTreeMap<String, String> {
    let mut made = BTreeMap::new();
    for n in 0.. {
        if Instant::now() >= until {
            break;
        }
        let name = format!("{prefix}-{n}");
        let request =
            me.request(reqwest::Method::POST, "/v1/clouds").json(&json!({ "name": name }));
        let Ok(answer) = request.send().await else { continue };
        if answer.status() != 201 {
            continue;
        }
        let Ok(body) = answer.json::<Value>().await else { continue };
        made.insert(name, body["data"]["id"].as_str().expect("made").to_owned());
    }
    made
}

async fn are_there(me: &Customer, clouds: &BTreeMap<String, String>) {
    for (name, id) in clouds {
        let found = me.get(&format!("/v1/clouds/{id}")).await.data(200);
        assert_eq!(found["name"], json!(name));
    }
}

#[tokio::test]
async fn what_was_acknowledged_survives_the_loss_of_any_node() {
    let mut cluster = Cluster::of(3);
    let mut all = BTreeMap::new();
    for victim in 0..3 {
        let survivors: Vec<Customer> =
            (0..3).filter(|node| *node != victim).map(|node| cluster.customer(node)).collect();
        let until = Instant::now() + Duration::from_secs(3);
        let names = [format!("a-{victim}"), format!("b-{victim}")];
        let writers = survivors.iter().zip(&names).map(|(me, name)| make_clouds(me, name, until));
        let writers = futures::future::join_all(writers);
        let kill = async {
            tokio::time::sleep(Duration::from_millis(700)).await;
            cluster.kill(victim);
        };
        let (made, ()) = futures::join!(writers, kill);
        for clouds in made {
            assert!(clouds.len() > 5, "writing goes on: {}", clouds.len());
            all.extend(clouds);
        }
        for me in &survivors {
            are_there(me, &all).await;
        }
        cluster.restart(&[victim]);
        are_there(&cluster.customer(victim), &all).await;
    }
}

#[tokio::test]
async fn a_cluster_that_went_down_whole_comes_back_by_itself() {
    let mut cluster = Cluster::of(3);
    let me = cluster.customer(1);
    let id = deploy(&me, "phoenix", ECHO, 2).await;
    let clouds = make_clouds(&me, "c", Instant::now() + Duration::from_secs(1)).await;
    let job = me.job(&id, json!({ "input": 1 })).await;
    assert_eq!(me.ended(&job).await["status"], "completed");
    (0..3).for_each(|node| cluster.kill(node));
    let said = cluster.start_in_vain(2, Duration::from_secs(8));
    assert!(said.contains("not ready yet; now: "), "one alone says what it waits for: {said}");
    cluster.restart(&[2, 0, 1]);
    let me = cluster.customer(2);
    are_there(&me, &clouds).await;
    assert_eq!(me.ended(&job).await["output"]["echo"], 1);
    running(&me, &id, 2).await;
    assert_eq!(me.invoke(&id, &json!("again")).await.data(200)["output"]["echo"], "again");
}

/// The job once it runs.
async fn runs(me: &Customer, job: &str) -> Value {
    eventually("it runs", async || {
        let row = me.get(&format!("/v1/jobs/{job}")).await.data(200);
        if row["status"] == "running" { Ok(row) } else { Err(row.to_string()) }
    })
    .await
}

#[tokio::test]
async fn instances_and_jobs_of_a_dead_node_go_on_elsewhere() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "slow", SLOW, 3).await;
    let asked = json!({ "input": { "sleep": 6 }, "options": { "retry": { "max_attempts": 2, "on": ["unavailable"] } } });
    let mut jobs = vec![];
    for n in 0..12 {
        jobs.push(cluster.customer(n % 3).job(&id, asked.clone()).await);
    }
    let mut on_victim = vec![];
    let mut elsewhere = vec![];
    let victim = 2;
    for job in jobs {
        let row = runs(&me, &job).await;
        match row["node_id"] == json!(cluster.nodes[victim].id) {
            true => on_victim.push(job),
            false => elsewhere.push(job),
        }
    }
    assert!(!on_victim.is_empty() && !elsewhere.is_empty(), "the jobs spread over nodes");
    cluster.kill(victim);
    for job in &elsewhere {
        let ended = me.ended(job).await;
        assert_eq!(
            (&ended["status"], &ended["attempt"]),
            (&json!("completed"), &json!(1)),
            "{ended:#}"
        );
    }
    for job in &on_victim {
        let ended = me.ended(job).await;
        assert_eq!(
            (&ended["status"], &ended["attempt"]),
            (&json!("completed"), &json!(2)),
            "{ended:#}"
        );
    }
    let nodes = running(&me, &id, 3).await;
    assert!(!nodes.contains(&cluster.nodes[victim].id), "the lost instance is replaced elsewhere");
}

#[tokio::test]
async fn a_job_asked_for_once_is_lost_with_its_node_and_says_so() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "slow", SLOW, 3).await;
    let mut jobs = vec![];
    for _ in 0..6 {
        jobs.push(me.job(&id, json!({ "input": { "sleep": 30 } })).await);
    }
    let mut rows = vec![];
    for job in &jobs {
        rows.push(runs(&me, job).await);
    }
    let mut lost = 0;
    cluster.kill(1);
    for (job, row) in jobs.iter().zip(rows) {
        if row["node_id"] != json!(cluster.nodes[1].id) {
            let row = me.get(&format!("/v1/jobs/{job}")).await.data(200);
            assert_eq!(row["status"], "running", "{row:#}");
            continue;
        }
        let ended = me.ended(job).await;
        let said = (&ended["status"], &ended["error"]["code"]);
        assert_eq!(said, (&json!("failed"), &json!("NODE_LOST")), "{ended:#}");
        lost += 1;
    }
    assert!(lost > 0, "some of the jobs ran on the node that died");
}

#[tokio::test]
async fn a_paused_leader_that_wakes_up_does_no_harm() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "held", ECHO, 1).await;
    let leader = me.get("/v1/cluster").await.data(200)["leader"].as_str().expect("one").to_owned();
    let leader = cluster.place(&leader);
    let others: Vec<Customer> =
        (0..3).filter(|node| *node != leader).map(|node| cluster.customer(node)).collect();
    cluster.pause(leader);
    let until = Instant::now() + Duration::from_secs(4);
    let made = make_clouds(&others[0], "while-paused", until).await;
    assert!(made.len() > 5, "the others go on: {}", made.len());
    others[0]
        .patch(&format!("/v1/agents/{id}"), &json!({ "metadata": { "who": "new" } }))
        .await
        .data(200);
    cluster.go_on(leader);
    let woken = cluster.customer(leader);
    are_there(&woken, &made).await;
    let agent = woken.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(agent["metadata"]["who"], "new", "no stale answer of the old leader");
    let more = make_clouds(&woken, "after", Instant::now() + Duration::from_secs(1)).await;
    are_there(&others[1], &more).await;
    assert_eq!(woken.invoke(&id, &json!(5)).await.data(200)["output"]["echo"], 5);
}
