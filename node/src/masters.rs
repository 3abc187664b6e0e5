//! The master key, and how it is changed while everything runs: first every member has the new one, then
//! all data keys are sealed with it in one entry of the log, then the old one is forgotten. At any moment
//! a node that stops and comes back has the key that it needs.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, PoisonError},
    time::Duration,
};

use actors::{
    ports::Ledger as _,
    seal::{Keychain, MasterKey},
    world::World,
};
use anyhow::ensure;
use cluster::RaftLedger;
use domain::{NodeId, Rejection, data_key::MasterKeyId, directory::Command};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::{
    adapters::{peers::NodePeers, system::random_bytes},
    hex,
    host::{NodeHost, Operation},
    keys::{self, MASTER_KEY},
};

/// Between looks whether a master key is of no use any more.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often data keys are sealed anew while members and organizations come.
const TRIES_MAX: usize = 5;

/// What a node is told of a master key.
#[derive(Clone, Serialize, Deserialize)]
pub struct Told {
    id: MasterKeyId,
    /// The key, unless every node has it from its environment.
    key: Option<String>,
}

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "master key {}", hex(&self.id))
    }
}

/// The master keys of this node: where they are, and whom to tell of another one.
pub struct Masters {
    folder: PathBuf,
    is_from_environment: bool,
    peers: Arc<NodePeers>,
    /// One change at a time.
    turning: Mutex<()>,
    /// One change of this node's keys at a time.
    writing: std::sync::Mutex<()>,
}

impl Masters {
    /// Those of the environment, or else of this folder.
    pub fn new(folder: PathBuf, peers: Arc<NodePeers>) -> anyhow::Result<Arc<Self>> {
        let is_from_environment = keys::masters_of_environment()?.is_some();
        let (turning, writing) = Default::default();
        Ok(Arc::new(Self { folder, is_from_environment, peers, turning, writing }))
    }

    /// What a node that joins is told.
    pub fn told(&self, keychain: &Keychain) -> Vec<MasterKey> {
        if self.is_from_environment { vec![] } else { keychain.masters() }
    }

    /// Keeps a master key for later, as the newest; on return it is durable here.
    pub fn learn(&self, keychain: &Keychain, told: &Told) -> Result<Value, String> {
        let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_from_environment {
            let known = keychain.master(told.id).map(|_| json!({}));
            return known.ok_or_else(|| format!("the new master key is not in its {MASTER_KEY}"));
        }
        let text =
            told.key.as_ref().ok_or("its master key is in a file, not in its environment")?;
        let key = keys::parse(text).map(MasterKey::new).map_err(|error| error.to_string())?;
        let mut masters = keychain.masters();
        // One that was told of before is not to be forgotten with older ones.
        masters.retain(|known| *known != key);
        masters.push(key);
        keys::write_masters(&self.folder, &masters).map_err(|error| error.to_string())?;
        keychain.set_masters(masters);
        Ok(json!({}))
    }

    /// Those after the one in use are kept: they may be about to be used.
    fn forget_before(&self, keychain: &Keychain, current: MasterKeyId) -> std::io::Result<()> {
        let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut masters = keychain.masters();
        let place = masters.iter().position(|key| key.id() == current);
        let Some(place) = place.filter(|place| *place > 0) else { return Ok(()) };
        masters.drain(..place);
        keys::write_masters(&self.folder, &masters)?;
        keychain.set_masters(masters);
        Ok(())
    }

    /// The key to change to.
    fn next(&self, keychain: &Keychain, current: MasterKeyId) -> Result<MasterKey, String> {
        if !self.is_from_environment {
            return Ok(MasterKey::new(random_bytes::<32>()));
        }
        let first = keychain.masters().into_iter().next();
        first.filter(|key| key.id() != current).ok_or_else(|| {
            format!(
                "{MASTER_KEY} begins with the key that is in use; set it to NEW,OLD on every node, \
                 restart one after the other, then ask again"
            )
        })
    }

    fn tell(&self, key: &MasterKey) -> Told {
        let text = (!self.is_from_environment).then(|| hex(key.bytes()));
        Told { id: key.id(), key: text }
    }
}

/// A node without the master key in use could open nothing: it does not start.
pub fn check(ledger: &RaftLedger, masters: &[MasterKey]) -> anyhow::Result<()> {
    let current = ledger.directory().read().master_key();
    ensure!(
        current.is_none_or(|current| masters.iter().any(|key| key.id() == current)),
        "this node lacks the master key of its cluster ({}); it belongs into {MASTER_KEY} or keys/master.key",
        hex(&current.unwrap_or_default())
    );
    Ok(())
}

/// Changes the master key.
pub async fn rotate(host: &NodeHost) -> Result<Value, String> {
    let world = &host.world;
    let Ok(_turn) = host.masters.turning.try_lock() else {
        return Err("the master key is being changed already".to_owned());
    };
    let refreshed = || async { world.ports.ledger.refresh_directory().await };
    refreshed().await.map_err(|error| error.to_string())?;
    let current = || {
        let current = world.directory().read().master_key();
        current.ok_or("nothing is sealed yet; ask again in a moment")
    };
    let key = host.masters.next(&world.keychain, current()?)?;
    for _ in 0..TRIES_MAX {
        let from = current()?;
        let known_by = tell_members(host, &key).await?;
        let sealed = world.sealed_anew(&key).map_err(|error| error.to_string())?;
        let data_keys = sealed.len();
        let command = Command::TurnMasterKey { from, to: key.id(), known_by, sealed };
        let answer = world.ask(command, None).await.map_err(|error| error.to_string())?;
        match answer.result {
            Ok(_) => {
                return Ok(json!({ "data_keys": data_keys, "master_key": hex(&key.id()) }));
            }
            // An organization, a member or another master key has come meanwhile.
            Err(Rejection::StaleObject) => refreshed().await.map_err(|error| error.to_string())?,
            Err(reason) => return Err(reason.to_string()),
        }
    }
    Err("members or organizations keep coming; ask again when it is quieter".to_owned())
}

/// Every node that may come back keeps the key, or nothing is changed.
async fn tell_members(host: &NodeHost, key: &MasterKey) -> Result<Vec<NodeId>, String> {
    let told = host.masters.tell(key);
    let members = host.world.directory().read().holders_of_keys();
    for id in &members {
        if *id == host.world.node_id {
            host.masters.learn(&host.world.keychain, &told)?;
            continue;
        }
        let learn = Operation::LearnMasterKey(told.clone());
        host.masters.peers.operate(*id, &learn).await.map_err(|error| {
            format!(
                "{id} did not take the new master key ({error}); nothing is changed: bring it back or \
                 remove it, then ask again"
            )
        })?;
    }
    Ok(members)
}

/// Forgets master keys that nothing is sealed with any more, for as long as the node runs.
pub async fn forget_old(masters: Arc<Masters>, world: Arc<World>) {
    // Those of the environment are the operator's to forget.
    if masters.is_from_environment {
        return;
    }
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(current) = world.directory().read().master_key() else { continue };
        if let Err(error) = masters.forget_before(&world.keychain, current) {
            tracing::error!(%error, "the old master key could not be forgotten");
        }
    }
}
