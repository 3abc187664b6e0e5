//! Joining: a token that is good once, and what it is worth. The token carries the fingerprint of the
//! cluster's authority, so whoever joins knows whom it talks to before it says anything; the secrets
//! travel over that connection alone.

use std::{path::Path, time::Duration};

use actors::seal::MasterKey;
use anyhow::{Context as _, bail};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use cluster::peer::{client::Once, tls};
use domain::node::{NodeFacts, NodeStatus};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    adapters::{authority::Authority, system::random_bytes},
    hex,
    host::Operation,
    identity::NodeIdentity,
    keys::{self, Keys},
    operate::{ANSWER_WITHIN, Stranger, heard},
};

/// How long a token is good.
pub const GOOD_FOR: Duration = Duration::from_secs(3600);
/// What a token begins with.
const PREFIX: &str = "roost-join-1";

/// A join token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    secret: [u8; 24],
    authority: [u8; 32],
}

impl Token {
    /// A new one, for the cluster of this authority.
    pub fn new(authority: &Authority) -> anyhow::Result<Self> {
        let authority = tls::fingerprint(&authority.certificate()?);
        Ok(Self { secret: random_bytes(), authority })
    }

    /// What the directory keeps of it.
    pub fn hash(&self) -> [u8; 32] {
        Sha256::digest(self.secret).into()
    }

    /// What the directory knows a secret by.
    pub fn hash_of(secret: &str) -> Option<[u8; 32]> {
        let secret = URL_SAFE_NO_PAD.decode(secret).ok().filter(|bytes| bytes.len() == 24)?;
        Some(Sha256::digest(secret).into())
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (secret, authority) = (self.secret, self.authority);
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        write!(f, "{PREFIX}.{}.{}", encode(&secret), encode(&authority))
    }
}

impl std::str::FromStr for Token {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let parts: Vec<&str> = text.trim().split('.').collect();
        let [PREFIX, secret, authority] = parts.as_slice() else {
            bail!("this is no join token: it begins with {PREFIX} and has two dots");
        };
        let read = |part: &str| URL_SAFE_NO_PAD.decode(part).context("the join token is cut off");
        let wrong = |_| anyhow::anyhow!("the join token is cut off");
        Ok(Self {
            secret: read(secret)?.try_into().map_err(wrong)?,
            authority: read(authority)?.try_into().map_err(wrong)?,
        })
    }
}

/// What a node says when it joins.
#[derive(Serialize, Deserialize)]
pub struct JoinRequest {
    /// The token's secret.
    pub secret: String,
    /// Who it is.
    pub facts: NodeFacts,
}

/// What it hears.
#[derive(Serialize, Deserialize)]
pub struct JoinReply {
    authority_pem: String,
    authority_key_pem: String,
    pepper: String,
    /// None if every node has them from its environment.
    masters: Vec<String>,
    signing: String,
    gossip: String,
    shards: u16,
    members: Vec<(u64, String)>,
}

impl JoinReply {
    /// All that a member must know.
    pub fn new(
        authority: &Authority,
        keys: &Keys,
        masters: &[MasterKey],
        shards: u16,
        members: Vec<(u64, String)>,
    ) -> Self {
        Self {
            authority_pem: authority.pem.clone(),
            authority_key_pem: authority.key_pem().to_owned(),
            pepper: hex(&keys.pepper),
            masters: masters.iter().map(|key| hex(key.bytes())).collect(),
            signing: hex(&keys.signing),
            gossip: hex(&keys.gossip),
            shards,
            members,
        }
    }
}

/// Redeems a token and makes `data` the folder of a node of that cluster.
pub async fn join(
    data: &Path,
    token: &Token,
    address: &str,
    mut facts: NodeFacts,
) -> anyhow::Result<NodeIdentity> {
    anyhow::ensure!(
        NodeIdentity::read(data)?.is_none(),
        "{} belongs to a node already; join with an empty folder",
        data.display()
    );
    let mut identity = NodeIdentity::new(0, false);
    identity.peer_address.clone_from(&facts.peer_address);
    (facts.id, facts.raft_id) = (identity.node_id, identity.raft_id);
    let secret = URL_SAFE_NO_PAD.encode(token.secret);
    let request = serde_json::to_vec(&JoinRequest { secret, facts })?;
    let once = Once { tls: tls::joining(token.authority), from: None, to: None };
    let path = cluster::peer::server::JOIN_PATH;
    let answer = once.call(address, path, Bytes::from(request), ANSWER_WITHIN).await;
    let body = heard(answer, address, "did not take the token")?;
    let reply: JoinReply = serde_json::from_slice(&body).context("its answer can't be read")?;
    let folder = data.join("keys");
    let masters = told_masters(&reply.masters)?;
    Keys {
        pepper: keys::parse(&reply.pepper)?,
        masters,
        signing: keys::parse(&reply.signing)?,
        gossip: keys::parse(&reply.gossip)?,
    }
    .write(&folder)?;
    Authority::told(reply.authority_pem, reply.authority_key_pem).write(&folder)?;
    identity.shards = reply.shards;
    identity.seeds = reply.members;
    // The identity comes last: where it is, everything is.
    identity.write(data)?;
    Ok(identity)
}

/// The master keys of the cluster that is joined.
fn told_masters(told: &[String]) -> anyhow::Result<Vec<MasterKey>> {
    let told: anyhow::Result<Vec<MasterKey>> =
        told.iter().map(|key| keys::parse(key).map(MasterKey::new)).collect();
    let (told, own) = (told?, keys::masters_of_environment()?);
    match own {
        None if told.is_empty() => bail!(
            "the nodes of this cluster have their master key from {0}; set {0} here, too",
            keys::MASTER_KEY
        ),
        None => Ok(told),
        Some(own) if told.iter().all(|key| own.contains(key)) => Ok(own),
        Some(_) => bail!("{} is not the master key of this cluster", keys::MASTER_KEY),
    }
}

/// Makes a node anew whose folder can't be trusted any more: it is taken out under its old number, what is
/// left of its folder is put aside, and an empty one joins. Gives where the old one is.
pub async fn rejoin(
    data: &Path,
    address: &str,
    facts: NodeFacts,
) -> anyhow::Result<std::path::PathBuf> {
    let identity = NodeIdentity::read(data)?
        .with_context(|| format!("{} belongs to no node", data.display()))?;
    let keys = data.join("keys");
    let tls = Authority::open(&keys)?.peer_identity(&keys, identity.raft_id)?.client()?;
    let stranger = Stranger { tls, raft_id: identity.raft_id };
    let token = stranger.token(address).await?;
    // The last one that this certificate is good for.
    for to in [NodeStatus::Dead, NodeStatus::Removed] {
        stranger.ask(address, &Operation::Set { node: Some(identity.node_id), to }).await?;
    }
    let aside = data.with_extension(format!("{}.damaged", identity.node_id));
    std::fs::rename(data, &aside)?;
    join(data, &token, address, facts).await?;
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_as_it_was_written_and_nothing_else_does() {
        let token = Token { secret: [7; 24], authority: [9; 32] };
        let text = token.to_string();
        assert_eq!(text.parse::<Token>().expect("a token"), token);
        let secret = text.split('.').nth(1).expect("a secret");
        assert_eq!(Token::hash_of(secret), Some(token.hash()));
        for wrong in ["", "roost-join-1", &text[..text.len() - 4], &text.replace("-1.", "-2.")] {
            assert!(wrong.parse::<Token>().is_err(), "{wrong}");
        }
        assert_eq!(Token::hash_of("short"), None);
    }
}
