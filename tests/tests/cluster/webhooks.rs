//! Webhooks on three nodes: nothing is lost and hardly anything doubled when one dies, whatever the
//! receivers do.

use std::{
    collections::BTreeSet,
    net::TcpListener,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use serde_json::{Value, json};
use tests::{Cluster, Customer, Network, Receiver, Setup, eventually, eventually_within, skipped};

const DELAYS: &str = "[\"300ms\", \"500ms\", \"1s\", \"2s\", \"3s\"]";
/// Attempts of one webhook at once: so many may be sent once more after the death of a node.
const AT_ONCE: usize = 32;
const ATTEMPTS_MAX: usize = 6;
const AGENTS: usize = 10;
const WRITERS: usize = 16;

/// How a receiver behaves, how many do, and what becomes of every delivery to them.
const RECEIVERS: [(&str, usize, End); 9] = [
    ("/ok", 8, End::Arrives(1)),
    ("/slow", 2, End::Arrives(1)),
    ("/fail/1", 2, End::Arrives(2)),
    ("/fail/2", 2, End::Arrives(3)),
    ("/fail/99", 1, End::IsGivenUp),
    ("/redirect", 1, End::IsGivenUp),
    ("/reset", 1, End::IsGivenUp),
    ("/half", 1, End::IsGivenUp),
    ("/hang", 2, End::Waits),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// With this attempt.
    Arrives(usize),
    /// After the last one.
    IsGivenUp,
    /// Longer than the test.
    Waits,
}

/// How many events are told; a longer run sets another number.
fn events_wanted() -> usize {
    usize::try_from(tests::number_of("ROOST_EVENTS", 150)).expect("it fits")
}

/// All items of a list.
async fn all(me: &Customer, path: &str) -> Vec<Value> {
    let (mut items, mut cursor) = (vec![], String::new());
    loop {
        let page = me.get(&format!("{path}limit=100{cursor}")).await.data(200);
        items.extend(page["items"].as_array().cloned().unwrap_or_default());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return items,
        }
    }
}

/// The same where the cluster may be busy with itself.
async fn all_or_none(me: &Customer, path: &str) -> Option<Vec<Value>> {
    let page = me.get(&format!("{path}limit=100")).await;
    (page.status == 200).then(|| page.data(200)["items"].as_array().cloned().unwrap_or_default())
}

/// Changes agents until so many changes were acknowledged; a node dies half-way.
async fn cause_events(cluster: &Cluster, agents: &[String]) {
    let (done, wanted) = (AtomicUsize::new(0), events_wanted());
    let is_dead = |node: usize| node == 2 && done.load(Relaxed) >= wanted / 2;
    let customers: Vec<Customer> = (0..3).map(|node| cluster.customer(node)).collect();
    let write = async |writer: usize| {
        for turn in (writer..).step_by(WRITERS) {
            if done.load(Relaxed) >= wanted {
                return;
            }
            let node = if is_dead(turn % 3) { turn % 2 } else { turn % 3 };
            let path = format!("/v1/agents/{}", agents[turn % agents.len()]);
            let notes = json!({ "metadata": { "turn": turn.to_string() } });
            let request = customers[node].request(reqwest::Method::PATCH, &path).json(&notes);
            let answer = request.timeout(Duration::from_secs(10)).send().await;
            if answer.is_ok_and(|answer| answer.status() == 200)
                && done.fetch_add(1, Relaxed) + 1 == wanted / 2
            {
                cluster.kill(2);
            }
        }
    };
    futures::future::join_all((0..WRITERS).map(write)).await;
}

/// The event log, once it has all that was acknowledged and grows no more. What was cut off by the death
/// of the node may have happened too.
async fn everything_that_happened(me: &Customer, wanted: usize) -> BTreeSet<String> {
    let mut before = 0;
    eventually("the log of events is complete", async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let events = all(me, "/v1/events?type=agent.updated&").await;
        let events: BTreeSet<String> =
            events.iter().map(|event| event["id"].as_str().expect("an id").to_owned()).collect();
        let is_still = std::mem::replace(&mut before, events.len()) == events.len();
        let is_all = is_still && events.len() >= wanted;
        if is_all { Ok(events) } else { Err(format!("{before} events of {wanted}")) }
    })
    .await
}

