//! What may be asked of the service, whoever asks: the one door between the interface and the
//! actors. A call is checked against the caller's tenant, carried out where its subject lives, and
//! answered with plain records.

mod agents;
pub mod auditing;
mod consistency;
pub(crate) mod invoke;
mod jobs;
mod observe;
mod queued;
mod records;
mod sessions;
pub mod uploads;
mod walk;
mod webhooks;

use std::sync::Arc;

use domain::{
    OrgId, Rejection,
    directory::{self, Directory},
    idempotency::Keyed,
};

pub use consistency::Consistency;
pub use invoke::{Finished, Invoked};
pub use jobs::{JobFilter, JobTexts, JobsWanted, NewJob};
pub use observe::{AgentFigures, MetricsRange};
pub use queued::Queues;
pub use records::{AuditWanted, DeliveriesWanted, EventsWanted, Records, RecordsWanted};
pub use webhooks::Recovery;

use crate::{
    invocation::CallError,
    payload::PayloadError,
    ports::{BlobError, ProposeError},
    replica::Replica,
    seal::Sealer,
    world::World,
};

/// The door.
#[derive(Clone)]
pub struct Service {
    /// Everything there is.
    pub world: Arc<World>,
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The rules say no.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// The log did not agree, or not in time.
    #[error(transparent)]
    Ledger(ProposeError),
    /// The agent did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
    /// An earlier, equal call failed after it had reached the agent.
    #[error("{}", .0.message)]
    Kept(domain::job::JobError),
    /// The bytes could not be kept.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// A node that has what was asked for does not answer.
    #[error("the part of the cluster that has this does not answer; retry in a moment")]
    Elsewhere,
    /// What fits lies behind too much that does not.
    #[error(
        "too many rows lie before the next that fit; ask for less with since and until, or for more with fewer filters"
    )]
    TooLong,
    /// Bytes that were kept can't be read.
    #[error(transparent)]
    Payload(#[from] PayloadError),
}

impl From<ProposeError> for ServiceError {
    fn from(error: ProposeError) -> Self {
        match error {
            ProposeError::Rejected(reason) => Self::Rejected(reason),
            other @ (ProposeError::Unavailable | ProposeError::Unknown) => Self::Ledger(other),
        }
    }
}

/// An answer, and whether an earlier, equal call had got it.
#[derive(Clone, Debug)]
pub struct Answered<T> {
    /// The answer.
    pub value: T,
    /// Whether it is the stored one.
    pub replayed: bool,
}

impl Service {
    /// The directory with every change acknowledged so far, unless the call takes a stale one.
    pub async fn directory(&self) -> Result<&Replica<Directory>, ServiceError> {
        self.freshen_directory().await?;
        Ok(self.world.directory())
    }

    /// What an organization's secrets are sealed with.
    pub async fn sealer(&self, org: OrgId) -> Result<Arc<Sealer>, ServiceError> {
        Ok(self.world.sealer(org).await?)
    }

    /// Whether a change of the directory came before under this key: what it needed then may be gone.
    pub async fn is_repeat(&self, key: Option<&Keyed>) -> Result<bool, ServiceError> {
        let Some(key) = key else { return Ok(false) };
        let directory = self.directory().await?.read();
        Ok(directory.keys.knows(key, self.world.now()))
    }

    /// A change of the directory.
    pub async fn change(
        &self,
        command: directory::Command,
        key: Option<Keyed>,
    ) -> Result<Answered<directory::Reply>, ServiceError> {
        let audit = auditing::take();
        let answer = self.world.ask_audited(command, key, audit.clone()).await;
        if !answer.as_ref().is_ok_and(|answer| answer.result.is_ok() && !answer.replayed) {
            auditing::put_back(audit);
        }
        let answer = answer?;
        Ok(Answered { value: answer.result?, replayed: answer.replayed })
    }
}
