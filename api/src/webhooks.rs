//! `/v1/webhooks`: subscriptions to events and what became of their deliveries.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use actors::{
    call::{DeliveriesWanted, Recovery},
    webhook::sealed_place,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use domain::{
    DeliveryId, EventId, OrgId, Timestamp, WebhookId,
    account::Tenant,
    directory::{Command, Reply},
    outbox::{Kind, Occurrence, unknown_selection},
    webhook::{Webhook, WebhookPatch, delivery::Status, signature::SECRET_PREFIX},
};
use http::{StatusCode, Uri};
use poem::Request;
use poem_openapi::{
    ApiResponse, Object, OpenApi,
    param::{Path, Query},
    payload::Json,
};
use serde_json::json;

use crate::{
    Handle,
    agents::if_match,
    body::{
        agent::{Wrong, check_metadata},
        webhook::{
            AttemptBody, CreateWebhook, DeliveryBody, RecoverRequest, RotateSecret, TestWebhook,
            UpdateWebhook, WebhookBody,
        },
    },
    caller::Caller,
    check::{Checked, MaybeChecked, is_removed, members},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Listed, Listing, Wanted},
    query,
    repeat::{Gone, keyed, replayed},
};

pub(crate) struct WebhooksApi(pub(crate) Handle);

/// How long a rotated secret signs too, in seconds.
const GRACE_SECONDS: u64 = 86_400;

/// A subscription.
#[derive(ApiResponse)]
pub(crate) enum WebhookAnswer {
    /// The webhook as it is now.
    #[oai(status = 200)]
    Ok(
        Json<Success<WebhookBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// A new subscription.
#[derive(ApiResponse)]
pub(crate) enum WebhookCreated {
    /// The webhook, with its secret.
    #[oai(status = 201)]
    Created(
        Json<Success<WebhookBody>>,
        #[oai(header = "Location")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// How much is sent again.
#[derive(Clone, Debug, Object)]
pub(crate) struct Recovered {
    /// Deliveries.
    deliveries: u64,
    /// Whether the window has more: the same call takes them.
    has_more: bool,
}

type Result<T> = std::result::Result<T, ApiError>;

fn hook_id(text: &str) -> std::result::Result<WebhookId, Problem> {
    path_id("webhook", text)
}

fn delivery_id(text: &str) -> std::result::Result<DeliveryId, Problem> {
    path_id("delivery", text)
}

/// Where events may go. Whether anybody is there, and may be called, is found out at every attempt.
fn check_url(text: &str) -> std::result::Result<(), Problem> {
    let wrong = |why: &str| {
        Err(Problem::new(StatusCode::BAD_REQUEST, "INVALID_URL", format!("url {why}"))
            .with(json!({ "field": "url" })))
    };
    if text.len() > 2048 || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return wrong("must have at most 2048 visible characters");
    }
    let Ok(uri) = text.parse::<Uri>() else { return wrong("must be an https address") };
    if uri.scheme_str() != Some("https") {
        return wrong("must be an https address");
    }
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => {
            wrong("must not have a user or password in it; deliveries are signed instead")
        }
        Some(authority) if !authority.host().is_empty() => Ok(()),
        _ => wrong("must be an https address"),
    }
}

fn check_events(events: &[String]) -> std::result::Result<(), Problem> {
    let Some(unknown) = unknown_selection(events) else { return Ok(()) };
    let unknown: String = unknown.chars().take(64).collect();
    let message = format!("`{unknown}` is no type of events; GET /v1/event-types lists them");
    Err(Problem::new(StatusCode::BAD_REQUEST, "UNSUPPORTED_EVENT_TYPE", message)
        .with(json!({ "field": "events", "event_type": unknown })))
}

fn check_secret(secret: &str) -> std::result::Result<(), Problem> {
    match secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(()),
        false => Err(Problem::field("secret", "must have only visible ASCII characters")),
    }
}

fn check_notes<'v>(
    notes: impl Iterator<Item = (&'v String, &'v str)>,
) -> std::result::Result<(), Problem> {
    let mut wrong: Wrong = vec![];
    check_metadata(notes, &mut wrong);
    if wrong.is_empty() { Ok(()) } else { Err(Problem::invalid(wrong)) }
}

impl Listed for Webhook {
    const IS_NAMED: bool = false;

