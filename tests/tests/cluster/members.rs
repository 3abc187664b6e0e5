//! Nodes come and go: growing, draining, leaving, restarting one after the other under load.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tests::{Cluster, Customer, eventually, source::ECHO};
use tokio::task::JoinHandle;

use crate::forward::{deploy, running};

async fn nodes(me: &Customer) -> Vec<Value> {
    me.get("/v1/cluster/nodes").await.data(200)["items"].as_array().expect("a list").clone()
}

async fn replicas_settle(me: &Customer, voters: usize) {
    eventually("every group has its replicas", async || {
        let groups = me.get("/v1/cluster/shards").await.data(200);
        let groups = groups["items"].as_array().expect("a list").clone();
        let fits = |group: &Value| {
            group["leader"].is_string() && group["voters"].as_array().map(Vec::len) == Some(voters)
        };
        if groups.iter().all(fits) { Ok(()) } else { Err(json!(groups).to_string()) }
    })
    .await;
}

#[tokio::test]
async fn a_single_node_grows_into_a_cluster_and_keeps_everything() {
    let mut cluster = Cluster::of(2);
    let me = cluster.customer(0);
    let id = deploy(&me, "early", ECHO, 1).await;
    let glance = me.get("/v1/cluster").await.data(200);
    assert_eq!((&glance["failure_tolerance"], &glance["quorum"]), (&json!(0), &json!(2)));
    for _ in 0..3 {
        cluster.grow();
    }
    let newest = cluster.customer(4);
    assert_eq!(newest.get(&format!("/v1/agents/{id}")).await.data(200)["name"], "early");
    assert_eq!(newest.invoke(&id, &json!(1)).await.data(200)["output"]["echo"], 1);
    eventually("five nodes, five voters of the directory", async || {
        let glance = newest.get("/v1/cluster").await.data(200);
        // Each shard is on three of them.
        let fits = glance["failure_tolerance"] == 1 && glance["nodes"]["active"] == 5;
        if fits { Ok(()) } else { Err(glance.to_string()) }
    })
    .await;
    eventually("shards are on three nodes each", async || {
        let groups = newest.get("/v1/cluster/shards").await.data(200);
        let groups = groups["items"].as_array().expect("a list").clone();
        let mut held = std::collections::BTreeSet::new();
        for group in &groups[1..] {
            let voters = group["voters"].as_array().expect("a list");
            held.extend(voters.iter().map(ToString::to_string));
            if voters.len() != 3 || !group["leader"].is_string() {
                return Err(group.to_string());
            }
        }
        if held.len() == 5 { Ok(()) } else { Err(format!("only {} nodes have shards", held.len())) }
    })
    .await;
    // Jobs whose shard is not on the node that is asked.
    let mut jobs = vec![];
    for n in 0..15 {
        jobs.push((n, cluster.customer(n % 5).job(&id, json!({ "input": n })).await));
    }
    for (n, job) in &jobs {
        for node in 0..5 {
            let ended = cluster.customer(node).ended(job).await;
            assert_eq!(ended["output"]["echo"], json!(n), "over node {node}: {ended:#}");
        }
    }
    for node in 0..5 {
        let listed = cluster.customer(node).get("/v1/jobs?limit=100").await.data(200);
        assert_eq!(listed["items"].as_array().map(Vec::len), Some(jobs.len()));
    }
    // Two of five may be lost, one after the other.
    let me = cluster.customer(4);
    me.put("/v1/cluster/config", &json!({ "dead_after_s": 2 })).await.data(200);
    cluster.kill(0);
    eventually("its replicas have moved", async || {
        let glance = me.get("/v1/cluster").await.data(200);
        let fits = glance["failure_tolerance"] == 1 && glance["nodes"]["dead"] == 1;
        if fits { Ok(()) } else { Err(glance.to_string()) }
    })
    .await;
    cluster.kill(3);
    eventually("writing goes on", async || {
        let request = me.request(reqwest::Method::POST, "/v1/clouds");
        let request = request.header("idempotency-key", "after two losses");
        let made = me.send(request.json(&json!({ "name": "after-two-losses" }))).await;
        if made.status == 201 { Ok(()) } else { Err(format!("{made:?}")) }
    })
    .await;
}

/// Changes of clouds, many at once: `(how many, characters of each note, notes of each)`.
async fn change_clouds(
    me: &Customer,
    clouds: &[String],
    (count, chars, notes): (usize, usize, usize),
) {
    let next = AtomicUsize::new(0);
    let one = async || {
        loop {
            let number = next.fetch_add(1, Relaxed);
            if number >= count {
                return;
            }
            let text = format!("{number:0>chars$}");
            let metadata: serde_json::Map<String, Value> =
                (0..notes).map(|note| (format!("note-{note}"), json!(text))).collect();
            let path = &clouds[number % clouds.len()];
            me.patch(path, &json!({ "metadata": metadata })).await.data(200);
        }
    };
    futures::future::join_all((0..32).map(|_| one())).await;
}

