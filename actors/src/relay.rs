//! From the outboxes to everybody who is to hear of it: the organization's event log, every webhook that
//! listens, and the audit log.
//!
//! The leader of each group carries what waits there, oldest first. Each step is harmless to repeat:
//! the log keeps an event once, a webhook has it in line once, and only then is it marked as told. So
//! an event arrives at least once in transit and once in effect, whichever nodes die meanwhile. What is for a
//! shard that does not answer stays where it is; everything else passes it by.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use domain::{
    WebhookId, audit,
    directory::{Command as DirectoryCommand, Directory},
    outbox::{Item, Occurrence, SERVICE, Waiting},
    planted::{self, Bug},
    shard::Command,
    webhook::delivery::Cause,
};
use tokio::{sync::Notify, time::Instant};

use crate::{ports::ProposeError, world::World};

/// Events carried at once, and rows of the audit log.
const CARRIED_AT_ONCE: usize = 256;
/// Least time between two looks at an outbox that was emptied, where there is no webhook that waits for it: what
/// comes meanwhile is carried together.
const CARRY_EVERY: Duration = Duration::from_millis(50);
/// Between looks when nothing is heard of.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a shard may take to write down what it is given.
const WRITTEN_WITHIN: Duration = Duration::from_secs(2);
/// How long a shard that did not answer is let alone.
const LET_ALONE_FOR: Duration = Duration::from_millis(500);
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
        let mut silent = Silent::default();
        loop {
            let began = Instant::now();
            let carried = match self.carries(group) {
                true => self.carry(group, &mut silent).await,
                false => Ok(false),
            };
            match carried {
                Ok(true) => {}
                Ok(false) => {
                    let bell = self.watch.bells.of(group).notified();
                    let _ = tokio::time::timeout(silent.soonest(), bell).await;
                    if self.directory().read().webhooks.rows().next().is_none() {
                        tokio::time::sleep_until(began + CARRY_EVERY).await;
                    }
                }
                Err(error) => {
                    tracing::debug!(?group, %error, "events are not told yet");
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
    }

    /// Whether this node carries a group's outbox: who leads the group does, and two at once would do no harm.
    fn carries(&self, group: Group) -> bool {
        match group {
            Group::Directory => self.ports.ledger.leads_directory(),
            Group::Shard(shard) => self.claim(shard).is_some(),
        }
    }

    fn waiting(&self, group: Group, silent: &Silent) -> Waiting {
        let directory = self.directory().read();
        let stays =
            |item: Item<'_>| !silent.is_empty() && silent.any(&self.homes(&directory, item));
        let mut waiting = match group {
            Group::Directory => directory.outbox.oldest(CARRIED_AT_ONCE, stays),
            Group::Shard(shard) => {
                self.ports.ledger.shard(shard).read().outbox.oldest(CARRIED_AT_ONCE, stays)
            }
        };
        for (_, event) in &mut waiting.events {
            if event.data.contains(SERVICE) {
                let event = Arc::make_mut(event);
                event.data = event.data.replace(SERVICE, &self.settings.public_url);
            }
        }
        waiting
    }

    /// Carries some of what waits in one outbox; says whether there may be more.
    async fn carry(
        self: &Arc<Self>,
        group: Group,
        silent: &mut Silent,
    ) -> Result<bool, ProposeError> {
        silent.forget_old();
        let mut waiting = self.waiting(group, silent);
        let Some(up_to) = waiting.up_to else { return Ok(false) };
        // A webhook whose creation was acknowledged before any of these happened is seen now.
        self.ports.ledger.refresh_directory().await?;
        if planted::has(Bug::EventLost) {
            waiting.events.pop();
        }
        let Load { parcels, homes } = self.load(&waiting);
        let failed = self.hand_over(parcels).await;
        let is_all = failed.is_empty() && silent.is_empty();
        silent.note(&failed);
        if is_all {
            self.tell(group, Told::UpTo(up_to)).await?;
            return Ok(waiting.has_more);
        }
        let arrived = homes.into_iter().filter(|(_, homes)| homes.is_disjoint(&failed));
        let numbers: Vec<u64> = arrived.map(|(number, _)| number).collect();
        if !numbers.is_empty() {
            self.tell(group, Told::Of(numbers)).await?;
        }
        Ok(true)
    }

    async fn tell(self: &Arc<Self>, group: Group, told: Told) -> Result<(), ProposeError> {
        match group {
            Group::Directory => {
                let command = match told {
                    Told::UpTo(up_to) => DirectoryCommand::Told { up_to },
                    Told::Of(numbers) => DirectoryCommand::ToldOf { numbers },
                };
                self.ask(command, None).await?.result?;
            }
            Group::Shard(shard) => {
                let command = match told {
                    Told::UpTo(up_to) => Command::Told { up_to },
                    Told::Of(numbers) => Command::ToldOf { numbers },
                };
                self.ask_shard(shard, command, None, None).await?.result?;
            }
        }
        Ok(())
    }

    /// The webhooks that are to hear of something.
    fn heard<'d>(
        directory: &'d Directory,
        event: &'d Occurrence,
    ) -> impl Iterator<Item = WebhookId> + 'd {
        let hooks = directory.webhooks.rows().filter(|(_, hook)| hook.hears(event));
        // A webhook does not hear of its own end.
        let hooks = hooks.filter(|(id, _)| !event.data.contains(&format!("\"{id}\"")));
        hooks.map(|(id, _)| *id)
    }

    /// Whether something goes into its organization's log. A webhook that is off may ask for it later.
    fn is_kept(directory: &Directory, event: &Occurrence) -> bool {
        event.kind.is_kept_unheard()
            || directory.webhooks.rows().any(|(_, hook)| hook.selects(event))
    }

    /// The shards that must write something down before it was told.
    fn homes(&self, directory: &Directory, item: Item<'_>) -> BTreeSet<u16> {
        match item {
            Item::Row(row) => [self.home_of(row.org)].into(),
            Item::Event(event) => {
                let log = Self::is_kept(directory, event).then(|| self.home_of(event.tenant.org));
                let hooks = Self::heard(directory, event).map(|id| self.home_of(id));
                log.into_iter().chain(hooks).collect()
            }
        }
    }

    /// What each shard is to write down.
    fn load(&self, waiting: &Waiting) -> Load {
        let directory = self.directory().read();
        let (mut logs, mut lines) = (BTreeMap::<_, Vec<_>>::new(), BTreeMap::<_, Vec<_>>::new());
        let mut homes = vec![];
        for (number, event) in &waiting.events {
            if Self::is_kept(&directory, event) {
                logs.entry(event.tenant.org).or_default().push(Arc::clone(event));
            }
            for id in Self::heard(&directory, event) {
                lines.entry(self.home_of(id)).or_default().push((id, Occurrence::clone(event)));
            }
            homes.push((*number, self.homes(&directory, Item::Event(event))));
        }
        for (number, row) in &waiting.audited {
            homes.push((*number, self.homes(&directory, Item::Row(row))));
        }
        let rows = audit::by_org(waiting.audited.iter().map(|(_, row)| Arc::clone(row)));
        let rows = rows.into_iter().map(|(org, rows)| (self.home_of(org), Command::Audit(rows)));
        let logs = logs.into_iter();
        let logs = logs.map(|(org, events)| (self.home_of(org), Command::KeepEvents(events)));
        let enqueue = |wanted| Command::Enqueue { wanted, cause: Cause::Schedule };
        let lines = lines.into_iter().map(|(shard, wanted)| (shard, enqueue(wanted)));
        Load { parcels: rows.chain(logs).chain(lines).collect(), homes }
    }

    /// Gives shards what they are to write down; tells which did not.
    async fn hand_over(self: &Arc<Self>, parcels: Vec<(u16, Command)>) -> BTreeSet<u16> {
        let given = parcels.into_iter().map(async |(shard, command)| {
            let asked = self.ask_shard(shard, command, None, None);
            let written = match tokio::time::timeout(WRITTEN_WITHIN, asked).await {
                Ok(Ok(answer)) => answer.result.map(|_| ()).map_err(|error| error.to_string()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("no answer".to_owned()),
            };
            let error = written.err()?;
            tracing::debug!(shard, error, "a shard does not write down what it is told");
            Some(shard)
        });
        futures::future::join_all(given).await.into_iter().flatten().collect()
    }
}