    fn id(&self) -> String {
        self.id.to_string()
    }

    fn texts(&self) -> Vec<&str> {
        vec![&self.description, &self.url]
    }

    fn created_at(&self) -> Timestamp {
        self.created_at
    }

    fn updated_at(&self) -> Timestamp {
        self.updated_at
    }

    fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        Some(&self.metadata)
    }
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Webhooks")]
impl WebhooksApi {
    /// List webhooks
    ///
    /// Newest first.
    #[oai(path = "/webhooks", method = "get", operation_id = "listWebhooks")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<WebhookBody>>>> {
        let tenant = caller.tenant();
        let selected = {
            let directory = self.0.service.directory().await?.read();
            let rows = directory.webhooks.rows().map(|(_, row)| row);
            let rows = rows.filter(|row| row.tenant == tenant);
            listing.select(&self.0, tenant, &[&"webhooks"], rows)?
        };
        let mut bodies = vec![];
        for row in &selected.rows {
            bodies.push(self.dressed(row).await?);
        }
        Ok(Json(Success::of(selected.page_of(bodies))))
    }

    /// Create a webhook
    ///
    /// The secret is shown in this answer alone. The webhook hears of everything that happens after
    /// this answer.
    #[oai(path = "/webhooks", method = "post", operation_id = "createWebhook")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateWebhook>,
    ) -> Result<WebhookCreated> {
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        let (row, secret) = self.new_webhook(caller.tenant(), body.body).await?;
        let command = Command::CreateWebhook(Box::new(row));
        let answer = self.0.service.change(command, key).await?;
        let Reply::Webhook(row) = answer.value else { return Err(Problem::internal().into()) };
        let body = self.with_secret(&row, answer.replayed, secret).await?;
        let location = format!("/v1/webhooks/{}", body.id);
        let replayed = replayed(answer.replayed);
        Ok(WebhookCreated::Created(Json(Success::of(body)), location, replayed))
    }

    /// Get a webhook
    #[oai(path = "/webhooks/:id", method = "get", operation_id = "getWebhook")]
    async fn get(
        &self,
        caller: Caller,
        /// The webhook.
        id: Path<String>,
    ) -> Result<WebhookAnswer> {
        let row = self.row(&caller, hook_id(&id)?).await?;
        self.answer(&row, false).await
    }

    /// Update a webhook
    ///
    /// A JSON merge patch.
    #[oai(path = "/webhooks/:id", method = "patch", operation_id = "updateWebhook")]
    async fn update(
        &self,
        caller: Caller,
        request: &Request,
        /// The webhook.
        id: Path<String>,
        body: Checked<UpdateWebhook>,
    ) -> Result<WebhookAnswer> {
        let (tenant, id) = (caller.tenant(), hook_id(&id)?);
        let key = keyed(request, tenant, Some(&body.json))?;
        let before = self.row(&caller, id).await?;
        let if_match = if_match(request)?;
        body.removes_only(&["description", "rate_limit_per_s", "metadata"])?;
        let patch = patch(&before, &body.json, body.body)?;
        let command = Command::UpdateWebhook { tenant, id, patch, if_match };
        let answer = self.0.service.change(command, key).await?;
        let Reply::Webhook(row) = answer.value else { return Err(Problem::internal().into()) };
        self.answer(&row, answer.replayed).await
    }

    /// Delete a webhook
    ///
    /// What is on its way to it is given up.
    #[oai(path = "/webhooks/:id", method = "delete", operation_id = "deleteWebhook")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The webhook.
        id: Path<String>,
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), hook_id(&id)?);
        let key = keyed(request, tenant, None)?;
        let answer = self.0.service.change(Command::DeleteWebhook { tenant, id }, key).await?;
        // Its shard may have no leader right now: what is left there expires by itself.
        if let Err(error) = self.0.service.drop_hook(id).await {
            tracing::info!(webhook_id = %id, %error, "deliveries of a deleted webhook stay a while");
        }
        Ok(Gone::of(id, answer.replayed))
    }

    /// Enable a webhook
    ///
    /// Turns it on again after it was turned off. What waits for it is sent.
    #[oai(path = "/webhooks/:id/enable", method = "post", operation_id = "enableWebhook")]
    async fn enable(
        &self,
        caller: Caller,
        request: &Request,
        /// The webhook.
        id: Path<String>,
    ) -> Result<WebhookAnswer> {
        let (tenant, id) = (caller.tenant(), hook_id(&id)?);
        let key = keyed(request, tenant, None)?;
        let patch = WebhookPatch { active: Some(true), ..WebhookPatch::default() };
        let command = Command::UpdateWebhook { tenant, id, patch, if_match: None };
        let answer = self.0.service.change(command, key).await?;
        let Reply::Webhook(row) = answer.value else { return Err(Problem::internal().into()) };
        self.answer(&row, answer.replayed).await
    }

    /// Rotate a webhook's secret
    ///
    /// The new secret signs at once and is shown in this answer alone; the present one signs
    /// `X-Service-Signature-Previous` during the grace.
    #[oai(
        path = "/webhooks/:id/rotate-secret",
        method = "post",
        operation_id = "rotateWebhookSecret"
    )]
    async fn rotate(
        &self,
        caller: Caller,
        request: &Request,
        /// The webhook.
        id: Path<String>,
        body: MaybeChecked<RotateSecret>,
    ) -> Result<WebhookAnswer> {
        let (tenant, id) = (caller.tenant(), hook_id(&id)?);
        let key = keyed(request, tenant, Some(&body.0.json))?;
        self.row(&caller, id).await?;
        let RotateSecret { secret, grace_period_seconds } = body.0.body;
        let secret = secret.unwrap_or_else(|| self.new_secret());
        check_secret(&secret)?;
        let grace = Duration::from_secs(grace_period_seconds.unwrap_or(GRACE_SECONDS));
        let (sealed, hint) = self.sealed(tenant.org, id, &secret).await?;
        let command = Command::RotateWebhook { tenant, id, sealed, hint, grace };
        let answer = self.0.service.change(command, key).await?;
        let Reply::Webhook(row) = answer.value else { return Err(Problem::internal().into()) };
        let body = self.with_secret(&row, answer.replayed, secret).await?;
        let etag = body.etag.clone();
        Ok(WebhookAnswer::Ok(Json(Success::of(body)), etag, replayed(answer.replayed)))
    }

    /// Test a webhook
    ///
    /// Sends one event at once and answers with what came of it. It is marked as a test, has no
    /// number and is not tried again.
    #[oai(path = "/webhooks/:id/test", method = "post", operation_id = "testWebhook")]
    async fn test(
        &self,
        caller: Caller,
        /// The webhook.
        id: Path<String>,
        body: MaybeChecked<TestWebhook>,
    ) -> Result<Json<Success<AttemptBody>>> {
        let hook = self.row(&caller, hook_id(&id)?).await?;
        let wanted = body.0.body.event_type.unwrap_or_else(|| "agent.deployed".to_owned());
        check_events(std::slice::from_ref(&wanted))?;
        let kind: Kind = wanted
            .parse()
            .map_err(|()| Problem::field("event_type", "must be one type of events"))?;
        let world = &self.0.service.world;
        let event = Occurrence {
            id: world.mint(EventId::new),
            tenant: hook.tenant,
            kind,
            at: world.now(),
            data: json!({ "test": true, "message": "this is a test; nothing has happened" })
                .to_string(),
            agent: None,
        };
        let attempt = self.0.service.test_webhook(&hook, event).await;
        Ok(Json(Success::of(AttemptBody::of(1, &attempt))))
    }

    /// Recover deliveries
    ///
    /// Sends again what failed within a time window; without `only_failed` also what happened while
    /// the webhook was off. Some 10,000 at once; `has_more` tells to ask again.
    #[oai(path = "/webhooks/:id/recover", method = "post", operation_id = "recoverWebhook")]
    async fn recover(
        &self,
        caller: Caller,
        /// The webhook.
        id: Path<String>,
        body: Checked<RecoverRequest>,
    ) -> Result<Json<Success<Recovered>>> {
        let hook = self.row(&caller, hook_id(&id)?).await?;
        let RecoverRequest { since, until, only_failed } = body.body;
        let now = self.0.service.world.now();
        let since = query::time("since", Some(since))?.unwrap_or_default();
        let until: Timestamp = query::time("until", until)?.unwrap_or(now);
        if until <= since {
            return Err(Problem::field("until", "must be later than since").into());
        }
        let only_failed = only_failed != Some(false);
        let recovery = self.0.service.recover(&hook, since, until, only_failed).await?;
        let Recovery { deliveries, has_more } = recovery;
        Ok(Json(Success::of(Recovered { deliveries, has_more })))
    }

    /// List deliveries
    ///
    /// Of the last 30 days, newest first.
    #[oai(path = "/webhooks/:id/deliveries", method = "get", operation_id = "listDeliveries")]
    #[expect(clippy::too_many_arguments, reason = "one argument per documented parameter")]
    async fn deliveries(
        &self,
        caller: Caller,
        /// The webhook.
        id: Path<String>,
        /// Items of a page.
        #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
        /// `pending`, `succeeded`, `failed` or `exhausted`.
        status: Query<Option<String>>,
        /// Only of this type.
        event_type: Query<Option<String>>,
        /// Only of events since this time (RFC 3339).
        since: Query<Option<String>>,
        /// Only of events before this time.
        until: Query<Option<String>>,
    ) -> Result<Json<Success<Page<DeliveryBody>>>> {
        let hook = self.row(&caller, hook_id(&id)?).await?;
        let status = status.0.as_deref().map(read_status).transpose()?;
        let kind = event_type.0.as_deref().map(|word| {
            check_events(&[word.to_owned()])?;
            let exact = || Problem::field("event_type", "must be one type of events");
            word.parse::<Kind>().map_err(|()| exact())
        });
        let kind = kind.transpose()?;
        let (since, until) = (query::time("since", since.0)?, query::time("until", until.0)?);
        let filters: [&(dyn std::fmt::Debug + Sync); 5] =
            [&hook.id, &status, &kind, &since, &until];
        let wanted = Wanted::new(hook.tenant, &filters, limit.0, cursor.0);
        let asked = DeliveriesWanted {
            webhook: hook.id,
            status,
            kind,
            since,
            until,
            before: wanted.after(&self.0)?,
            limit: wanted.limit + 1,
        };
        let rows = self.0.service.deliveries(asked).await?;
        let dress = |row: &&domain::webhook::delivery::Delivery| DeliveryBody::of(row, false);
        let page = wanted.page(&self.0, &rows, |row| row.id.to_string(), dress);
        Ok(Json(Success::of(page)))
    }

    /// Get a delivery
    ///
    /// With what is sent and all attempts.
    #[oai(
        path = "/webhooks/:id/deliveries/:delivery_id",
        method = "get",
        operation_id = "getDelivery"
    )]
    async fn delivery(
        &self,
        caller: Caller,
        /// The webhook.
        id: Path<String>,
        /// The delivery.
        delivery_id: Path<String>,
    ) -> Result<Json<Success<DeliveryBody>>> {
        let hook = self.row(&caller, hook_id(&id)?).await?;
        let row = self.0.service.delivery(hook.id, self::delivery_id(&delivery_id)?).await?;
        Ok(Json(Success::of(DeliveryBody::of(&row, true))))
    }

    /// Redeliver
    ///
    /// Tries a delivery again at once, beside its schedule.
    #[oai(
        path = "/webhooks/:id/deliveries/:delivery_id/redeliver",
        method = "post",
        operation_id = "redeliver"
    )]
    async fn redeliver(
        &self,
        caller: Caller,
        /// The webhook.
        id: Path<String>,
        /// The delivery.
        delivery_id: Path<String>,
    ) -> Result<Json<Success<DeliveryBody>>> {
        let hook = self.row(&caller, hook_id(&id)?).await?;
        let id = self::delivery_id(&delivery_id)?;
        self.0.service.redeliver(hook.id, id).await?;
        let row = self.0.service.delivery(hook.id, id).await?;
        Ok(Json(Success::of(DeliveryBody::of(&row, true))))
    }
}

