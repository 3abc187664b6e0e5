//! Every core is taken by somebody else, for minutes: nobody is taken for dead, and no leadership moves.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tests::{Cluster, Customer};

/// Between looks at who is alive.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long, in seconds; a shorter run sets fewer.
fn lasts() -> Duration {
    Duration::from_secs(tests::number_of("ROOST_LOAD_SECONDS", 600))
}

async fn terms(me: &Customer) -> BTreeMap<String, u64> {
    let groups = me.get("/v1/cluster/shards").await.data(200);
    let groups = groups["items"].as_array().cloned().unwrap_or_default();
    let term = |group: &serde_json::Value| {
        (group["name"].to_string(), group["term"].as_u64().unwrap_or(0))
    };
    groups.iter().map(term).collect()
}

pub(crate) async fn nobody_is_taken_for_dead() {
    let cluster = Cluster::alone(3);
    let me = cluster.customer(0);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let before = terms(&me).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let takers: Vec<_> = (0..cores)
        .map(|_| {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || while !is_over.load(Relaxed) {})
        })
        .collect();
    let (began, mut looks, mut silent, mut late) = (Instant::now(), 0, 0, 0);
    while began.elapsed() < lasts() {
        let asked = Instant::now();
        let nodes = me.get("/v1/cluster/nodes").await.data(200);
        late = asked.elapsed().as_millis().max(late);
        let nodes = nodes["items"].as_array().cloned().unwrap_or_default();
        silent += nodes.iter().filter(|node| node["alive"] == false).count();
        looks += 1;
        tokio::time::sleep(LOOK_EVERY).await;
    }
    is_over.store(true, Relaxed);
    takers.into_iter().for_each(|taker| taker.join().expect("it ends"));
    let after = terms(&me).await;
    let elections: u64 =
        after.iter().map(|(name, term)| term - before.get(name).unwrap_or(term)).sum();
    println!(
        "{} s with {cores} of {cores} cores taken by others: {elections} elections in {} groups, a node taken for dead in \
         {silent} of {looks} looks; the slowest look took {late} ms",
        began.elapsed().as_secs(),
        after.len()
    );
}
