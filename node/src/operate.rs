//! The operator's side of the peer port: a command on the machine of a node asks that node, with the
//! certificate of its own folder.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use cluster::peer::{
    Class,
    book::AddressBook,
    client::{CallError, PeerClient},
};
use serde_json::Value;

use crate::{
    adapters::authority::Authority,
    host::{OPERATE_PATH, Operation},
    identity::NodeIdentity,
};

/// How long a node may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Asks the node of a folder.
pub async fn ask(data: &Path, operation: &Operation) -> anyhow::Result<Value> {
    let identity = NodeIdentity::read(data)?.with_context(|| {
        format!("{} belongs to no node; name its folder with --data", data.display())
    })?;
    let keys = data.join("keys");
    let authority = Authority::open(&keys)?;
    let book = Arc::new(AddressBook::default());
    book.put(identity.raft_id, &identity.peer_address);
    let tls = authority.peer_identity(&keys, identity.raft_id)?.client()?;
    let client = PeerClient::new(tls, identity.raft_id, book);
    let request = Bytes::from(serde_json::to_vec(operation)?);
    let answer =
        client.call(identity.raft_id, Class::Calls, OPERATE_PATH, request, ANSWER_WITHIN).await;
    match answer {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(CallError::Said(reason)) => bail!("{reason}"),
        Err(error @ CallError::Unreached(_)) => {
            Err(error).with_context(|| format!("the node of {} does not run", data.display()))
        }
        Err(error) => Err(error.into()),
    }
}
