//! What it costs to know who calls: with 100,000 keys in the directory, and while many people log in.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use reqwest::Method;
use serde_json::json;
use tests::{
    Customer, Node,
    load::{Measured, load, resident_mib},
};

use crate::{REST, deployed};

const KEYS: usize = ORGANIZATIONS * KEYS_EACH;
const ORGANIZATIONS: usize = 10;
/// An organization has at most so many.
const KEYS_EACH: usize = 10_000;
const CLIENTS: usize = 64;
/// Calls of each kind, one after the other.
const CALLS: usize = 10_000;
const LOGINS: usize = 50;
/// Times that calls are measured alone and beside logins, in turn: a machine has better and worse seconds.
const TURNS: usize = 6;
/// Until those who were still waiting to log in are forgotten.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(2);

/// Makes the organizations.
async fn organize(me: &Customer) {
    for number in 0..ORGANIZATIONS {
        me.organization(&format!("org{number}"), "enterprise").await;
    }
}

/// Somebody with all rights in each organization, by a token of this node as it runs.
async fn owners(me: &Customer) -> Vec<Customer> {
    let one = |number: usize| async move {
        let login =
            json!({ "email": format!("org{number}@example.com"), "password": "a long password" });
        let tokens = me.anonymous("/v1/auth/login", &login).await.data(200);
        me.with_key(tokens["access_token"].as_str().expect("a token"))
    };
    futures::future::join_all((0..ORGANIZATIONS).map(one)).await
}

/// As many calls as an organization may have keys.
async fn full(call: impl AsyncFn(usize)) {
    let next = AtomicUsize::new(0);
    let one = async || {
        loop {
            match next.fetch_add(1, Relaxed) {
                number if number < KEYS_EACH => call(number).await,
                _ => return,
            }
        }
    };
    futures::future::join_all((0..CLIENTS).map(|_| one())).await;
}

async fn fill(owners: &[Customer]) {
    for owner in owners {
        full(async |number| {
            let body = json!({ "name": format!("key {number}"), "scopes": ["agents:read"] });
            owner.post("/v1/api-keys", &body).await.data(201);
        })
        .await;
    }
}

/// As much traffic in the same organizations as makes the keys, with no new key but one: what a node keeps of
/// traffic is not the keys'.
async fn change(owners: &[Customer]) {
    for owner in owners {
        let body = json!({ "name": "changed", "scopes": ["agents:read"] });
        let key = owner.post("/v1/api-keys", &body).await.data(201);
        let path = format!("/v1/api-keys/{}", key["id"].as_str().expect("an id"));
        full(async |_| {
            owner.patch(&path, &json!({ "name": "changed" })).await.data(200);
        })
        .await;
        owner.delete(&path).await.data(200);
    }
}

/// Calls of three kinds in turn: nobody's, one with a key, one that needs a scope and counts.
async fn in_turn(me: &Customer) -> [Measured; 3] {
    let bare = || me.client.get(format!("{}/healthz", me.base_url));
    let mut times: [Vec<u128>; 3] = Default::default();
    for turn in 0..CALLS * 3 {
        let request = match turn % 3 {
            0 => bare(),
            1 => me.request(Method::GET, "/healthz"),
            _ => me.request(Method::GET, "/v1/event-types"),
        };
        let began = Instant::now();
        let answer = me.send(request).await;
        times[turn % 3].push(began.elapsed().as_micros());
        assert_eq!(answer.status, 200);
    }
    times.map(|times| Measured::of(times, Duration::from_secs(1)))
}

/// What a node holds that was just started again.
async fn again(node: &mut Node) -> u64 {
    node.terminate();
    node.restart();
    tokio::time::sleep(REST).await;
    resident_mib(node.pid())
}

pub(crate) async fn many() {
    let mut node = Node::with(&[
        ("ROOST_RATE_LIMIT__TIERS__ENTERPRISE", "100000000/1000000000"),
        ("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000000"),
    ]);
    let me = node.customer();
    organize(&me).await;
    change(&owners(&me).await).await;
    tokio::time::sleep(REST).await;
    let busy = resident_mib(node.pid());
    let rested = again(&mut node).await;
    let me = node.customer();
    let owners = owners(&me).await;
    change(&owners).await;
    let began = Instant::now();
    fill(&owners).await;
    println!("{KEYS} keys were made in {} s", began.elapsed().as_secs());
    tokio::time::sleep(REST).await;
    println!(
        "  {} MiB more than after as many changes",
        resident_mib(node.pid()).saturating_sub(busy)
    );
    let restarted = again(&mut node).await;
    println!(
        "  {} MiB more than without them, each after a restart",
        restarted.saturating_sub(rested)
    );
    let me = node.customer();
    let [nobodys, known, scoped] = in_turn(&me).await.map(|one| one.quantile(50));
    println!(
        "a call without a key p50 {nobodys} us; with one {} us more; with scope and limit, and a body, {} us more",
        known.saturating_sub(nobodys),
        scoped.saturating_sub(nobodys)
    );
    let unlimited = Node::with(&[("ROOST_RATE_LIMIT__ENABLED", "false")]);
    let [limited, unlimited] = beside(&me, &unlimited.customer()).await.map(|one| one.quantile(50));
    println!("the same call with limits p50 {limited} us, without {unlimited} us");
}

/// One call at two nodes in turn.
async fn beside(one: &Customer, other: &Customer) -> [Measured; 2] {
    let mut times: [Vec<u128>; 2] = Default::default();
    for turn in 0..CALLS * 2 {
        let began = Instant::now();
        let answer = [one, other][turn % 2].get("/v1/event-types").await;
        times[turn % 2].push(began.elapsed().as_micros());
        assert_eq!(answer.status, 200);
    }
    times.map(|times| Measured::of(times, Duration::from_secs(1)))
}

/// Calls beside people who log in.
pub(crate) async fn logins() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000000")]);
    let me = node.customer();
    let agent = deployed(&me).await;
    let login = json!({ "email": node.email, "password": node.password });
    let call = |_| async {
        me.invoke(&agent, &json!(1)).await.data(200);
    };
    let done = AtomicUsize::new(0);
    let people = async || {
        loop {
            let all = (0..LOGINS).map(|_| me.anonymous("/v1/auth/login", &login));
            for answer in futures::future::join_all(all).await {
                answer.data(200);
                done.fetch_add(1, Relaxed);
            }
        }
    };
    let (mut quiet, mut busy) = (vec![], vec![]);
    for _ in 0..TURNS {
        quiet.push(load(4, call).await);
        busy.push(tokio::select! {
            busy = load(4, call) => busy,
            () = people() => unreachable!("people log in for ever"),
        });
        tokio::time::sleep(FORGOTTEN_WITHIN).await;
    }
    let (quiet, busy) = (Measured::together(quiet), Measured::together(busy));
    println!("calls alone: {}", quiet.shown());
    println!("  beside {LOGINS} logins at once, {} in all: {}", done.into_inner(), busy.shown());
    println!("  p99 {:.2} x", ratio(busy.quantile(99), quiet.quantile(99)));
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn ratio(one: u128, other: u128) -> f64 {
    one as f64 / other.max(1) as f64
}