/// The clouds as a node has them.
async fn clouds_at(me: &Customer) -> Value {
    me.get("/v1/clouds?limit=100&consistency=stale").await.data(200)["items"].clone()
}

/// The log is cut behind a snapshot, so whoever joins or comes back late is sent that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_come_late_are_sent_a_snapshot_while_writing_goes_on() {
    let mut cluster = Cluster::of(1);
    let me = cluster.customer(0);
    let at_first = clouds_at(&me).await.as_array().map_or(0, Vec::len);
    let mut clouds = vec![];
    for number in 0..20 {
        let made = me.post("/v1/clouds", &json!({ "name": format!("cloud-{number}") })).await;
        clouds.push(format!("/v1/clouds/{}", made.data(201)["id"].as_str().expect("an id")));
    }
    // More bytes than a snapshot is taken after, then more entries than are kept behind one.
    change_clouds(&me, &clouds, (900, 500, 40)).await;
    change_clouds(&me, &clouds, (5500, 8, 1)).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut late = vec![];
    for _ in 0..2 {
        let (writer, paths) = (me.clone(), clouds.clone());
        let writing =
            tokio::spawn(async move { change_clouds(&writer, &paths, (300, 16, 2)).await });
        late.push(cluster.grow_at(0));
        writing.await.expect("every change was made");
    }
    replicas_settle(&me, 3).await;
    let wanted = clouds_at(&me).await;
    assert_eq!(wanted.as_array().map(Vec::len), Some(at_first + 20));
    for place in late {
        let newcomer = cluster.customer(place);
        eventually("the newcomer has everything", async || {
            let has = clouds_at(&newcomer).await;
            if has == wanted {
                Ok(())
            } else {
                Err(format!("{} clouds", has.as_array().map_or(0, Vec::len)))
            }
        })
        .await;
    }
    // One that was away for longer than the log reaches back.
    cluster.kill(2);
    change_clouds(&me, &clouds, (900, 500, 40)).await;
    change_clouds(&me, &clouds, (5500, 8, 1)).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    cluster.restart(&[2]);
    let (wanted, back) = (clouds_at(&me).await, cluster.customer(2));
    eventually("it has caught up", async || {
        if clouds_at(&back).await == wanted { Ok(()) } else { Err("it lacks something".to_owned()) }
    })
    .await;
}

#[tokio::test]
async fn a_node_drains_leaves_and_is_not_missed() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "moved", ECHO, 3).await;
    let leaver = cluster.nodes[2].id.clone();
    let drained = me.call(&format!("/v1/cluster/nodes/{leaver}/drain")).await.data(200);
    assert_eq!(drained["status"], "draining");
    let drained = cluster.customer(2);
    eventually("it says that it is not ready", async || {
        let answer = drained.get("/readyz").await;
        if answer.status == 503 { Ok(()) } else { Err(answer.status.to_string()) }
    })
    .await;
    eventually("nothing is on it", async || {
        let all = nodes(&me).await;
        let row = all.iter().find(|row| row["id"] == json!(leaver)).expect("it is listed");
        if row["drained"] == true { Ok(()) } else { Err(row.to_string()) }
    })
    .await;
    let on = running(&me, &id, 3).await;
    assert!(!on.contains(&leaver));
    me.call(&format!("/v1/cluster/nodes/{leaver}/activate")).await.data(200);
    let early = me.call(&format!("/v1/cluster/nodes/{leaver}/remove")).await;
    assert_eq!((early.status, early.code()), (409, "INVALID_STATE"), "an active node stays");
    let left = cluster.operate(2, &["leave", "--within", "60s"]);
    assert!(left.status.success(), "{}", String::from_utf8_lossy(&left.stderr));
    eventually("two are left", async || {
        let glance = me.get("/v1/cluster").await.data(200);
        let fits = glance["nodes"] == json!({ "active": 2, "removed": 1 });
        if fits { Ok(()) } else { Err(glance.to_string()) }
    })
    .await;
    replicas_settle(&me, 2).await;
    assert_eq!(me.invoke(&id, &json!(1)).await.data(200)["output"]["echo"], 1);
    let table = cluster.operate(0, &["cluster", "nodes"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("removed"));
}

