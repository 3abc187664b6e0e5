//! Limits, codes and sessions hold on all nodes together, and when a node dies.

use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use tests::{Cluster, Customer, eventually, oauth::App};

const ECHO: [(&str, &str); 1] = [("agent.py", "def invoke(input, context):\n    return input\n")];

/// An organization of its own; gives somebody with all of its rights on each node.
async fn organization(cluster: &Cluster, tier: &str) -> Vec<Customer> {
    let person = cluster.customer(0).organization("o", tier).await;
    let made = person.post("/v1/api-keys", &json!({ "name": "k" })).await.data(201);
    let key = made["key"].as_str().expect("a key").to_owned();
    (0..cluster.nodes.len()).map(|node| cluster.caller(node, &key)).collect()
}

#[tokio::test]
async fn three_nodes_allow_no_more_than_the_tier_and_all_of_it() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__TIERS__PRO", "200/100000")]);
    let callers = organization(&cluster, "pro").await;
    // One call was the key's own making.
    let mut allowed = 1;
    for round in 0..5 {
        let calls = (0..60).map(|call| {
            let caller = callers[(round + call) % callers.len()].clone();
            async move { caller.get("/v1/clouds").await.status }
        });
        let statuses = join_all(calls).await;
        assert!(statuses.iter().all(|status| matches!(status, 200 | 429)), "{statuses:?}");
        allowed += statuses.iter().filter(|status| **status == 200).count();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert!((196..=200).contains(&allowed), "{allowed} of 200 calls were allowed");
}

/// A person who was made over one node is known to the others with the first call, though their copies of the
/// directory come a moment later.
#[tokio::test]
async fn a_new_persons_token_is_good_on_every_node_at_once() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "10000")]);
    for round in 0..10 {
        let maker = cluster.customer(round % 3);
        let person = maker.organization(&format!("o{round}"), "pro").await;
        let others = (0..3).map(|node| cluster.caller(node, &person.key));
        for (node, caller) in others.enumerate() {
            let answer = caller.get("/v1/auth/me").await;
            assert_eq!(answer.status, 200, "round {round}, node {node}: {:#}", answer.body);
        }
    }
}