fn read_status(word: &str) -> std::result::Result<Status, Problem> {
    let all = [Status::Pending, Status::Succeeded, Status::Failed, Status::Exhausted];
    let found = all.into_iter().find(|status| status.as_str() == word);
    found.ok_or_else(|| Problem::field("status", "must be pending, succeeded, failed or exhausted"))
}

fn patch(
    before: &Webhook,
    json: &serde_json::Value,
    body: UpdateWebhook,
) -> std::result::Result<WebhookPatch, Problem> {
    let is_null = |field: &str| is_removed(json, field);
    body.url.as_deref().map(check_url).transpose()?;
    body.events.as_deref().map(check_events).transpose()?;
    let metadata = members(json, "metadata", body.metadata, &before.metadata);
    let mut notes = before.metadata.clone();
    domain::cloud::merge(&mut notes, &metadata);
    check_notes(notes.iter().map(|(key, value)| (key, value.as_str())))?;
    Ok(WebhookPatch {
        url: body.url,
        events: body.events,
        active: body.active,
        description: body.description.or_else(|| is_null("description").then(String::new)),
        ordering: body.ordering.map(Into::into),
        rate_limit_per_s: match body.rate_limit_per_s {
            Some(rate) => Some(Some(rate)),
            None => is_null("rate_limit_per_s").then_some(None),
        },
        metadata,
    })
}

