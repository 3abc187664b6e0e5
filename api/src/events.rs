//! `/v1/events`: what happened, for whoever prefers to ask.

use actors::call::EventsWanted;
use domain::{
    EventId,
    outbox::{Kind, Occurrence, unknown_selection},
};
use poem_openapi::{
    Object, OpenApi,
    param::{Path, Query},
    payload::Json,
};

use crate::{
    Handle,
    body::webhook::{EventBody, EventTypeBody},
    caller::Caller,
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::Wanted,
    query,
};

pub(crate) struct EventsApi(pub(crate) Handle);

type Result<T> = std::result::Result<T, ApiError>;

/// To how many webhooks an event goes again.
#[derive(Clone, Debug, Object)]
pub(crate) struct Redelivered {
    /// The event.
    event_id: String,
    /// Webhooks.
    webhooks: u64,
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Webhooks")]
impl EventsApi {
    /// List events
    ///
    /// Of the last 30 days. Events of jobs are there only where a webhook heard them.
    #[oai(path = "/events", method = "get", operation_id = "listEvents")]
    #[expect(clippy::too_many_arguments, reason = "one argument per documented parameter")]
    async fn list(
        &self,
        caller: Caller,
        /// Items of a page.
        #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
        /// `-created_at`, or `created_at` for the oldest first.
        sort: Query<Option<String>>,
        /// Only these types; a comma means any of, `agent.*` all of a kind.
        #[oai(name = "type")]
        kind: Query<Option<String>>,
        /// Only since this time (RFC 3339).
        since: Query<Option<String>>,
        /// Only before this time.
        until: Query<Option<String>>,
    ) -> Result<Json<Success<Page<EventBody>>>> {
        let tenant = caller.tenant();
        let kinds: Vec<String> =
            kind.0.iter().flat_map(|text| text.split(',')).map(str::to_owned).collect();
        if unknown_selection(&kinds).is_some() {
            return Err(Problem::field("type", "must be types of GET /v1/event-types").into());
        }
        let ascending = match sort.0.as_deref() {
            None | Some("-created_at") => false,
            Some("created_at") => true,
            Some(_) => {
                return Err(Problem::field("sort", "must be created_at or -created_at").into());
            }
        };
        let (since, until) = (query::time("since", since.0)?, query::time("until", until.0)?);
        let filters: [&(dyn std::fmt::Debug + Sync); 5] =
            [&"events", &kinds, &ascending, &since, &until];
        let wanted = Wanted::new(tenant, &filters, limit.0, cursor.0);
        let from: Option<EventId> = wanted.after(&self.0)?;
        let limit = wanted.limit + 1;
        let asked = EventsWanted { tenant, kinds, since, until, from, ascending, limit };
        let rows = self.0.service.events(asked).await?;
        let dress = |row: &&Occurrence| EventBody::of(row);
        let page = wanted.page(&self.0, &rows, |row| row.id.to_string(), dress);
        Ok(Json(Success::of(page)))
    }

    /// Get an event
    #[oai(path = "/events/:id", method = "get", operation_id = "getEvent")]
    async fn get(
        &self,
        caller: Caller,
        /// The event.
        id: Path<String>,
    ) -> Result<Json<Success<EventBody>>> {
        let id: EventId = path_id("event", &id)?;
        let row = self.0.service.event(caller.tenant(), id).await?;
        Ok(Json(Success::of(EventBody::of(&row))))
    }

    /// Redeliver an event
    ///
    /// Sends it once more to every webhook that listens to it.
    #[oai(path = "/events/:id/redeliver", method = "post", operation_id = "redeliverEvent")]
    async fn redeliver(
        &self,
        caller: Caller,
        /// The event.
        id: Path<String>,
    ) -> Result<Json<Success<Redelivered>>> {
        let id: EventId = path_id("event", &id)?;
        let row = self.0.service.event(caller.tenant(), id).await?;
        let webhooks = self.0.service.redeliver_event(&row).await?;
        Ok(Json(Success::of(Redelivered { event_id: id.to_string(), webhooks })))
    }

    /// List event types
    ///
    /// Everything that a webhook may listen to.
    #[oai(path = "/event-types", method = "get", operation_id = "listEventTypes")]
    async fn types(&self, _caller: Caller) -> Result<Json<Success<Page<EventTypeBody>>>> {
        let items = Kind::ALL.iter().map(|kind| EventTypeBody::of(*kind)).collect();
        Ok(Json(Success::of(Page { items, has_more: false, next_cursor: None })))
    }
}
