//! Whoever does not belong gets nothing at the peer and gossip ports.

use std::{net::UdpSocket, process::Command, time::Duration};

use serde_json::json;
use tests::{Cluster, eventually};

fn peer_address(node: &serde_json::Value) -> String {
    node["peer_address"].as_str().expect("an address").to_owned()
}

#[tokio::test]
async fn a_token_is_good_for_one_join_of_its_own_cluster() {
    let mut cluster = Cluster::of(1);
    cluster.grow();
    let made = cluster.customer(0).call("/v1/cluster/join-tokens").await;
    let token = made.data(200);
    let (token, address) = (token["token"].clone(), token["address"].clone());
    let (token, address) = (token.as_str().expect("text"), address.as_str().expect("text"));
    let join = |token: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = Command::new(binary());
        command.args(["join", "--token", token, address, "--data"]).arg(folder.path().join("n"));
        command.output().expect("it runs")
    };
    let foreign =
        "roost-join-1.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    let other = join(foreign);
    assert!(!other.status.success(), "an authority that is not the token's is not spoken to");
    let mut guessed: Vec<String> = token.split('.').map(str::to_owned).collect();
    guessed[1] = "A".repeat(32);
    let other = join(&guessed.join("."));
    assert!(String::from_utf8_lossy(&other.stderr).contains("not valid"), "{other:?}");
    assert!(join(token).status.success(), "the right one is taken");
    let again = join(token);
    assert!(!again.status.success(), "once");
    assert!(String::from_utf8_lossy(&again.stderr).contains("not valid"), "{again:?}");
}

fn binary() -> std::path::PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    test.parent().and_then(std::path::Path::parent).expect("target").join("roost")
}

/// Datagrams of noise, as fast as they can be sent.
fn flood(peer: &str) {
    const DATAGRAMS: u64 = 200_000;
    const PAUSE_EVERY: u64 = 1000;
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let mut dice = 0x2545_f491_4f6c_dd1d_u64;
    for round in 0..DATAGRAMS {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let length = (dice % 1400) as usize;
        let mut datagram = vec![0; length];
        for (place, byte) in datagram.iter_mut().enumerate() {
            *byte = dice.rotate_left(u32::try_from(place % 64).unwrap_or(0)) as u8;
        }
        if length > 0 {
            datagram[0] = 1;
        }
        let _ = socket.send_to(&datagram, peer);
        if round % PAUSE_EVERY == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Every call is served while noise comes in. A machine without a processor to spare may lose members' datagrams
/// among it and take a node for dead; the next one that is heard cures that.
#[tokio::test]
async fn noise_at_the_peer_and_gossip_ports_stops_nobody() {
    let cluster = Cluster::of(2);
    let me = cluster.customer(0);
    let nodes = me.get("/v1/cluster/nodes").await.data(200);
    let peer = peer_address(&nodes["items"][0]);
    let noise = std::thread::spawn({
        let peer = peer.clone();
        move || flood(&peer)
    });
    let others = [cluster.customer(1), me.clone()];
    for round in (1..).take_while(|_| !noise.is_finished()) {
        let value = json!({ "value": round.to_string() });
        others[round % 2].put("/v1/secrets/NOISE", &value).await.data(200);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    noise.join().expect("the noise ends");
    // Clear text, half a handshake, and TLS without a certificate.
    for bytes in [&b"GET /ask HTTP/1.1\r\n\r\n"[..], &[0x16, 0x03, 0x01, 0x02][..], &[0; 4096][..]]
    {
        let mut stream = std::net::TcpStream::connect(&peer).expect("the port is open");
        let _ = std::io::Write::write_all(&mut stream, bytes);
    }
    let stranger = reqwest::Client::builder()
        .tls_danger_accept_invalid_certs(true)
        .http2_prior_knowledge()
        .build()
        .expect("a client");
    for path in
        ["/ask", "/operate", "/raft/0/append", "/propose/0", "/blobs/00", "/images/process/x"]
    {
        let request = stranger.post(format!("https://{peer}{path}"));
        let answer =
            request.header("x-roost-node", "1").body("{}").send().await.expect("an answer");
        assert_eq!(answer.status(), 401, "{path}");
    }
    let answer = stranger.post(format!("https://{peer}/join")).body("{}").send().await;
    assert_eq!(answer.expect("an answer").status(), 400);
    eventually("both nodes are known to be there", async || {
        let glance = me.get("/v1/cluster").await.data(200);
        match (&glance["healthy"], &glance["nodes"]["active"]) == (&json!(true), &json!(2)) {
            true => Ok(()),
            false => Err(glance.to_string()),
        }
    })
    .await;
    let made = me.post("/v1/clouds", &json!({ "name": "unharmed" })).await;
    assert_eq!(made.status, 201);
}
