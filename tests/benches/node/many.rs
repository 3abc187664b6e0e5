//! Starts of instances, and a node with 10,000 agents.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use serde_json::json;
use tests::{
    Customer, Node,
    load::{Measured, resident_mib},
    source,
};

const STARTS: usize = 20;
const AGENTS: usize = 10_000;
const CLIENTS: usize = 32;

/// From the spawn of the bare program to its first answer.
fn bare_start(program: &std::path::Path, port: u16) -> u128 {
    let began = Instant::now();
    let child = Command::new(program).env("PORT", port.to_string()).stdout(Stdio::null()).spawn();
    let mut child = child.expect("it starts");
    loop {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            stream.write_all(b"GET /health HTTP/1.1\r\n\r\n").expect("sent");
            let mut byte = [0];
            if stream.read_exact(&mut byte).is_ok() {
                break;
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    let took = began.elapsed().as_micros();
    let _ = child.kill();
    let _ = child.wait();
    took
}

/// From `POST …/start` to `running`, beside the bare program.
pub(crate) async fn starts(me: &Customer, id: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("echo");
    std::fs::write(&program, source::echo_program()).expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, mode).expect("runnable");
    let (mut bare, mut ours) = (vec![], vec![]);
    let path = format!("/v1/agents/{id}");
    for round in 0..STARTS {
        bare.push(bare_start(&program, 31_000 + u16::try_from(round).unwrap_or_default()));
        me.call(&format!("{path}/stop")).await.data(200);
        me.settled(id, "stopped").await;
        let began = Instant::now();
        me.call(&format!("{path}/start")).await.data(200);
        me.settled(id, "running").await;
        ours.push(began.elapsed().as_micros());
    }
    let [bare, ours] = [bare, ours].map(|times| Measured::of(times, Duration::from_secs(1)));
    println!(
        "start of an instance: p50 {} us from POST to running, the bare program p50 {} us",
        ours.quantile(50),
        bare.quantile(50)
    );
}

/// Memory and start-up time with 10,000 stopped agents.
pub(crate) async fn many(node: &mut Node) {
    let before = resident_mib(node.pid());
    let me = node.customer();
    let archive_url = me.upload(source::tar_gz(&[("agent.py", source::ECHO)])).await;
    let (source, cloud) =
        (json!({ "type": "upload", "archive_url": archive_url }), me.cloud().await);
    let next = AtomicUsize::new(0);
    let one = async || {
        loop {
            let number = next.fetch_add(1, Relaxed);
            if number >= AGENTS {
                return;
            }
            let body =
                json!({ "name": format!("agent-{number}"), "cloud_id": cloud, "source": source });
            let id = me.post("/v1/agents", &body).await.data(201)["id"].clone();
            let stop = format!("/v1/agents/{}/stop", id.as_str().expect("an id"));
            me.call(&stop).await.data(200);
        }
    };
    let began = Instant::now();
    futures::future::join_all((0..CLIENTS).map(|_| one())).await;
    let took = began.elapsed();
    tokio::time::sleep(Duration::from_secs(5)).await;
    println!(
        "{AGENTS} agents made and stopped in {:.1} s: {} MiB more than {before}",
        took.as_secs_f64(),
        resident_mib(node.pid()).saturating_sub(before)
    );
    node.terminate();
    let began = Instant::now();
    node.restart();
    println!(
        "restarted with them in {} ms, {} MiB resident",
        began.elapsed().as_millis(),
        resident_mib(node.pid())
    );
}
