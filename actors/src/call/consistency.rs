//! How fresh a read must be. A linearizable one asks the leader how far it has to be and waits until
//! this node is there; a stale one answers at once with what this node has, so it is served without a
//! majority too, and the caller hears how old it may be.

use super::{Service, ServiceError};

tokio::task_local! {
    static OF_THIS_CALL: Consistency;
}

/// How fresh the reads of one call must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consistency {
    /// They hold every change that was acknowledged before the call.
    #[default]
    Linearizable,
    /// They hold what this node has. What only other nodes have is asked for as ever.
    Stale,
}

impl Consistency {
    /// Carries a call out with reads like this.
    pub async fn scope<F: Future>(self, call: F) -> F::Output {
        OF_THIS_CALL.scope(self, call).await
    }

    fn of_this_call() -> Self {
        OF_THIS_CALL.try_get().unwrap_or_default()
    }
}

impl Service {
    /// Waits until the directory here is as fresh as this call asks.
    pub(super) async fn freshen_directory(&self) -> Result<(), ServiceError> {
        match Consistency::of_this_call() {
            Consistency::Linearizable => Ok(self.world.ports.ledger.refresh_directory().await?),
            Consistency::Stale => Ok(()),
        }
    }

    /// Waits until a shard of this node is as fresh as this call asks.
    pub(super) async fn freshen_shard(&self, shard: u16) -> Result<(), ServiceError> {
        match Consistency::of_this_call() {
            Consistency::Linearizable => Ok(self.world.ports.ledger.refresh_shard(shard).await?),
            Consistency::Stale => Ok(()),
        }
    }
}