/// What everybody has.
enum Told {
    UpTo(u64),
    Of(Vec<u64>),
}

/// What is carried at once.
struct Load {
    parcels: Vec<(u16, Command)>,
    /// Where each item goes, by its number.
    homes: Vec<(u64, BTreeSet<u16>)>,
}

/// Shards that did not answer lately, and until when they are let alone.
#[derive(Default)]
struct Silent(BTreeMap<u16, Instant>);

impl Silent {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn any(&self, shards: &BTreeSet<u16>) -> bool {
        shards.iter().any(|shard| self.0.contains_key(shard))
    }

    fn note(&mut self, shards: &BTreeSet<u16>) {
        let until = Instant::now() + LET_ALONE_FOR;
        self.0.extend(shards.iter().map(|shard| (*shard, until)));
    }

    fn forget_old(&mut self) {
        let now = Instant::now();
        self.0.retain(|_, until| *until > now);
    }

    /// How long there is nothing to do unless somebody rings. Never nothing at all: who no longer carries an
    /// outbox asks this again and again.
    fn soonest(&mut self) -> Duration {
        self.forget_old();
        let until = self.0.values().min();
        until.map_or(LOOK_EVERY, |until| until.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_shard_is_let_alone_for_a_while_and_then_forgotten() {
        let mut silent = Silent::default();
        silent.note(&[3].into());
        assert!(silent.any(&[2, 3].into()) && !silent.any(&[2].into()));
        assert_eq!(silent.soonest(), LET_ALONE_FOR);
        tokio::time::advance(LET_ALONE_FOR).await;
        assert_eq!(silent.soonest(), LOOK_EVERY);
        assert!(silent.is_empty());
    }
}
