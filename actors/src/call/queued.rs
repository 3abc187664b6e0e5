//! How many jobs of an organization wait: its tier bounds them, on all shards together. What is in shards
//! of other nodes alone is asked for once a second, so an organization may be over by what was accepted
//! meanwhile.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
    time::Duration,
};

use domain::{NodeId, Rejection, Timestamp, account::Tenant, idempotency::Keyed};

use super::{Service, ServiceError};
use crate::{
    ask::{Ask, Told},
    root::lock,
    world::World,
};

/// How long an answer of others is good.
const GOOD_FOR: Duration = Duration::from_secs(1);
/// How long another node may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// Tenants remembered at most.
const TENANTS_MAX: usize = 10_000;

/// What others said last.
#[derive(Default)]
pub struct Queues(Mutex<HashMap<Tenant, (Timestamp, u64)>>);

impl World {
    /// Jobs of a tenant that wait in these shards of this node.
    pub(crate) fn queued_here(&self, shards: &[u16], tenant: Tenant) -> u64 {
        let ledger = &self.ports.ledger;
        let here = shards.iter().filter(|shard| **shard < ledger.shards());
        here.map(|shard| ledger.shard(*shard).read().queued(tenant)).sum()
    }

    async fn queued_elsewhere(&self, shards: Vec<u16>, tenant: Tenant) -> u64 {
        if shards.is_empty() {
            return 0;
        }
        let known = lock(&self.queues.0).get(&tenant).copied();
        if let Some((at, count)) = known
            && self.now().since(at) < GOOD_FOR
        {
            return count;
        }
        let mut by_owner: BTreeMap<NodeId, Vec<u16>> = BTreeMap::new();
        for shard in shards {
            if let Some(owner) = self.owner(shard) {
                by_owner.entry(owner).or_default().push(shard);
            }
        }
        let asked = by_owner.into_iter().map(async |(owner, shards)| {
            match self.ask_other(owner, Ask::Queued { shards, tenant }, ANSWER_WITHIN).await {
                Ok(Told::Queued(count)) => count,
                // Who does not answer accepts nothing, either.
                Ok(_) | Err(_) => 0,
            }
        });
        let count = futures::future::join_all(asked).await.into_iter().sum();
        let mut known = lock(&self.queues.0);
        if known.len() >= TENANTS_MAX {
            known.clear();
        }
        known.insert(tenant, (self.now(), count));
        count
    }
}

impl Service {
    /// Whether one more job of a tenant may wait. A repetition of a call that was accepted may.
    pub(super) async fn check_queue(
        &self,
        tenant: Tenant,
        shard: u16,
        key: Option<&Keyed>,
    ) -> Result<(), ServiceError> {
        let world = &self.world;
        if !world.settings.rates.enabled {
            return Ok(());
        }
        let max = world.directory().read().tier(tenant.org).queued_jobs_max();
        let ledger = &world.ports.ledger;
        let (here, elsewhere): (Vec<u16>, Vec<u16>) =
            (0..ledger.shards()).partition(|shard| ledger.has_shard(*shard));
        let queued =
            world.queued_here(&here, tenant) + world.queued_elsewhere(elsewhere, tenant).await;
        if queued < max || self.was_seen(shard, key).await? {
            return Ok(());
        }
        Err(Rejection::TooManyQueued { max }.into())
    }
}