/// Three nodes, agents whose changes are told, and receivers.
struct Scene {
    receiver: Receiver,
    cluster: Cluster,
    me: Customer,
    agents: Vec<String>,
    /// Webhooks by their ids, with their paths at the receiver.
    hooks: Vec<(String, String, End)>,
}

impl Scene {
    async fn set(receivers: &[(&str, usize, End)]) -> Self {
        let receiver = Receiver::start().await;
        let settings = receiver.settings(DELAYS);
        let settings: Vec<(&str, &str)> =
            settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let cluster = Cluster::with(3, &settings);
        let me = cluster.customer(0);
        let cloud = me.cloud().await;
        let mut agents = vec![];
        for number in 0..AGENTS {
            let source = json!({ "type": "github", "repo": "owner/none" });
            let wanted =
                json!({ "name": format!("a{number}"), "cloud_id": cloud, "source": source });
            let made = me.post("/v1/agents", &wanted).await.data(201);
            agents.push(made["id"].as_str().expect("an id").to_owned());
        }
        let mut hooks = vec![];
        for (kind, count, end) in receivers {
            for number in 0..*count {
                let path = format!("{kind}?{number}");
                let body = json!({ "url": receiver.url(&path), "events": ["agent.updated"] });
                let made = me.post("/v1/webhooks", &body).await.data(201);
                hooks.push((made["id"].as_str().expect("an id").to_owned(), path, *end));
            }
        }
        Self { receiver, cluster, me, agents, hooks }
    }
}

/// A node is cut off from the others and not from the receivers: whoever leads in its place sends, and it does not.
#[tokio::test]
async fn who_is_cut_off_from_the_others_sends_nothing_any_more() {
    const HOOKS: usize = 24;
    let names: Vec<String> = (0..64).map(Network::outside_of).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut receiver = Receiver::prepared(&names);
    let mut settings = receiver.settings("[\"10s\", \"2s\", \"2s\", \"2s\"]");
    settings[0].1 = "[\"10.197.0.0/16\"]".to_owned();
    let Some(network) = Network::with(3, Setup { settings, is_public: false }) else {
        return skipped("netns");
    };
    let own = network.outside();
    receiver.listen(TcpListener::bind(format!("{own}:0")).expect("a port on the bridge"));
    let me = network.customer(0);
    // So many that each node sends for some of them.
    let mut hooks = vec![];
    for number in 0..HOOKS {
        let path = format!("/fail/99?{number}");
        let url = format!("https://{own}:{}{path}", receiver.port());
        let made = me.post("/v1/webhooks", &json!({ "url": url, "events": ["*"] })).await.data(201);
        hooks.push((made["id"].as_str().expect("an id").to_owned(), path));
    }
    let source = json!({ "type": "github", "repo": "owner/none" });
    let wanted = json!({ "name": "a", "cloud_id": me.cloud().await, "source": source });
    let agent = me.post("/v1/agents", &wanted).await.data(201);
    let first = async |path: &str| receiver.wait_for(path, 1).await;
    futures::future::join_all(hooks.iter().map(|(_, path)| first(path))).await;
    for (id, path) in &hooks {
        let all = format!("/v1/webhooks/{id}/deliveries?");
        eventually("what is known of the first attempts is agreed on", async || {
            let deliveries = all_or_none(&me, &all).await.unwrap_or_default();
            let is_tried = |one: &Value| one["attempts"][0].is_object();
            let known = deliveries.iter().filter(|one| is_tried(one)).count();
            match known > 0 && known == receiver.attempts(path).len() {
                true => Ok(()),
                false => Err(json!(deliveries).to_string()),
            }
        })
        .await;
    }
    network.isolate(2);
    assert!(agent["id"].is_string());
    for (id, path) in &hooks {
        let all = format!("/v1/webhooks/{id}/deliveries?");
        let deliveries = eventually("all is given up", async || {
            let deliveries = all_or_none(&me, &all).await.ok_or("no answer yet".to_owned())?;
            let is_over = |one: &Value| one["status"] == "exhausted";
            match deliveries.iter().all(is_over) {
                true => Ok(deliveries),
                false => Err(json!(deliveries).to_string()),
            }
        })
        .await;
        let events = receiver.attempts(path);
        assert!(!events.is_empty() && events.len() == deliveries.len(), "{events:?}");
        for (event, attempts) in events {
            assert_eq!(attempts, 5, "{event} to {path}: one call for each attempt");
        }
    }
}