#[tokio::test]
async fn what_finds_no_room_elsewhere_goes_when_its_node_must_be_empty() {
    let cluster = Cluster::with(3, &[("ROOST_RUNTIME__CPU_OVERCOMMIT", "1")]);
    let me = cluster.customer(0);
    // One on each node, and no room for a second one anywhere.
    let cores = std::thread::available_parallelism().expect("it is known").get();
    let mut wanted = me.wanted("wide", &[("agent.py", ECHO)]).await;
    wanted["scaling"] = json!({ "min_instances": 3, "max_instances": 3 });
    wanted["resources"] = json!({ "cpu": cores });
    let id = me.deploy_as(&wanted).await;
    running(&me, &id, 3).await;
    let path = format!("/v1/cluster/nodes/{}", cluster.nodes[2].id);
    let drain = format!("{path}/drain");
    let both = json!({ "force": true, "deadline_s": 1 });
    me.post(&drain, &both).await.refused(400, "VALIDATION_ERROR");
    let waits = me.post(&drain, &json!({ "deadline_s": 600 })).await.data(200);
    assert_eq!(waits["status"], "draining");
    let by = waits["drain_deadline"].as_str().expect("a time").to_owned();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let stays = me.get(&path).await.data(200);
    assert_eq!((&stays["instances"], &stays["drain_deadline"]), (&json!(1), &json!(by)));
    // Another deadline, and nothing waits for room any more.
    let sooner = me.post(&drain, &json!({ "deadline_s": 1 })).await.data(200);
    assert!(sooner["drain_deadline"].as_str() < Some(&by), "{sooner}");
    assert_eq!(sooner["since"], waits["since"], "it has been draining all the time");
    eventually("nothing is on it", async || {
        let row = me.get(&path).await.data(200);
        if row["drained"] == true { Ok(()) } else { Err(row.to_string()) }
    })
    .await;
    assert_eq!(me.invoke(&id, &json!(1)).await.data(200)["output"]["echo"], 1);
    // Given back, it takes the third again; sent away by force, it goes at once.
    let back = me.call(&format!("{path}/activate")).await.data(200);
    assert_eq!((&back["status"], &back["drain_deadline"]), (&json!("active"), &json!(null)));
    running(&me, &id, 3).await;
    let node = cluster.nodes[2].id.clone();
    let forced = cluster.operate(0, &["cluster", "drain", &node, "--force"]);
    assert!(forced.status.success(), "{}", String::from_utf8_lossy(&forced.stderr));
    running(&me, &id, 2).await;
}

#[tokio::test]
async fn a_node_that_was_taken_out_while_it_was_dead_is_told_so_and_stays_out() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let soon = json!({ "dead_after_s": 1, "min_quorum": 1 });
    me.put("/v1/cluster/config", &soon).await.data(200);
    cluster.kill(2);
    let path = format!("/v1/cluster/nodes/{}", cluster.nodes[2].id);
    eventually("it is judged and taken out", async || {
        let answer = me.call(&format!("{path}/remove")).await;
        if answer.status == 200 { Ok(()) } else { Err(answer.body.to_string()) }
    })
    .await;
    // Its own copy of the directory says that it belongs; it asks the others.
    replicas_settle(&me, 2).await;
    let said = cluster.start_and_fail(2);
    assert!(said.contains("this node was taken out of the cluster and ends"), "{said}");
    assert!(said.contains("roost join"), "it says what to do: {said}");
    me.post("/v1/clouds", &json!({ "name": "goes-on" })).await.data(201);
}

#[tokio::test]
async fn of_two_nodes_one_leaves_and_the_other_goes_on() {
    let cluster = Cluster::of(2);
    let left = cluster.operate(1, &["leave", "--within", "60s"]);
    assert!(left.status.success(), "{}", String::from_utf8_lossy(&left.stderr));
    cluster.ends(1).await;
    let me = cluster.customer(0);
    me.post("/v1/clouds", &json!({ "name": "alone" })).await.data(201);
    replicas_settle(&me, 1).await;
}

