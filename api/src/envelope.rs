//! The envelope that every answer wears: `success`, `data` or `error`, and `meta`.

use std::cell::RefCell;

use domain::{RequestId, Timestamp};
use poem::{IntoResponse, Response};
use poem_openapi::{
    ApiResponse, Object,
    payload::Payload,
    registry::{MetaMediaType, MetaResponse, MetaResponses, MetaSchemaRef, Registry},
    types::{Any, ParseFromJSON, ToJSON, Type},
};
use serde_json::Value;
use tokio::time::Instant;

/// What is known of the request that is being served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Current {
    /// Our name for it.
    pub(crate) request_id: RequestId,
    /// The wall clock when it came.
    pub(crate) at: Timestamp,
    /// When it came.
    pub(crate) began: Instant,
}

tokio::task_local! {
    static CURRENT: Current;
    static REFUSAL: RefCell<Option<String>>;
}

/// Remembers why the request that this task serves was refused.
pub(crate) fn note_refusal(code: &str) {
    // A problem outside of any request is nobody's.
    let _ = REFUSAL.try_with(|refusal| *refusal.borrow_mut() = Some(code.to_owned()));
}

/// Why the request that this task serves was refused, if it was.
pub(crate) fn refusal() -> Option<String> {
    REFUSAL.try_with(|refusal| refusal.borrow().clone()).ok().flatten()
}

impl Current {
    /// The request that this task serves.
    pub(crate) fn get() -> Self {
        CURRENT.try_with(|current| *current).unwrap_or(Self {
            request_id: RequestId(0),
            at: Timestamp::default(),
            began: Instant::now(),
        })
    }

    pub(crate) async fn scope<F: Future>(self, task: F) -> F::Output {
        CURRENT.scope(self, REFUSAL.scope(RefCell::new(None), task)).await
    }
}

/// What every answer says of itself.
#[derive(Clone, Debug, Object)]
pub(crate) struct Meta {
    /// Our name for this request; quote it when you ask us.
    pub(crate) request_id: String,
    /// When it was answered: RFC 3339, UTC.
    pub(crate) timestamp: String,
    /// Only of invocations: how long it took, in milliseconds.
    #[oai(skip_serializing_if_is_none)]
    pub(crate) latency_ms: Option<u64>,
    /// Only of invocations: the instance that answered.
    #[oai(skip_serializing_if_is_none)]
    pub(crate) instance_id: Option<String>,
}

impl Meta {
    pub(crate) fn now() -> Self {
        let current = Current::get();
        Self {
            request_id: current.request_id.to_string(),
            timestamp: current.at.plus(current.began.elapsed()).to_string(),
            latency_ms: None,
            instance_id: None,
        }
    }
}

/// A successful answer.
#[derive(Clone, Debug, Object)]
pub(crate) struct Success<T: ParseFromJSON + ToJSON + Type + Send + Sync> {
    /// Always true.
    pub(crate) success: bool,
    /// What was asked for.
    pub(crate) data: T,
    /// About this answer.
    pub(crate) meta: Meta,
}

impl<T: ParseFromJSON + ToJSON + Type + Send + Sync> Success<T> {
    pub(crate) fn of(data: T) -> Self {
        Self { success: true, data, meta: Meta::now() }
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, Object)]
pub(crate) struct ErrorBody {
    /// A word for programs.
    pub(crate) code: String,
    /// A sentence for people, with the next step.
    pub(crate) message: String,
    /// Context, such as `fields` or an id.
    pub(crate) details: Any<Value>,
}

/// An answer that is an error.
#[derive(Clone, Debug, Object)]
pub(crate) struct Failure {
    /// Always false.
    pub(crate) success: bool,
    /// Why.
    pub(crate) error: ErrorBody,
    /// About this answer.
    pub(crate) meta: Meta,
}

/// A removed object.
#[derive(Clone, Debug, Object)]
pub(crate) struct Deleted {
    /// What was removed.
    pub(crate) id: String,
    /// Always true.
    pub(crate) deleted: bool,
}

impl Deleted {
    pub(crate) fn of(id: impl std::fmt::Display) -> Self {
        Self { id: id.to_string(), deleted: true }
    }
}

/// One page of a list.
#[derive(Clone, Debug, Object)]
pub(crate) struct Page<T: ParseFromJSON + ToJSON + Type + Send + Sync> {
    /// The items, in the order asked for.
    pub(crate) items: Vec<T>,
    /// Whether there are more.
    pub(crate) has_more: bool,
    /// Give it as `cursor` for the next page.
    pub(crate) next_cursor: Option<String>,
}

/// JSON as an agent wrote it, passed on without the envelope.
pub(crate) struct RawJson(pub(crate) String);

impl Payload for RawJson {
    const CONTENT_TYPE: &'static str = "application/json";

    fn schema_ref() -> MetaSchemaRef {
        Any::<Value>::schema_ref()
    }
}

impl IntoResponse for RawJson {
    fn into_response(self) -> Response {
        Response::builder().content_type(Self::CONTENT_TYPE).body(self.0)
    }
}

impl ApiResponse for RawJson {
    fn meta() -> MetaResponses {
        let content =
            vec![MetaMediaType { content_type: Self::CONTENT_TYPE, schema: Self::schema_ref() }];
        let ok = MetaResponse {
            description: "The output.",
            status: Some(200),
            status_range: None,
            content,
            headers: vec![],
        };
        MetaResponses { responses: vec![ok] }
    }

    fn register(registry: &mut Registry) {
        Any::<Value>::register(registry);
    }
}
