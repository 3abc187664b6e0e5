//! Limits hold on all nodes together: at the edges of windows, while leaders move, and for strangers.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use serde_json::json;
use tests::{Cluster, Customer};
use tokio::{net::TcpListener, time::Instant};

/// How long all nodes are asked: until the first window has ended and what left it was asked for again.
const ASKED_FOR: Duration = Duration::from_secs(90);
const BETWEEN: Duration = Duration::from_millis(150);

/// Calls of one organization that were allowed, by the second in which a node answered.
#[derive(Default)]
struct Asked {
    allowed: BTreeMap<u64, u64>,
    /// Seconds in which anything was answered.
    answered: BTreeSet<u64>,
    /// Seconds in which somebody was refused.
    refused: BTreeSet<u64>,
    strange: Vec<u16>,
}

/// Asks all nodes in turn, and from time to time with many calls at once, until the time is up.
async fn keep_asking(callers: Vec<Customer>, burst: usize) -> Asked {
    let began = Instant::now();
    let mut asked = Asked::default();
    let mut round = 0;
    while began.elapsed() < ASKED_FOR {
        let at_once = if round % 20 == 0 { burst } else { 4 };
        let calls = (0..at_once).map(|call| {
            let caller = &callers[(round + call) % callers.len()];
            async move { caller.get("/v1/clouds").await }
        });
        for answer in join_all(calls).await {
            let at = seconds_of(answer.body["meta"]["timestamp"].as_str().expect("a time"));
            asked.answered.insert(at);
            match answer.status {
                200 => *asked.allowed.entry(at).or_default() += 1,
                429 => drop(asked.refused.insert(at)),
                other => asked.strange.push(other),
            }
        }
        round += 1;
        tokio::time::sleep(BETWEEN).await;
    }
    asked
}

/// Seconds of a time of the day, which is enough for a minute or two; a day's end is counted through.
fn seconds_of(text: &str) -> u64 {
    let time = text.split('T').nth(1).expect("a time");
    let part = |from: usize| time[from..from + 2].parse::<u64>().expect("a number");
    let seconds = part(0) * 3600 + part(3) * 60 + part(6);
    if part(0) < 12 { seconds + 86_400 } else { seconds }
}

impl Asked {
    fn allowed_in(&self, seconds: std::ops::Range<u64>) -> u64 {
        self.allowed.range(seconds).map(|(_, calls)| calls).sum()
    }

    /// The most of any window of so many seconds.
    fn most(&self, seconds: u64) -> u64 {
        let all = self.answered.iter().map(|from| self.allowed_in(*from..from + seconds));
        all.max().unwrap_or(0)
    }

    /// The least that was allowed in so many seconds before somebody was refused.
    fn least(&self, seconds: u64) -> u64 {
        let all = self.refused.iter().map(|at| self.allowed_in(at + 1 - seconds..at + 1));
        all.min().expect("somebody was refused")
    }
}

#[tokio::test]
async fn tiers_are_exact_on_one_node_at_every_edge_of_a_window() {
    tiers_are_exact(1, &[]).await;
}

#[tokio::test]
async fn tiers_are_exact_on_three_nodes_at_every_edge_of_a_window_while_leaders_move() {
    tiers_are_exact(3, &[0, 1]).await;
}

#[tokio::test]
async fn tiers_are_exact_on_five_nodes_at_every_edge_of_a_window_while_leaders_move() {
    tiers_are_exact(5, &[1, 2]).await;
}

