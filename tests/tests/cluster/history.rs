//! Histories of single objects are linearizable, also while nodes are killed, paused and restarted.
//!
//! Several clients read and write notes of one agent over all nodes. Every call is recorded with when
//! it began and ended; a write without an answer may have taken effect at any later time, or never.
//! Then a search looks for an order of all calls in which every read sees the write before it.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::json;
use tests::{Cluster, source::ECHO};

use crate::forward::deploy;

/// One call of one register.
#[derive(Clone, Debug)]
struct Call {
    began: Duration,
    /// `None`: nobody knows whether and when it took effect.
    ended: Option<Duration>,
    action: Action,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Write(u64),
    Read(u64),
}

/// Whether some order explains the history (Wing and Gong's search with memory of dead ends).
fn is_linearizable(history: &[Call]) -> bool {
    assert!(history.len() <= 128, "the search remembers sets as bits");
    let mut dead: HashSet<(u128, u64)> = HashSet::new();
    search(history, 0, 0, &mut dead)
}

fn search(history: &[Call], done: u128, value: u64, dead: &mut HashSet<(u128, u64)>) -> bool {
    let open = || (0..history.len()).filter(|place| done & (1 << place) == 0);
    if open().all(|place| history[place].ended.is_none()) {
        return true;
    }
    if dead.contains(&(done, value)) {
        return false;
    }
    // Whatever began before the first end among those left may be next.
    let first_end = open().filter_map(|place| history[place].ended).min();
    for place in open() {
        let call = &history[place];
        if first_end.is_some_and(|end| call.began > end) {
            continue;
        }
        let next = match call.action {
            Action::Write(written) => written,
            Action::Read(seen) if seen == value => value,
            Action::Read(_) => continue,
        };
        if search(history, done | 1 << place, next, dead) {
            return true;
        }
    }
    dead.insert((done, value));
    false
}

fn call(began: u64, ended: u64, action: Action) -> Call {
    let millis = Duration::from_millis;
    Call { began: millis(began), ended: (ended > 0).then(|| millis(ended)), action }
}

#[test]
fn the_search_knows_right_from_wrong() {
    use Action::{Read, Write};
    let fine = [call(0, 10, Write(1)), call(5, 15, Read(0)), call(12, 20, Read(1))];
    assert!(is_linearizable(&fine), "a read beside a write sees either");
    let stale = [call(0, 10, Write(1)), call(11, 15, Read(0))];
    assert!(!is_linearizable(&stale), "a read after a write sees it");
    let backwards = [call(0, 100, Write(1)), call(10, 20, Read(1)), call(30, 40, Read(0))];
    assert!(!is_linearizable(&backwards), "what was seen stays seen");
    let unknown = [call(0, 0, Write(1)), call(50, 60, Read(0)), call(70, 80, Read(1))];
    assert!(is_linearizable(&unknown), "a write without an answer may come late");
    let lost = [
        call(0, 10, Write(1)),
        call(20, 0, Write(2)),
        call(30, 40, Read(2)),
        call(50, 60, Read(1)),
    ];
    assert!(!is_linearizable(&lost), "and does not go away again");
}

/// Registers that are read and written, each by several clients.
const REGISTERS: usize = 4;

#[tokio::test]
async fn notes_are_linearizable_while_nodes_die_and_come_back() {
    let mut cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let mut agents = vec![];
    for n in 0..REGISTERS {
        agents.push(deploy(&me, &format!("register-{n}"), ECHO, 1).await);
    }
    let histories: Vec<Arc<Mutex<Vec<Call>>>> = (0..REGISTERS).map(|_| Arc::default()).collect();
    let began = Instant::now();
    let until = began + Duration::from_secs(9);
    let mut clients = vec![];
    for node in 0..3 {
        for (register, agent) in agents.iter().enumerate() {
            let me = cluster.customer(node);
            let (path, history) = (format!("/v1/agents/{agent}"), Arc::clone(&histories[register]));
            clients.push(tokio::spawn(async move {
                let keep =
                    |call: Call| history.lock().unwrap_or_else(PoisonError::into_inner).push(call);
                for n in 1..14_u64 {
                    if Instant::now() >= until {
                        return;
                    }
                    let value = n * 10 + node as u64;
                    let at = began.elapsed();
                    let write = me.request(reqwest::Method::PATCH, &path);
                    let write = write.json(&json!({ "metadata": { "value": value.to_string() } }));
                    let sent = write.timeout(Duration::from_secs(5)).send().await;
                    let ended =
                        sent.is_ok_and(|answer| answer.status() == 200).then(|| began.elapsed());
                    keep(Call { began: at, ended, action: Action::Write(value) });
                    tokio::time::sleep(Duration::from_millis(150 + 37 * node as u64)).await;
                    let at = began.elapsed();
                    let read =
                        me.request(reqwest::Method::GET, &path).timeout(Duration::from_secs(5));
                    let Ok(answer) = read.send().await else { continue };
                    if answer.status() != 200 {
                        continue;
                    }
                    let Ok(body) = answer.json::<serde_json::Value>().await else { continue };
                    let seen = body["data"]["metadata"]["value"].as_str().unwrap_or("0").parse();
                    let action = Action::Read(seen.expect("a number"));
                    keep(Call { began: at, ended: Some(began.elapsed()), action });
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }));
        }
    }
    let pause = |millis| tokio::time::sleep(Duration::from_millis(millis));
    pause(800).await;
    cluster.kill(0);
    pause(1200).await;
    cluster.restart(&[0]);
    pause(600).await;
    cluster.pause(1);
    pause(1500).await;
    cluster.go_on(1);
    pause(500).await;
    cluster.kill(2);
    pause(900).await;
    cluster.restart(&[2]);
    for client in clients {
        client.await.expect("a client that ends");
    }
    let mut values = BTreeSet::new();
    for history in &histories {
        let history = history.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let reads = history.iter().filter(|call| matches!(call.action, Action::Read(_))).count();
        assert!(reads > 4, "only {reads} reads were answered");
        values.extend(history.iter().filter_map(|call| match call.action {
            Action::Read(value) => Some(value),
            Action::Write(_) => None,
        }));
        assert!(is_linearizable(&history), "no order explains {history:#?}");
    }
    assert!(values.len() > 8, "the reads saw something: {values:?}");
}
