//! Nodes that an orchestrator starts, all with one command: `serve --secret-file FILE --join A,B,C`. A new
//! one joins whoever of them answers. The first of the list founds the cluster, but only where nobody at
//! all listens at the others: a machine that lost its disk joins again instead of making a second cluster.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use tokio::{net::TcpStream, time::Instant};

use crate::{
    adapters::{authority::Authority, system::random_bytes},
    cli::say,
    config::Config,
    join::Token,
    keys::{ClusterSecret, Keys, write_secret},
    operate::Stranger,
    serve,
};

/// How long the first of the list looks for the others before it founds.
const LOOKS_FOR: Duration = Duration::from_secs(5);
/// Between looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Between words of progress.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// How long a connection may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Where the first keys are written, below the node's folder.
pub const FIRST_KEYS: &str = "first-keys.json";

/// How a folder became a node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// It joined.
    Joined,
    /// It founded. Its first start has ended in this process and holds its files until that is another.
    Founded,
}

/// Makes an empty folder the folder of a node, by joining or by founding.
pub async fn begin(
    data: &Path,
    secret: &Path,
    members: &[String],
    config: &Config,
) -> anyhow::Result<Begun> {
    let secret = ClusterSecret::read(secret)?;
    let advertise = config.cluster.advertise.as_str();
    ensure!(
        members.is_empty() || !advertise.is_empty(),
        "--join needs the setting cluster.advertise, as it stands in the list for this node"
    );
    let others: Vec<&String> = members.iter().filter(|one| *one != advertise).collect();
    let founds = members.first().is_none_or(|first| first == advertise);
    let began = Instant::now();
    let mut said = None;
    loop {
        let mut somebody = false;
        for address in &others {
            match join(data, &secret, address, config).await {
                Ok(()) => return Ok(Begun::Joined),
                Err(error) => {
                    somebody |= listens(address).await;
                    tracing::debug!(address, "not joined: {error:#}");
                    if said.is_none_or(|said: Instant| said.elapsed() >= SAY_EVERY) {
                        said = Some(Instant::now());
                        say(&format!("waiting for the cluster: {error:#}"));
                    }
                }
            }
        }
        if founds && !somebody && (others.is_empty() || began.elapsed() >= LOOKS_FOR) {
            return found(data, &secret, config).await.map(|()| Begun::Founded);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn listens(address: &str) -> bool {
    let connected = tokio::time::timeout(CONNECT_WITHIN, TcpStream::connect(address)).await;
    matches!(connected, Ok(Ok(_)))
}

async fn found(data: &Path, secret: &ClusterSecret, config: &Config) -> anyhow::Result<()> {
    let keys = data.join("keys");
    Keys::derived(secret).write(&keys)?;
    Authority::derived(secret)?.write(&keys)?;
    let first = serve::found(data, config).await?;
    let path = data.join(FIRST_KEYS);
    write_secret(&path, &serde_json::to_vec_pretty(&serve::secrets_line(&first))?)?;
    say(&format!(
        "a new cluster; its first keys are in {}: keep them and remove it",
        path.display()
    ));
    Ok(())
}

/// Whoever has the secret can sign itself a certificate, and with that ask for a token.
async fn join(
    data: &Path,
    secret: &ClusterSecret,
    address: &str,
    config: &Config,
) -> anyhow::Result<()> {
    let token = ask_for_token(secret, address).await?;
    let advertise = &config.cluster.advertise;
    let identity = serve::become_member(data, &token, address, advertise, config).await?;
    say(&format!("{} belongs to the cluster of {address}", identity.node_id));
    Ok(())
}

async fn ask_for_token(secret: &ClusterSecret, address: &str) -> anyhow::Result<Token> {
    let scratch = tempfile::tempdir().context("a folder for a certificate")?;
    let number = u64::from_be_bytes(random_bytes()) >> 1;
    let tls = Authority::derived(secret)?.peer_identity(scratch.path(), number)?.client()?;
    Stranger { tls, raft_id: number }.token(address).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_secret_makes_one_authority_everywhere() {
        crate::adapters::tls::install_provider();
        let folder = tempfile::tempdir().expect("a folder");
        let read = |text: &str| {
            let path = folder.path().join("secret");
            std::fs::write(&path, text).expect("written");
            ClusterSecret::read(&path)
        };
        let secret = read("0123456789abcdef0123456789abcdef\n").expect("long enough");
        let [one, two] = [0, 1].map(|_| Authority::derived(&secret).expect("made"));
        assert_eq!(one.pem, two.pem);
        let other = read("0123456789abcdef0123456789abcdeF").expect("long enough");
        assert_ne!(Authority::derived(&other).expect("made").pem, one.pem);
        assert!(Keys::derived(&other).masters != Keys::derived(&secret).masters);
        assert!(read("short").is_err());
    }
}