/// Two tiers at once, in turn and in bursts, while these nodes give their leaders away, one after the other.
async fn tiers_are_exact(nodes: usize, drained: &[usize]) {
    let cluster = Cluster::at_rest(nodes);
    let tiers = [("starter", 60), ("pro", 300)];
    let mut asking = vec![];
    for (tier, limit) in tiers {
        let person = cluster.customer(0).organization(tier, tier).await;
        let callers: Vec<_> = (0..nodes).map(|node| cluster.caller(node, &person.key)).collect();
        // The login's own calls are no calls of the organization.
        asking.push((tier, limit, tokio::spawn(keep_asking(callers, 40))));
    }
    for &node in drained {
        tokio::time::sleep(ASKED_FOR / 4).await;
        let answer = cluster.operate(node, &["cluster", "drain"]);
        assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        tokio::time::sleep(ASKED_FOR / 8).await;
        assert!(cluster.operate(node, &["cluster", "activate"]).status.success());
    }
    for (tier, limit, asked) in asking {
        let asked = asked.await.expect("it asked");
        assert!(asked.strange.is_empty(), "{tier}: {:?}", asked.strange);
        // A call is counted a moment before its answer is made: 59 whole seconds are surely in a window.
        let most = asked.most(59);
        // However few are asked for on a slow machine: nobody is refused who has not had them all. What leaves
        // the window is lent again within seconds.
        let least = asked.least(64);
        assert!(most <= limit, "{tier}: {most} of {limit} within a minute");
        assert!(least * 100 >= limit * 98, "{tier}: refused after {least} of {limit}");
    }
}

#[tokio::test]
async fn strangers_are_counted_once_whichever_node_they_ask() {
    let cluster = Cluster::of(3);
    let mut statuses = vec![];
    for call in 0..45 {
        let stranger = cluster.caller(call % 3, "ic_live_wrong");
        statuses.push(stranger.get("/v1/clouds").await.status);
    }
    let count = |wanted: u16| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((count(401), count(429)), (30, 15), "{statuses:?}");
}

#[tokio::test]
async fn a_keys_own_limit_is_counted_once_whichever_node_is_asked() {
    let cluster = Cluster::of(3);
    let wanted = json!({ "name": "slow", "rate_limit": 20 });
    let made = cluster.customer(0).post("/v1/api-keys", &wanted).await.data(201);
    let key = made["key"].as_str().expect("a key");
    let callers: Vec<Customer> = (0..3).map(|node| cluster.caller(node, key)).collect();
    let calls = (0..60).map(|call| callers[call % 3].get("/v1/clouds"));
    let statuses: Vec<u16> = join_all(calls).await.iter().map(|answer| answer.status).collect();
    let count = |wanted: u16| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((count(200), count(429)), (20, 40), "{statuses:?}");
    cluster.customer(1).get("/v1/clouds").await.data(200);
}

/// Every call says at a gate that it is here, and waits there.
const WAITS: [(&str, &str); 2] = [
    ("agent.toml", "[scaling]\nconcurrency = 100\n"),
    (
        "agent.py",
        "import socket\ndef invoke(input, context):\n    \
         with socket.create_connection(('127.0.0.1', input)) as gate:\n        gate.recv(1)\n",
    ),
];

/// Makes calls on these nodes in turn; says how many came in before any was let go.
async fn in_flight(callers: &[Customer], agent: &str, nodes: &[usize], calls: usize) -> usize {
    let gate = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let input = json!(gate.local_addr().expect("an address").port());
    let calls = (0..calls).map(|call| callers[nodes[call % nodes.len()]].invoke(agent, &input));
    let mut calls: FuturesUnordered<_> = calls.collect();
    let mut waiting = vec![];
    // Whoever is refused has left `calls`.
    while waiting.len() < calls.len() {
        tokio::select! {
            came = gate.accept() => waiting.push(came.expect("a connection")),
            Some(answer) = calls.next() => assert_eq!(answer.status, 429, "{answer:?}"),
        }
    }
    let most = waiting.len();
    drop(waiting);
    while let Some(answer) = calls.next().await {
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    most
}

#[tokio::test]
async fn calls_in_flight_are_counted_on_all_nodes_together() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__TIERS__STARTER", "100000/1000000")]);
    let person = cluster.customer(0).organization("small", "starter").await;
    let agent = person.deploy("waits", &WAITS).await;
    let callers: Vec<_> = (0..3).map(|node| cluster.caller(node, &person.key)).collect();
    // Spread over all nodes; then what the others held a moment ago is one node's to use.
    assert_eq!(in_flight(&callers, &agent, &[0, 1, 2], 60).await, 20);
    for node in 0..3 {
        assert_eq!(in_flight(&callers, &agent, &[node], 24).await, 20, "node {node}");
    }
    assert_eq!(in_flight(&callers, &agent, &[0, 2], 40).await, 20);
}