#[tokio::test]
async fn every_event_arrives_although_a_node_dies() {
    let scene = Scene::set(&RECEIVERS).await;
    assert_eq!(scene.hooks.len(), 20);
    cause_events(&scene.cluster, &scene.agents).await;
    let events = everything_that_happened(&scene.me, events_wanted()).await;
    let patience = Duration::from_secs(60 + events.len() as u64 / 8);
    for (id, path, end) in &scene.hooks {
        everything_came(&scene.receiver, path, *end, &events, AT_ONCE, patience).await;
        everything_is_written_down(&scene.me, id, *end, events.len(), patience).await;
    }
}

/// Leaderships leave a node and come back, as in a rolling upgrade, while deliveries are on their way.
#[tokio::test]
async fn nothing_is_sent_twice_when_leadership_moves() {
    let receivers = [("/slow", 8, End::Arrives(1)), ("/ok", 4, End::Arrives(1))];
    let scene = Scene::set(&receivers).await;
    let (count, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let write = async |writer: usize| {
        for turn in (writer..).step_by(4).take_while(|_| !is_over.load(Relaxed)) {
            let path = format!("/v1/agents/{}", scene.agents[turn % AGENTS]);
            let notes = json!({ "metadata": { "turn": turn.to_string() } });
            scene.me.patch(&path, &notes).await.data(200);
            count.fetch_add(1, Relaxed);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    };
    let move_about = async {
        for node in [1, 2, 1] {
            let id = &scene.cluster.nodes[node].id;
            let node = format!("/v1/cluster/nodes/{id}");
            scene.me.call(&format!("{node}/drain")).await.data(200);
            leads(&scene.me, id, |shards| shards == 0).await;
            scene.me.call(&format!("{node}/activate")).await.data(200);
            leads(&scene.me, id, |shards| shards > 0).await;
        }
        is_over.store(true, Relaxed);
    };
    futures::future::join(futures::future::join_all((0..4).map(write)), move_about).await;
    let events = everything_that_happened(&scene.me, count.load(Relaxed)).await;
    assert_eq!(events.len(), count.load(Relaxed));
    for (_, path, end) in &scene.hooks {
        let patience = Duration::from_secs(60);
        everything_came(&scene.receiver, path, *end, &events, 0, patience).await;
    }
}

/// Waits until a node leads as many shards as it should.
async fn leads(me: &Customer, node: &str, fits: impl Fn(usize) -> bool) {
    eventually("leaderships have moved", async || {
        let groups = me.get("/v1/cluster/shards").await.data(200);
        let groups = groups["items"].as_array().expect("a list").clone();
        let led = groups.iter().filter(|group| group["leader"] == node).count();
        if fits(led) { Ok(()) } else { Err(json!(groups).to_string()) }
    })
    .await;
}

/// Every event came as often as it should, and hardly any once more.
async fn everything_came(
    receiver: &Receiver,
    path: &str,
    end: End,
    events: &BTreeSet<String>,
    doubled_at_most: usize,
    patience: Duration,
) {
    let attempts = match end {
        End::Arrives(attempts) => attempts,
        End::IsGivenUp => ATTEMPTS_MAX,
        End::Waits => return,
    };
    eventually_within(&format!("{path} has everything"), patience, async || {
        let seen = receiver.attempts(path);
        let missing = events.iter().filter(|id| seen.get(*id).is_none_or(|n| *n < attempts));
        match missing.count() {
            0 => Ok(()),
            missing => Err(format!("{missing} of {} are missing", events.len())),
        }
    })
    .await;
    let seen = receiver.attempts(path);
    assert!(seen.keys().all(|id| events.contains(id)), "{path}: nothing that did not happen");
    let doubled: usize = seen.values().map(|count| count.saturating_sub(attempts)).sum();
    assert!(doubled <= doubled_at_most, "{path}: {doubled} deliveries came once more");
}

/// The list of a webhook's deliveries has each event once, numbered without a gap, with its end.
async fn everything_is_written_down(
    me: &Customer,
    hook: &str,
    end: End,
    events: usize,
    patience: Duration,
) {
    let path = format!("/v1/webhooks/{hook}/deliveries?");
    let is_ended = |row: &Value| match end {
        End::Arrives(_) => row["status"] == "succeeded",
        End::IsGivenUp => row["status"] == "exhausted",
        End::Waits => row["status"] == "pending" || row["status"] == "exhausted",
    };
    let rows: Vec<Value> = eventually_within("all are written down", patience, async || {
        let rows = all(me, &path).await;
        let ended = rows.iter().filter(|row| is_ended(row)).count();
        if ended == events { Ok(rows) } else { Err(format!("{ended} of {}", rows.len())) }
    })
    .await;
    let mut numbers: Vec<u64> = rows.iter().filter_map(|row| row["sequence"].as_u64()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=events as u64).collect::<Vec<_>>(), "no number is missing or twice");
}

/// Two of five nodes whose end leaves as many shards as possible without a majority, but not all of them.
fn pair_to_lose(shards: &Value) -> [String; 2] {
    let groups: Vec<Vec<String>> = shards["items"]
        .as_array()
        .expect("groups")
        .iter()
        .map(|group| {
            group["voters"]
                .as_array()
                .expect("voters")
                .iter()
                .map(|id| id.as_str().unwrap_or_default().to_owned())
                .collect()
        })
        .collect();
    let nodes: BTreeSet<&String> = groups.iter().flatten().collect();
    let lost = |one: &String, other: &String| {
        let both = groups.iter().filter(|voters| voters.len() == 3);
        both.filter(|voters| voters.contains(one) && voters.contains(other)).count()
    };
    let pairs = nodes.iter().flat_map(|one| nodes.iter().map(move |other| (*one, *other)));
    let pairs = pairs.filter(|(one, other)| one < other);
    let worst = pairs.max_by_key(|(one, other)| lost(one, other)).expect("five nodes");
    assert!((1..8).contains(&lost(worst.0, worst.1)), "{groups:?}");
    [worst.0.clone(), worst.1.clone()]
}

#[tokio::test]
async fn a_shard_without_a_majority_holds_up_nothing_but_its_own() {
    const ORGANIZATIONS: usize = 16;
    let cluster = Cluster::with(5, &[("ROOST_RATE_LIMIT__ENABLED", "false")]);
    let operator = cluster.customer(0);
    let mut people = vec![];
    for number in 0..ORGANIZATIONS {
        people.push(operator.organization(&format!("o{number}"), "starter").await);
    }
    let shards = eventually("five nodes vote on the directory, three on a shard", async || {
        let shards = operator.get("/v1/cluster/shards").await.data(200);
        let groups = shards["items"].as_array().expect("groups");
        let voters = |group: &Value| group["voters"].as_array().map(Vec::len);
        let is_settled = voters(&groups[0]) == Some(5)
            && groups[1..].iter().all(|group| voters(group) == Some(3));
        if is_settled { Ok(shards) } else { Err(shards.to_string()) }
    })
    .await;
    let lost = pair_to_lose(&shards);
    let lost: Vec<usize> = lost.iter().map(|id| cluster.place(id)).collect();
    lost.iter().for_each(|node| cluster.kill(*node));
    let left = (0..5).find(|node| !lost.contains(node)).expect("three are left");
    let people: Vec<_> = people.iter().map(|one| cluster.caller(left, &one.key)).collect();
    // The directory has its majority still, whatever became of the shards.
    let changes = people.iter().map(async |person| {
        let cloud = json!({ "name": "after" });
        let try_it = async || match person.post("/v1/clouds", &cloud).await {
            answer if answer.status == 201 => Ok(()),
            answer => Err(answer.body.to_string()),
        };
        eventually("the directory takes a change", try_it).await;
    });
    futures::future::join_all(changes).await;
    let mut told = 0;
    for person in &people {
        let log = "/v1/audit-log?action=createCloud";
        told += eventually("the log has it, or has no majority", async || {
            let answer = person.get(log).await;
            match (answer.status, answer.body["data"]["items"].as_array().map(Vec::len)) {
                (503, _) => Ok(0),
                (200, Some(1)) => Ok(1),
                _ => Err(answer.body.to_string()),
            }
        })
        .await;
    }
    assert!((1..ORGANIZATIONS).contains(&told), "{told} of {ORGANIZATIONS}");
}