impl WebhooksApi {
    async fn row(&self, caller: &Caller, id: WebhookId) -> Result<Arc<Webhook>> {
        Ok(self.0.service.directory().await?.read().webhook(caller.tenant(), id)?)
    }

    /// With the secret made now, or that of the first, equal call: the row has it, sealed.
    async fn with_secret(
        &self,
        row: &Webhook,
        replayed: bool,
        made: String,
    ) -> Result<WebhookBody> {
        let secret = match replayed {
            false => made,
            true => {
                let sealer = self.0.service.world.opener(row.tenant.org);
                let place = sealed_place(row.id);
                let opened = sealer.and_then(|sealer| sealer.open(&row.sealed, &place));
                opened.map_err(|_| Problem::internal())?.to_string()
            }
        };
        Ok(WebhookBody { secret: Some(secret), ..self.dressed(row).await? })
    }

    /// A webhook with its statistics; without them where their shard does not answer right now.
    async fn dressed(&self, row: &Webhook) -> Result<WebhookBody> {
        let hook = self.0.service.hook_state(row.id).await.unwrap_or_default();
        Ok(WebhookBody::of(row, &hook, self.0.service.world.now()))
    }

    async fn answer(&self, row: &Webhook, is_replay: bool) -> Result<WebhookAnswer> {
        let body = self.dressed(row).await?;
        let etag = body.etag.clone();
        Ok(WebhookAnswer::Ok(Json(Success::of(body)), etag, replayed(is_replay)))
    }

