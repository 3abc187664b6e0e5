//! Envelope encryption: secrets are sealed with their organization's data key, and data keys with the
//! master key, which no table holds. Another master key means that only the data keys are sealed anew;
//! they are committed together, so that no reader ever meets a mixture.

use serde::{Deserialize, Serialize};

use crate::{
    NodeId, OrgId, Rejection, Timestamp, directory::Directory, event::DirectoryEvent as Event,
    node::NodeStatus,
};

/// Whose data key seals what belongs to no organization: keys of gossip and of access tokens.
pub const OF_CLUSTER: OrgId = OrgId(0);

/// Tells a master key from others, and nothing of what it is: the first bytes of its SHA-256.
pub type MasterKeyId = [u8; 8];

/// A data key, sealed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataKey {
    /// The 32 bytes as 64 hexadecimal digits, sealed with the master key for [`place`].
    #[serde(with = "serde_bytes")]
    pub sealed: Vec<u8>,
    /// The master key that it is sealed with.
    pub master: MasterKeyId,
    /// When it was made.
    pub created_at: Timestamp,
}

/// The place that an owner's data key is sealed for.
pub fn place(owner: OrgId) -> String {
    format!("{owner}/data.key")
}

impl Directory {
    /// Who must have a new master key before it is used: every node that may come back, dead ones included.
    pub fn holders_of_keys(&self) -> Vec<NodeId> {
        let kept = self.nodes.rows().filter(|(_, node)| node.status != NodeStatus::Removed);
        kept.map(|(id, _)| *id).collect()
    }

    /// The master key that data keys are sealed with; `None` before the first of them.
    pub fn master_key(&self) -> Option<MasterKeyId> {
        self.data_keys.rows().next().map(|(_, row)| row.master)
    }
}

/// The first one stays: whoever comes second uses that one.
pub(crate) fn keep(
    state: &Directory,
    owner: OrgId,
    key: &DataKey,
) -> Result<Vec<Event>, Rejection> {
    if state.data_keys.contains(&owner) {
        return Ok(vec![]);
    }
    if state.master_key().is_some_and(|master| master != key.master) {
        return Err(Rejection::StaleObject);
    }
    Ok(vec![Event::DataKeyPut { owner, key: Box::new(key.clone()) }])
}

/// All data keys at once, none left out, and only if every member has the new master key. Of two changes at
/// once the second finds another master key than it began with.
pub(crate) fn turn_master(
    state: &Directory,
    (from, to): (MasterKeyId, MasterKeyId),
    known_by: &[NodeId],
    sealed: &[(OrgId, Vec<u8>)],
) -> Result<Vec<Event>, Rejection> {
    let is_whole = state.data_keys.rows().map(|(owner, _)| owner).eq(sealed.iter().map(|(o, _)| o));
    let knows = state.holders_of_keys().iter().all(|id| known_by.contains(id));
    if state.master_key() != Some(from) || !is_whole || !knows {
        return Err(Rejection::StaleObject);
    }
    let anew = state.data_keys.rows().zip(sealed).map(|((owner, row), (_, sealed))| {
        let key = DataKey { sealed: sealed.clone(), master: to, created_at: row.created_at };
        Event::DataKeyPut { owner: *owner, key: Box::new(key) }
    });
    Ok(anew.collect())
}
