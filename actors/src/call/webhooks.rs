//! Webhooks, deliveries and events, as clients ask for them.

use std::sync::Arc;

use domain::{
    DeliveryId, EventId, Rejection, Timestamp, WebhookId,
    account::Tenant,
    outbox::Occurrence,
    shard::Command,
    webhook::{
        Webhook,
        delivery::{self, Attempt, Cause, Delivery, HookState, Status},
    },
};

use super::{DeliveriesWanted, EventsWanted, Records, RecordsWanted, Service, ServiceError};

/// Deliveries that one recovery takes at most, and up to a page more.
const RECOVERED_MAX: usize = 10_000;
/// How many are asked for at once.
const PAGE: usize = 500;

/// What a recovery sends again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// How many deliveries.
    pub deliveries: u64,
    /// Whether the window has more: the same call takes them.
    pub has_more: bool,
}

impl Service {
    fn hook_shard(&self, id: WebhookId) -> u16 {
        self.world.home_of(id)
    }

    async fn at_hook(&self, id: WebhookId, command: Command) -> Result<(), ServiceError> {
        let answer = self.world.ask_shard(self.hook_shard(id), command, None, None).await?;
        answer.result?;
        Ok(())
    }

    /// A page of an organization's events.
    pub async fn events(&self, wanted: EventsWanted) -> Result<Vec<Occurrence>, ServiceError> {
        let shard = self.home_of(wanted.tenant.org);
        let found = self.records(shard, RecordsWanted::Events(wanted)).await?;
        let Records::Events(events) = found else { return Err(ServiceError::Elsewhere) };
        Ok(events)
    }

    /// One event.
    pub async fn event(&self, tenant: Tenant, id: EventId) -> Result<Occurrence, ServiceError> {
        let wanted = RecordsWanted::Event { tenant, id };
        let found = self.records(self.home_of(tenant.org), wanted).await?;
        let Records::Events(events) = found else { return Err(ServiceError::Elsewhere) };
        Ok(events.into_iter().next().ok_or(Rejection::EventNotFound(id))?)
    }

    /// A page of a webhook's deliveries.
    pub async fn deliveries(
        &self,
        wanted: DeliveriesWanted,
    ) -> Result<Vec<Delivery>, ServiceError> {
        let shard = self.hook_shard(wanted.webhook);
        let found = self.records(shard, RecordsWanted::Deliveries(wanted)).await?;
        let Records::Deliveries(rows) = found else { return Err(ServiceError::Elsewhere) };
        Ok(rows)
    }

    /// One delivery.
    pub async fn delivery(
        &self,
        webhook: WebhookId,
        id: DeliveryId,
    ) -> Result<Delivery, ServiceError> {
        let wanted = RecordsWanted::Delivery { webhook, id };
        let found = self.records(self.hook_shard(webhook), wanted).await?;
        let Records::Deliveries(rows) = found else { return Err(ServiceError::Elsewhere) };
        Ok(rows.into_iter().next().ok_or(Rejection::DeliveryNotFound(id))?)
    }

    /// What is known of a webhook beside its record.
    pub async fn hook_state(&self, id: WebhookId) -> Result<HookState, ServiceError> {
        let found = self.records(self.hook_shard(id), RecordsWanted::Hook(id)).await?;
        let Records::Hook(hook) = found else { return Err(ServiceError::Elsewhere) };
        Ok(*hook)
    }

    /// A webhook is gone: so is what its shard knows of it.
    pub async fn drop_hook(&self, webhook: WebhookId) -> Result<(), ServiceError> {
        self.at_hook(webhook, Command::DropHook { webhook }).await
    }

    /// Has a delivery tried again at once.
    pub async fn redeliver(&self, webhook: WebhookId, id: DeliveryId) -> Result<(), ServiceError> {
        let command = Command::Redeliver { webhook, ids: vec![id], cause: Cause::Manual };
        self.at_hook(webhook, command).await
    }

    /// Has an event sent to every webhook that listens to it, once more where it was.
    pub async fn redeliver_event(&self, event: &Occurrence) -> Result<u64, ServiceError> {
        let hooks: Vec<WebhookId> = {
            let directory = self.world.directory().read();
            let hooks = directory.webhooks.rows().filter(|(_, hook)| hook.hears(event));
            hooks.map(|(id, _)| *id).collect()
        };
        for webhook in &hooks {
            self.put_in_line(*webhook, vec![event.clone()], Cause::Manual).await?;
        }
        Ok(hooks.len() as u64)
    }

