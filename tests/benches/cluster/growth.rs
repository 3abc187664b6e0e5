//! A node joins a cluster with a large state while writing goes on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use serde_json::json;
use tests::{
    Cluster, Customer,
    load::{load, resident_mib},
};

/// Bytes of one secret, and secrets of one organization.
const SECRET_BYTES: usize = 64 * 1024;
const SECRETS: usize = 1000;
const WRITERS: usize = 16;
/// Between looks whether the new node serves.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// MiB of state; a shorter run sets fewer.
fn state_mib() -> usize {
    usize::try_from(tests::number_of("ROOST_STATE_MIB", 1024)).expect("it fits")
}

pub(crate) async fn state_reaches_a_new_node() {
    let mut cluster = Cluster::with(3, &[("ROOST_RATE_LIMIT__ENABLED", "false")]);
    let me = cluster.customer(0);
    let began = Instant::now();
    let organizations = (state_mib() * 1024 * 1024).div_ceil(SECRET_BYTES * SECRETS);
    for number in 0..organizations {
        let owner = me.organization(&format!("org-{number}"), "enterprise").await;
        fill(&owner).await;
    }
    let wrote = organizations * SECRETS * SECRET_BYTES / (1024 * 1024);
    println!("{wrote} MiB of secrets written in {:.0} s", began.elapsed().as_secs_f64());
    let count = AtomicUsize::new(0);
    let write = |_| {
        let name = format!("cloud-{}", count.fetch_add(1, Relaxed));
        let me = &me;
        async move { drop(me.post("/v1/clouds", &json!({ "name": name })).await.data(201)) }
    };
    let usual = load(WRITERS, write).await;
    println!("writes as usual: {}", usual.shown());
    let began = Instant::now();
    let written = Arc::new(AtomicUsize::new(0));
    let writing = tokio::spawn(write_on(me.clone(), Arc::clone(&written)));
    let place = tokio::task::block_in_place(|| cluster.grow_at(0));
    let ready = began.elapsed();
    let node = cluster.customer(place);
    while node.get("/readyz").await.status != 200 {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let whole = began.elapsed();
    let meanwhile = written.load(Relaxed);
    writing.abort();
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = meanwhile as f64 / whole.as_secs_f64();
    println!(
        "a new node has joined after {:.1} s and is caught up after {:.1} s; writes meanwhile {rate:.0}/s, {:.2} x the usual; {} MiB resident",
        ready.as_secs_f64(),
        whole.as_secs_f64(),
        rate / usual.rate,
        resident_mib(cluster.nodes[place].pid)
    );
}

async fn fill(owner: &Customer) {
    let next = AtomicUsize::new(0);
    let value = "x".repeat(SECRET_BYTES);
    let one = async || {
        loop {
            let number = next.fetch_add(1, Relaxed);
            if number >= SECRETS {
                return;
            }
            let body = json!({ "value": value });
            owner.put(&format!("/v1/secrets/NAME_{number}"), &body).await.data(200);
        }
    };
    futures::future::join_all((0..WRITERS).map(|_| one())).await;
}

/// Writes until it is told to end, and counts what was written.
async fn write_on(me: Customer, written: Arc<AtomicUsize>) {
    let number = AtomicUsize::new(0);
    let one = async || {
        loop {
            let name = format!("later-{}", number.fetch_add(1, Relaxed));
            me.post("/v1/clouds", &json!({ "name": name })).await.data(201);
            written.fetch_add(1, Relaxed);
        }
    };
    futures::future::join_all((0..WRITERS).map(|_| one())).await;
}
