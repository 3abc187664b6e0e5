//! From the outboxes to everybody who is to hear of it: the organization's event log, and every
//! webhook that listens.
//!
//! The leader of each group carries what waits there, oldest first. Each step is harmless to repeat:
//! the log keeps an event once, a webhook has it in line once, and only then is it marked as told. So
//! an event arrives at least once in transit and once in effect, whichever nodes die meanwhile.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use domain::{
    OrgId, WebhookId,
    directory::Command as DirectoryCommand,
    machine::Claim,
    outbox::{Occurrence, SERVICE},
    planted::{self, Bug},
    shard::Command,
    webhook::delivery::Cause,
};
use tokio::sync::Notify;

use crate::{ports::ProposeError, world::World};

/// Events carried at once.
const CARRIED_AT_ONCE: usize = 256;
/// Between looks when nothing is heard of.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// After a step that failed.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Most shards that a cluster has.
const SHARDS_MAX: usize = 256;

/// Wakes the relay of each group: the directory's, then the shards'.
pub struct Bells(Vec<Notify>);

impl Default for Bells {
    fn default() -> Self {
        Self((0..=SHARDS_MAX).map(|_| Notify::new()).collect())
    }
}

impl Bells {
    /// Something may be in a shard's outbox; in the directory's without one.
    pub fn ring(&self, shard: Option<u16>) {
        self.of(shard.map_or(Group::Directory, Group::Shard)).notify_one();
    }

    fn of(&self, group: Group) -> &Notify {
        let place = match group {
            Group::Directory => 0,
            Group::Shard(shard) => usize::from(shard) + 1,
        };
        &self.0[place.min(SHARDS_MAX)]
    }
}

/// Whose outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Directory,
    Shard(u16),
}

impl World {
    /// Carries what waits in the outboxes of the groups led here, for as long as the node runs.
    ///
    /// Each group has a task of its own: one whose receivers do not answer holds up no other.
    pub async fn relay(self: Arc<Self>) {
        let shards = (0..self.ports.ledger.shards()).map(Group::Shard);
        let groups = [Group::Directory].into_iter().chain(shards);
        let tasks = groups.map(|group| Arc::clone(&self).relay_of(group));
        futures::future::join_all(tasks).await;
    }

    async fn relay_of(self: Arc<Self>, group: Group) {
        loop {
            let carried = match self.claim_to(group) {
                Some(claim) => self.carry(group, claim).await,
                None => Ok(0),
            };
            match carried {
                Ok(CARRIED_AT_ONCE) => {}
                Ok(_) => {
                    let bell = self.watch.bells.of(group).notified();
                    let _ = tokio::time::timeout(LOOK_EVERY, bell).await;
                }
                Err(error) => {
                    tracing::debug!(?group, %error, "events are not told yet");
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
    }

    /// In whose name a group's outbox is carried. The directory's goes with the first shard.
    fn claim_to(&self, group: Group) -> Option<Claim> {
        match group {
            Group::Directory => self.claim(0),
            Group::Shard(shard) => self.claim(shard),
        }
    }

    fn waiting(&self, group: Group) -> Vec<(u64, Occurrence)> {
        let mut waiting = match group {
            Group::Directory => self.directory().read().outbox.oldest(CARRIED_AT_ONCE),
            Group::Shard(shard) => {
                self.ports.ledger.shard(shard).read().outbox.oldest(CARRIED_AT_ONCE)
            }
        };
        for (_, event) in &mut waiting {
            event.data = event.data.replace(SERVICE, &self.settings.public_url);
        }
        waiting
    }

    /// Carries some of what waits in one outbox; says how many.
    async fn carry(self: &Arc<Self>, group: Group, claim: Claim) -> Result<usize, ProposeError> {
        let waiting = self.waiting(group);
        let Some(up_to) = waiting.last().map(|(number, _)| *number) else { return Ok(0) };
        // A webhook whose creation was acknowledged before any of these happened is seen now.
        self.ports.ledger.refresh_directory().await?;
        let mut events: Vec<Occurrence> = waiting.into_iter().map(|(_, event)| event).collect();
        if planted::has(Bug::EventLost) {
            events.pop();
        }
        let kept = self.keep_events(&events);
        futures::future::try_join(kept, self.hand_over(self.heard(&events))).await?;
        match group {
            Group::Directory => {
                self.report(claim, DirectoryCommand::Told { up_to }).await?;
            }
            Group::Shard(shard) => {
                let told = Command::Told { up_to };
                self.ask_shard(shard, told, None, Some(claim)).await?.result?;
            }
        }
        Ok(events.len())
    }

    /// Who is to hear of what.
    fn heard(&self, events: &[Occurrence]) -> Vec<(WebhookId, Occurrence)> {
        let directory = self.directory().read();
        if directory.webhooks.is_empty() {
            return vec![];
        }
        let mut heard = vec![];
        for event in events {
            let hooks = directory.webhooks.rows().filter(|(_, hook)| hook.hears(event));
            // A webhook does not hear of its own end.
            let hooks = hooks.filter(|(id, _)| !event.data.contains(&format!("\"{id}\"")));
            heard.extend(hooks.map(|(id, _)| (*id, event.clone())));
        }
        heard
    }

    /// What goes into whose log. A webhook that is off may ask for it later.
    fn to_keep(&self, events: &[Occurrence]) -> BTreeMap<OrgId, Vec<Occurrence>> {
        let directory = self.directory().read();
        let is_selected =
            |event: &Occurrence| directory.webhooks.rows().any(|(_, hook)| hook.selects(event));
        let mut by_org: BTreeMap<OrgId, Vec<Occurrence>> = BTreeMap::new();
        for event in events {
            if event.kind.is_kept_unheard() || is_selected(event) {
                by_org.entry(event.tenant.org).or_default().push(event.clone());
            }
        }
        by_org
    }

    async fn keep_events(self: &Arc<Self>, events: &[Occurrence]) -> Result<(), ProposeError> {
        for (org, events) in self.to_keep(events) {
            let command = Command::KeepEvents(events);
            self.ask_shard(self.home_of(org), command, None, None).await?.result?;
        }
        Ok(())
    }

    async fn hand_over(
        self: &Arc<Self>,
        heard: Vec<(WebhookId, Occurrence)>,
    ) -> Result<(), ProposeError> {
        let mut by_shard: BTreeMap<u16, Vec<(WebhookId, Occurrence)>> = BTreeMap::new();
        for (webhook, event) in heard {
            by_shard.entry(self.home_of(webhook)).or_default().push((webhook, event));
        }
        for (shard, wanted) in by_shard {
            let command = Command::Enqueue { wanted, cause: Cause::Schedule };
            self.ask_shard(shard, command, None, None).await?.result?;
        }
        Ok(())
    }
}