/// A code is worth tokens once, however many ask at once and wherever.
#[tokio::test]
async fn a_code_is_redeemed_once_by_a_hundred_who_try_on_three_nodes() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "10000")]);
    let callers = organization(&cluster, "enterprise").await;
    for is_public in [false, true] {
        let customer = callers[0].clone();
        let app = App::new(customer, "o@example.com", "a long password", is_public).await;
        let body = app.redeeming(&app.code().await);
        let answers = join_all((0..100).map(|call| {
            let (caller, body) = (callers[call % 3].clone(), body.clone());
            async move { caller.anonymous("/v1/oauth/token", &body).await }
        }));
        let answers = answers.await;
        let (good, bad): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|answer| answer.status == 200);
        assert_eq!(good.len(), 1, "redeemed {} times", good.len());
        assert!(bad.iter().all(|answer| answer.status == 400), "{bad:#?}");
        // Somebody else had the code, too: what came of it is good for nothing (RFC 6749, 4.1.2).
        let token = good[0].body["access_token"].as_str().expect("a token").to_owned();
        let refresh = good[0].body["refresh_token"].as_str().unwrap_or_default().to_owned();
        for (node, caller) in callers.iter().enumerate() {
            let renewing = serde_json::json!({
                "grant_type": "refresh_token", "client_id": app.id, "client_secret": app.secret,
                "refresh_token": refresh,
            });
            let answer = caller.anonymous("/v1/oauth/token", &renewing).await;
            assert_eq!(answer.status, 400, "over node {node}: {:#}", answer.body);
            eventually("the token is refused", async || {
                match cluster.caller(node, &token).get("/v1/agents").await.status {
                    401 => Ok(()),
                    status => Err(status.to_string()),
                }
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_minutes_limit_survives_the_death_of_any_node() {
    a_limit_survives("120/100000", "minute").await;
}

#[tokio::test]
async fn a_days_limit_survives_the_death_of_any_node() {
    a_limit_survives("100000/120", "day").await;
}

async fn a_limit_survives(tier: &str, window: &str) {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__TIERS__PRO", tier)]);
    let callers = organization(&cluster, "pro").await;
    let (mut allowed, mut refused) = (1, None);
    for call in 0..60 {
        allowed += usize::from(callers[call % 3].get("/v1/clouds").await.status == 200);
    }
    cluster.kill(2);
    for call in 0..120 {
        let answer = callers[call % 2].get("/v1/clouds").await;
        assert!(matches!(answer.status, 200 | 429 | 503), "{:#}", answer.body);
        allowed += usize::from(answer.status == 200);
        refused = if answer.status == 429 { Some(answer) } else { refused };
    }
    assert!((100..=120).contains(&allowed), "{allowed} of 120 calls were allowed");
    let refused = refused.expect("the limit was reached").refused(429, "RATE_LIMITED");
    assert_eq!(refused["details"]["window"], window);
}

#[tokio::test]
async fn a_revoked_key_is_refused_everywhere_within_a_second() {
    let cluster = Cluster::of(3);
    let operator = cluster.customer(0);
    let made = operator.post("/v1/api-keys", &json!({ "name": "k" })).await.data(201);
    let key = made["key"].as_str().expect("a key");
    for node in 0..3 {
        eventually("the key is known", async || {
            match cluster.caller(node, key).get("/v1/clouds").await.status {
                200 => Ok(()),
                status => Err(status.to_string()),
            }
        })
        .await;
    }
    let path = format!("/v1/api-keys/{}", made["id"].as_str().expect("an id"));
    operator.delete(&path).await.data(200);
    operator.get("/v1/clouds").await.data(200);
    cluster.caller(0, key).get("/v1/clouds").await.refused(401, "INVALID_API_KEY");
    tokio::time::sleep(Duration::from_secs(1)).await;
    for node in 1..3 {
        cluster.caller(node, key).get("/v1/clouds").await.refused(401, "INVALID_API_KEY");
    }
}

#[tokio::test]
async fn a_node_that_slept_takes_no_key_that_was_revoked_meanwhile() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    for sleeper in 0..3 {
        let awake = cluster.customer((sleeper + 1) % 3);
        let made = awake.post("/v1/api-keys", &json!({ "name": "k" })).await.data(201);
        let late = cluster.caller(sleeper, made["key"].as_str().expect("a key"));
        // Good at once on a node that did not make it.
        late.get("/v1/clouds").await.data(200);
        cluster.pause(sleeper);
        let path = format!("/v1/api-keys/{}", made["id"].as_str().expect("an id"));
        eventually("the key is revoked", async || match awake.delete(&path).await.status {
            200 | 404 => Ok(()),
            status => Err(status.to_string()),
        })
        .await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        // These wait at its door and are the first thing that it sees.
        let asked = (0..20).map(|_| {
            let late = late.clone();
            tokio::spawn(
                async move { late.get("/v1/clouds?consistency=linearizable").await.status },
            )
        });
        let asked: Vec<_> = asked.collect();
        tokio::time::sleep(Duration::from_millis(200)).await;
        cluster.go_on(sleeper);
        for status in join_all(asked).await {
            let status = status.expect("answered");
            assert!(matches!(status, 401 | 503), "{status} of node {sleeper}");
        }
    }
}

#[tokio::test]
async fn without_a_majority_keys_are_good_for_calls_and_stale_reads_alone() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__ENABLED", "false")]);
    let me = cluster.customer(0);
    let mut wanted = me.wanted("echo", &ECHO).await;
    wanted["scaling"] = json!({ "min_instances": 3, "max_instances": 3 });
    let agent = me.deploy_as(&wanted).await;
    cluster.kill(1);
    cluster.kill(2);
    eventually("the node misses the others", async || {
        let stale = me.get("/v1/clouds?consistency=stale").await;
        stale
            .header("x-known-leader")
            .filter(|known| *known == "false")
            .ok_or("not yet".to_owned())?;
        Ok(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    me.get("/v1/clouds?consistency=stale").await.data(200);
    assert_eq!(me.invoke(&agent, &json!(7)).await.data(200)["output"], 7);
    me.get("/v1/clouds").await.refused(503, "CLUSTER_UNAVAILABLE");
    let refused = me.post("/v1/clouds", &json!({ "name": "x", "provider": "process" })).await;
    refused.refused(503, "CLUSTER_UNAVAILABLE");
    // Who has no good key has none now, either.
    let stranger = cluster.caller(0, "ic_live_nonsense");
    stranger.get("/v1/clouds?consistency=stale").await.refused(401, "INVALID_API_KEY");
    stranger.invoke(&agent, &json!(7)).await.refused(401, "INVALID_API_KEY");
}

#[tokio::test]
async fn refresh_tokens_are_good_once_whichever_node_is_asked() {
    let cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "10000")]);
    organization(&cluster, "enterprise").await;
    let login = json!({ "email": "o@example.com", "password": "a long password" });
    let tokens = cluster.customer(1).anonymous("/v1/auth/login", &login).await.data(200);
    // Whoever made it: every node takes it.
    let access = tokens["access_token"].as_str().expect("a token");
    for node in 0..3 {
        cluster.caller(node, access).get("/v1/clouds").await.data(200);
    }
    // Another key signs the next ones; this one stays good.
    let turned = cluster.operate(1, &["cluster", "rotate-signing-key"]);
    assert!(turned.status.success(), "{}", String::from_utf8_lossy(&turned.stderr));
    cluster.customer(0).get("/v1/clouds").await.data(200);
    let keys = cluster.customer(0).bare("/.well-known/jwks.json").await;
    assert_eq!(keys["keys"].as_array().map(Vec::len), Some(2), "{keys}");
    let again = cluster.customer(0).anonymous("/v1/auth/login", &login).await.data(200);
    let again = again["access_token"].as_str().expect("a token");
    for token in [access, again] {
        cluster.caller(0, token).get("/v1/clouds").await.data(200);
    }
    for _ in 0..2 {
        assert!(cluster.operate(1, &["cluster", "rotate-signing-key"]).status.success());
    }
    cluster.customer(0).get("/v1/clouds").await.data(200);
    cluster.caller(0, access).get("/v1/clouds").await.refused(401, "INVALID_API_KEY");
    cluster.caller(0, again).get("/v1/clouds").await.data(200);
    let body = json!({ "refresh_token": tokens["refresh_token"] });
    let answers = join_all((0..30).map(|call| {
        let (caller, body) = (cluster.customer(call % 3), body.clone());
        async move { caller.anonymous("/v1/auth/refresh", &body).await }
    }))
    .await;
    // One client that asks again within seconds gets one and the same next token.
    let next: std::collections::BTreeSet<String> = answers
        .iter()
        .filter(|answer| answer.status == 200)
        .map(|answer| answer.body["refresh_token"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(next.len(), 1, "{answers:#?}");
    cluster.kill(0);
    let next = json!({ "refresh_token": next.first() });
    let data: Value = eventually("another node goes on", async || {
        let answer = cluster.customer(1).anonymous("/v1/auth/refresh", &next).await;
        if answer.status == 200 {
            Ok(answer.body["data"].clone())
        } else {
            Err(format!("{answer:?}"))
        }
    })
    .await;
    assert!(data["access_token"].is_string());
}