#[tokio::test]
async fn who_is_needed_for_a_majority_stays_until_it_is_not() {
    let mut cluster = Cluster::of(3);
    cluster.kill(2);
    // Until nobody takes it for one that answers.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let left = cluster.operate(1, &["leave", "--within", "60s"]);
    assert!(left.status.success(), "{}", String::from_utf8_lossy(&left.stderr));
    let me = cluster.customer(0);
    // It would have ended long ago, and two of three would be away.
    for number in 0..20 {
        me.post("/v1/clouds", &json!({ "name": format!("cloud-{number}") })).await.data(201);
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    cluster.restart(&[2]);
    cluster.ends(1).await;
    replicas_settle(&me, 2).await;
    me.post("/v1/clouds", &json!({ "name": "with-two" })).await.data(201);
}

#[tokio::test]
async fn a_node_without_a_majority_says_that_it_is_not_ready() {
    let mut cluster = Cluster::of(3);
    let alone = cluster.customer(0);
    assert_eq!(alone.get("/readyz").await.status, 200);
    cluster.kill(1);
    cluster.kill(2);
    eventually("it says so", async || {
        let answer = alone.get("/readyz").await;
        if answer.status == 503 { Ok(()) } else { Err(answer.status.to_string()) }
    })
    .await;
    cluster.restart(&[1]);
    eventually("it is ready again", async || {
        let answer = alone.get("/readyz").await;
        if answer.status == 200 { Ok(()) } else { Err(answer.status.to_string()) }
    })
    .await;
}

#[tokio::test]
async fn a_rolling_restart_under_load_shows_nothing_that_one_retry_does_not_cure() {
    let mut cluster = Cluster::alone(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "steady", ECHO, 3).await;
    for victim in [0, 1, 2, 0, 1, 2] {
        let (stop, calls, retries) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(0)),
        );
        let load = (0..3).filter(|node| *node != victim).map(|node| {
            let (me, id) = (cluster.customer(node), id.clone());
            let (stop, calls, retries) =
                (Arc::clone(&stop), Arc::clone(&calls), Arc::clone(&retries));
            tokio::spawn(async move {
                while !stop.load(Relaxed) {
                    let mut answer = me.invoke(&id, &json!(1)).await;
                    if answer.status != 200 {
                        retries.fetch_add(1, Relaxed);
                        answer = me.invoke(&id, &json!(1)).await;
                    }
                    assert_eq!(answer.status, 200, "{answer:?}");
                    let note = json!({ "metadata": { "n": calls.load(Relaxed).to_string() } });
                    let mut answer = me.patch(&format!("/v1/agents/{id}"), &note).await;
                    if answer.status != 200 {
                        retries.fetch_add(1, Relaxed);
                        answer = me.patch(&format!("/v1/agents/{id}"), &note).await;
                    }
                    assert_eq!(answer.status, 200, "{answer:?}");
                    calls.fetch_add(2, Relaxed);
                }
            })
        });
        let load: Vec<_> = load.collect();
        tokio::time::sleep(Duration::from_millis(300)).await;
        cluster.terminate(victim);
        cluster.restart(&[victim]);
        tokio::time::sleep(Duration::from_millis(500)).await;
        eventually("calls go on", async || {
            let is_over = load.iter().any(JoinHandle::is_finished);
            let done = calls.load(Relaxed);
            if is_over || done > 10 { Ok(()) } else { Err(format!("{done} calls")) }
        })
        .await;
        stop.store(true, Relaxed);
        for task in load {
            task.await.expect("no call failed twice");
        }
        running(&cluster.customer(victim), &id, 3).await;
    }
}

#[tokio::test]
async fn the_cluster_is_looked_after_with_full_access_and_a_live_key() {
    let cluster = Cluster::of(2);
    let me = cluster.customer(0);
    let refused = cluster.tester(0).get("/v1/cluster").await;
    assert_eq!((refused.status, refused.code()), (403, "TEST_MODE_ONLY"));
    let unknown = "node_01j00000000000000000000000";
    for path in ["", "/drain", "/activate", "/remove"] {
        let path = format!("/v1/cluster/nodes/{unknown}{path}");
        let answer =
            if path.ends_with(unknown) { me.get(&path).await } else { me.call(&path).await };
        assert_eq!((answer.status, answer.code()), (404, "NODE_NOT_FOUND"), "{path}");
    }
    let token = me.call("/v1/cluster/join-tokens").await.data(200);
    assert!(token["token"].as_str().is_some_and(|text| text.starts_with("roost-join-1.")));
    let key = |node: usize| {
        std::fs::read_to_string(cluster.folder(node).join("keys/gossip.key")).expect("a key")
    };
    let before = key(0);
    let turned = cluster.operate(1, &["cluster", "rotate-gossip-key"]);
    assert!(turned.status.success(), "{}", String::from_utf8_lossy(&turned.stderr));
    for path in ["/healthz", "/readyz"] {
        assert_eq!(me.get(path).await.status, 200, "{path}");
    }
    eventually("both nodes have the new key", async || {
        let both = key(0) == key(1) && key(0) != before;
        if both { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let health = me.get("/v1/cluster/health").await.data(200);
    assert_eq!(
        (&health["healthy"], health["servers"].as_array().map(Vec::len)),
        (&json!(true), Some(2))
    );
}