    /// `whsec_` and the base64 of 33 random bytes, without the two characters that other alphabets
    /// write differently: every library reads it alike.
    fn new_secret(&self) -> String {
        let dice = || self.0.service.world.ports.entropy.dice();
        loop {
            let bytes = [dice(), dice(), dice()].map(u128::to_be_bytes).concat();
            let text = STANDARD.encode(&bytes[..33]);
            if !text.contains(['+', '/']) {
                return format!("{SECRET_PREFIX}{text}");
            }
        }
    }

    async fn sealed(&self, org: OrgId, id: WebhookId, secret: &str) -> Result<(Vec<u8>, String)> {
        let world = &self.0.service.world;
        let sealer = self.0.service.sealer(org).await?;
        let sealed = sealer.seal(secret, &sealed_place(id), &*world.ports.entropy);
        Ok((sealed, secret[secret.len() - 4..].to_owned()))
    }

    async fn new_webhook(&self, tenant: Tenant, body: CreateWebhook) -> Result<(Webhook, String)> {
        check_url(&body.url)?;
        check_events(&body.events)?;
        let metadata = body.metadata.unwrap_or_default();
        check_notes(metadata.iter().map(|(key, value)| (key, value.as_str())))?;
        let secret = body.secret.unwrap_or_else(|| self.new_secret());
        check_secret(&secret)?;
        let world = &self.0.service.world;
        let (id, now) = (world.mint(WebhookId::new), world.now());
        let (sealed, secret_hint) = self.sealed(tenant.org, id, &secret).await?;
        let active = body.active != Some(false);
        let row = Webhook {
            id,
            tenant,
            url: body.url,
            events: body.events,
            active,
            description: body.description.unwrap_or_default(),
            sealed,
            secret_hint,
            previous: None,
            ordering: body.ordering.map(Into::into).unwrap_or_default(),
            rate_limit_per_s: body.rate_limit_per_s,
            metadata,
            enabled_at: now,
            disabled_at: (!active).then_some(now),
            disabled_reason: (!active).then(|| "user".to_owned()),
            created_at: now,
            updated_at: now,
            revision: 1,
        };
        Ok((row, secret))
    }
}
