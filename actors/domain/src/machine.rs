//! What a replicated machine is, and the one door through which it changes.
//!
//! `decide` reads and answers with events; `evolve` writes what the events say. Keeping them apart
//! means a refused command cannot leave half a change behind. Around both sits the idempotency
//! wrapper: an entry that carries a key is answered from the key's row when it comes again.

use std::sync::Arc;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Rejection, Timestamp,
    audit::Audited,
    idempotency::{self, Keyed, Keys, Seen},
    outbox::{Happening, Outbox},
    planted::{self, Bug},
    table::AnyTable,
};

/// One line of a replicated log. Whatever `decide` needs and the state does not hold is minted by
/// the proposer and travels here, so that every replica computes the same answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry<C> {
    /// The proposer's clock.
    pub at: Timestamp,
    /// In whose name an actor proposes; a call of a client carries none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
    /// Makes repeating the entry harmless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Keyed>,
    /// Who does it, for the audit log: kept with the change itself, so that neither is without the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<Arc<Audited>>,
    /// Who waits for the answer: the proposer finds it where its own replica gives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// What shall be done.
    pub command: C,
}

/// Names a proposal among those of all nodes: a node, and a number that this node gives once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Origin(pub u64, pub u64);

impl<C> Entry<C> {
    /// A command in nobody's name: no claim, no key, no row of the audit log.
    pub fn new(at: Timestamp, command: C) -> Self {
        Self { at, claim: None, key: None, audit: None, origin: None, command }
    }
}

/// The right of a shard's leader to act: refused where a later term was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The shard that is led.
    pub shard: u16,
    /// The Raft term of that leadership.
    pub term: u64,
}

/// What a proposer hears once its entry is applied.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer<R> {
    /// The reply, or why not.
    pub result: Result<R, Rejection>,
    /// Whether this is the stored answer of an earlier, equal call.
    pub replayed: bool,
}

/// A deterministic state machine over tables.
pub trait Machine: Default + Send + Sync + 'static {
    /// What may be asked of it.
    type Command: Clone + std::fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static;
    /// What a granted command is answered with.
    type Reply: Clone + std::fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static;
    /// What happened.
    type Event: Clone + std::fmt::Debug + Send + Sync + 'static;

    /// Reads, and answers with what is to happen.
    fn decide(&self, entry: &Entry<Self::Command>) -> Result<Vec<Self::Event>, Rejection>;
    /// Writes what happened.
    fn evolve(&mut self, event: &Self::Event);
    /// The reply to a command that was just carried out.
    fn reply(&self, command: &Self::Command) -> Self::Reply;
    /// What clients are told of this, seen before it takes effect.
    fn happenings(&self, event: &Self::Event) -> Vec<Happening>;
    /// What waits to be told.
    fn outbox(&mut self) -> &mut Outbox;
    /// Keeps the row of a change that was granted.
    fn audited(&mut self, row: &Arc<Audited>);
    /// The rows of idempotency keys.
    fn keys(&mut self) -> &mut Keys;
    /// All tables, for the writer and for snapshots.
    fn tables(&mut self) -> Vec<&mut dyn AnyTable>;
    /// Rebuilds what is derived from tables, after they were loaded.
    fn reindex(&mut self);
}

/// Applies one agreed entry: all of its events, or none.
pub fn apply<M: Machine>(
    machine: &mut M,
    entry: &Entry<M::Command>,
) -> (Answer<M::Reply>, Vec<M::Event>) {
    if let Some(key) = &entry.key {
        match machine.keys().seen::<M::Reply>(key, entry.at) {
            Seen::Never => {}
            Seen::Answered(result) => return (Answer { result, replayed: true }, vec![]),
            Seen::Refused(reason) => return (fresh(Err(reason)), vec![]),
        }
    }
    let decided = machine.decide(entry);
    let (result, events) = match decided {
        Ok(events) => {
            for event in &events {
                let told = machine.happenings(event);
                machine.evolve(event);
                told.into_iter().for_each(|one| machine.outbox().push(one, entry.at));
            }
            if let Some(row) = &entry.audit {
                machine.audited(row);
            }
            (Ok(machine.reply(&entry.command)), events)
        }
        Err(reason) => (Err(reason), vec![]),
    };
    if let Some(key) = &entry.key
        && idempotency::is_kept(&result)
        && !planted::has(Bug::ReplyForgotten)
    {
        machine.keys().answered(key, entry.at, &result);
    }
    (fresh(result), events)
}

fn fresh<R>(result: Result<R, Rejection>) -> Answer<R> {
    Answer { result, replayed: false }
}
