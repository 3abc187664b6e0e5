//! The master key changes while everything runs, and may come from the environment.

use serde_json::json;
use tests::{Cluster, Customer, eventually};

const TELLS: [(&str, &str); 1] = [(
    "agent.py",
    "import os\ndef invoke(input, context):\n    return os.environ.get(input, 'nothing')\n",
)];
const OLD: &str = "0f0e0d0c0b0a09080706050403020100f0e0d0c0b0a090807060504030201000";
const NEW: &str = "1f1e1d1c1b1a19181716151413121110f1e1d1c1b1a191817161514131211101";
const VARIABLE: &str = "ROOST_MASTER_KEY";

fn kept(cluster: &Cluster, node: usize) -> String {
    std::fs::read_to_string(cluster.folder(node).join("keys/master.key")).unwrap_or_default()
}

/// `roost cluster rotate-master-key`: whether it was done, and what it said.
fn rotated(cluster: &Cluster, node: usize) -> (bool, String) {
    let done = cluster.operate(node, &["cluster", "rotate-master-key"]);
    (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
}

/// An agent that is started with a secret; gives its id.
async fn teller(customer: &Customer) -> String {
    customer.put("/v1/secrets/FIRST", &json!({ "value": "of before" })).await.data(200);
    let mut wanted = customer.wanted("teller", &TELLS).await;
    wanted["environment"] = json!({ "FIRST": "${secrets.FIRST}", "A_PASSWORD": "sealed" });
    customer.deploy_as(&wanted).await
}

/// What the agent is started with, read at a new start.
async fn tells(customer: &Customer, agent: &str) -> [String; 3] {
    customer.call(&format!("/v1/agents/{agent}/stop")).await.data(200);
    customer.settled(agent, "stopped").await;
    customer.call(&format!("/v1/agents/{agent}/start")).await.data(200);
    customer.settled(agent, "running").await;
    let mut told = [const { String::new() }; 3];
    for (told, name) in told.iter_mut().zip(["FIRST", "A_PASSWORD", VARIABLE]) {
        let answer = customer.invoke(agent, &json!(name)).await.data(200);
        *told = answer["output"].as_str().expect("a text").to_owned();
    }
    told
}

const BEFORE: [&str; 3] = ["of before", "sealed", "nothing"];

#[tokio::test]
async fn the_master_key_changes_on_all_nodes_while_secrets_are_set_and_read() {
    let mut cluster = Cluster::of(3);
    let agent = teller(&cluster.customer(0)).await;
    let before = kept(&cluster, 0);
    assert_eq!(before.lines().count(), 1);

    // While a member is away nothing is changed.
    cluster.kill(2);
    let (done, said) = rotated(&cluster, 0);
    assert!(!done && said.contains("nothing is changed"), "{said}");
    assert!(kept(&cluster, 2) == before);
    cluster.restart(&[2]);

    // Somebody sets and an agent reads secrets all the while; nothing of it fails.
    let setter = cluster.customer(1);
    let setting = tokio::spawn(async move {
        for round in 0..60 {
            let secret = format!("/v1/secrets/S{round}");
            setter.put(&secret, &json!({ "value": format!("value {round}") })).await.data(200);
        }
    });
    let (done, said) = rotated(&cluster, 0);
    assert!(done, "{said}");
    setting.await.expect("no change failed");
    let only_new = |node: usize, before: &str| {
        let now = kept(&cluster, node);
        (now.lines().count() == 1 && now != before).then_some(now).ok_or("not yet".to_owned())
    };
    let now = eventually("the old key is forgotten", async || {
        let [one, two, three] = [0, 1, 2].map(|node| only_new(node, &before));
        let (one, two, three) = (one?, two?, three?);
        if one == two && two == three { Ok(one) } else { Err("they differ".to_owned()) }
    })
    .await;
    assert_eq!(tells(&cluster.customer(1), &agent).await, BEFORE);

    // A node that joins has the new one; so has one that comes back.
    let joined = cluster.grow_at(1);
    assert!(kept(&cluster, joined).lines().any(|line| line == now));
    cluster.kill(0);
    cluster.restart(&[0]);
    for node in 0..4 {
        cluster.customer(node).put("/v1/secrets/LAST", &json!({ "value": "x" })).await.data(200);
    }
    assert_eq!(tells(&cluster.customer(0), &agent).await, BEFORE);

    // Without its key a node does not start, and says why.
    cluster.terminate(3);
    let file = cluster.folder(3).join("keys/master.key");
    std::fs::write(&file, &before).expect("written");
    let said = cluster.start_and_fail(3);
    assert!(said.contains("lacks the master key"), "{said}");
    std::fs::write(&file, &now).expect("written");
    cluster.restart(&[3]);
    let agent = teller_again(&cluster.customer(3)).await;
    assert_eq!(cluster.customer(3).invoke(&agent, &json!("LATE")).await.data(200)["output"], "new");
}

async fn teller_again(customer: &Customer) -> String {
    customer.put("/v1/secrets/LATE", &json!({ "value": "new" })).await.data(200);
    let mut wanted = customer.wanted("late-teller", &TELLS).await;
    wanted["environment"] = json!({ "LATE": "${secrets.LATE}" });
    customer.deploy_as(&wanted).await
}

#[tokio::test]
async fn a_master_key_of_the_environment_is_nowhere_on_disk_and_can_be_changed() {
    let mut cluster = Cluster::with(2, &[(VARIABLE, OLD)]);
    let agent = teller(&cluster.customer(0)).await;
    assert_eq!(tells(&cluster.customer(1), &agent).await, BEFORE);
    let (done, said) = rotated(&cluster, 0);
    assert!(!done && said.contains("NEW,OLD"), "{said}");

    // One node after the other learns the new one; then it is changed.
    cluster.set(VARIABLE, &format!("{NEW},{OLD}"));
    cluster.terminate(0);
    cluster.restart(&[0]);
    let (done, said) = rotated(&cluster, 0);
    assert!(!done && said.contains(VARIABLE), "node 1 lacks it: {said}");
    cluster.terminate(1);
    cluster.restart(&[1]);
    let (done, said) = rotated(&cluster, 1);
    assert!(done, "{said}");

    // The old one is of no use any more.
    cluster.set(VARIABLE, OLD);
    cluster.terminate(0);
    let said = cluster.start_and_fail(0);
    assert!(said.contains("lacks the master key"), "{said}");
    cluster.set(VARIABLE, NEW);
    cluster.restart(&[0]);
    assert_eq!(tells(&cluster.customer(0), &agent).await, BEFORE);
    for key in [OLD, NEW] {
        let grep = std::process::Command::new("grep")
            .args(["-rlaF", key])
            .arg(cluster.data.path())
            .output()
            .expect("grep runs");
        let found = String::from_utf8_lossy(&grep.stdout).into_owned();
        assert!(found.is_empty(), "a master key is plain in {found}");
    }
    assert!((0..2).all(|node| kept(&cluster, node).is_empty()));
}