    /// Puts events in line; those that were in line before are tried again.
    async fn put_in_line(
        &self,
        webhook: WebhookId,
        events: Vec<Occurrence>,
        cause: Cause,
    ) -> Result<(), ServiceError> {
        let mut again = vec![];
        for event in &events {
            let id = delivery::id_of(event, webhook);
            match self.delivery(webhook, id).await {
                Ok(_) => again.push(id),
                Err(ServiceError::Rejected(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let wanted = events.into_iter().map(|event| (webhook, event)).collect();
        self.at_hook(webhook, Command::Enqueue { wanted, cause }).await?;
        if again.is_empty() {
            return Ok(());
        }
        self.at_hook(webhook, Command::Redeliver { webhook, ids: again, cause }).await
    }

    /// Sends again what a webhook lacks of a time window. With `only_failed` that is what failed;
    /// without it also what happened while it was off.
    pub async fn recover(
        &self,
        hook: &Webhook,
        since: Timestamp,
        until: Timestamp,
        only_failed: bool,
    ) -> Result<Recovery, ServiceError> {
        let (mut ids, mut has_more) = (vec![], false);
        for status in [Status::Failed, Status::Exhausted] {
            let mut from = None;
            while ids.len() < RECOVERED_MAX {
                let page = self
                    .deliveries(DeliveriesWanted {
                        webhook: hook.id,
                        status: Some(status),
                        kind: None,
                        since: Some(since),
                        until: Some(until),
                        before: from,
                        limit: PAGE,
                    })
                    .await?;
                from = page.last().map(|row| row.id);
                has_more = page.len() == PAGE;
                ids.extend(page.into_iter().map(|row| row.id));
                if !has_more {
                    break;
                }
            }
        }
        let failed = ids.len() as u64;
        for ids in ids.chunks(PAGE) {
            let (webhook, ids) = (hook.id, ids.to_vec());
            self.at_hook(webhook, Command::Redeliver { webhook, ids, cause: Cause::Recover })
                .await?;
        }
        if only_failed || has_more {
            return Ok(Recovery { deliveries: failed, has_more });
        }
        let unsent = self.recover_unsent(hook, since, until).await?;
        Ok(Recovery { deliveries: failed + unsent.deliveries, ..unsent })
    }

    async fn recover_unsent(
        &self,
        hook: &Webhook,
        since: Timestamp,
        until: Timestamp,
    ) -> Result<Recovery, ServiceError> {
        let (mut from, mut sent) = (None, Recovery::default());
        while sent.deliveries < RECOVERED_MAX as u64 {
            let wanted = EventsWanted {
                tenant: hook.tenant,
                kinds: hook.events.clone(),
                since: Some(since),
                until: Some(until),
                from,
                ascending: true,
                limit: PAGE,
            };
            let page = self.events(wanted).await?;
            from = page.last().map(|event| event.id);
            sent.has_more = page.len() == PAGE;
            let mut new = vec![];
            for event in page {
                let known = self.delivery(hook.id, delivery::id_of(&event, hook.id)).await;
                if matches!(known, Err(ServiceError::Rejected(_))) {
                    new.push((hook.id, event));
                }
            }
            sent.deliveries += new.len() as u64;
            self.at_hook(hook.id, Command::Enqueue { wanted: new, cause: Cause::Recover }).await?;
            if !sent.has_more {
                break;
            }
        }
        Ok(sent)
    }

    /// Sends an event to a webhook at once, outside of everything; gives the attempt.
    pub async fn test_webhook(&self, hook: &Webhook, event: Occurrence) -> Attempt {
        let row = Delivery {
            id: delivery::id_of(&event, hook.id),
            webhook: hook.id,
            event,
            sequence: 0,
            status: Status::Pending,
            attempts: vec![],
            tried: 0,
            next_at: None,
            cause: Cause::Manual,
            asked: 0,
            created_at: self.world.now(),
        };
        let world = Arc::clone(&self.world);
        world.attempt(hook, &row).await.0
    }
}
