//! From reasons to status codes. No other file chooses a status.

use std::str::FromStr;

use actors::{
    call::ServiceError,
    invocation::CallError,
    ports::{BlobError, ProposeError},
    route::NoSlot,
};
use domain::Rejection;
use http::StatusCode;
use poem::{Body, IntoResponse, Response};
use poem_openapi::{
    ApiResponse,
    payload::Json,
    types::{Any, ToJSON as _},
};
use serde_json::{Value, json};

use crate::envelope::{ErrorBody, Failure, Meta, note_refusal};

/// A reason, ready to be answered with.
#[derive(Clone, Debug)]
pub struct Problem {
    status: StatusCode,
    code: String,
    message: String,
    details: Value,
    retry_after: Option<u64>,
    allow: Option<Box<str>>,
}

impl Problem {
    /// A problem with this status, code and sentence.
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        Self { status, code, message, details: json!({}), retry_after: None, allow: None }
    }

    /// With context.
    #[must_use]
    pub fn with(self, details: Value) -> Self {
        Self { details, ..self }
    }

    /// With a hint when to try again, in seconds.
    #[must_use]
    pub fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// With the methods that the path takes.
    #[must_use]
    pub fn allow(self, methods: String) -> Self {
        Self { allow: Some(methods.into_boxed_str()), ..self }
    }

    /// Fields that are wrong.
    pub fn invalid(fields: Vec<(String, String)>) -> Self {
        let message = match fields.as_slice() {
            [(field, why)] => format!("{field}: {why}"),
            all => format!("{} fields are not valid; see details.fields", all.len()),
        };
        let fields: Vec<Value> = fields
            .into_iter()
            .map(|(field, message)| json!({ "field": field, "message": message }))
            .collect();
        Self::new(StatusCode::BAD_REQUEST, "VALIDATION_ERROR", message)
            .with(json!({ "fields": fields }))
    }

    /// One field that is wrong.
    pub fn field(field: &str, why: impl Into<String>) -> Self {
        Self::invalid(vec![(field.to_owned(), why.into())])
    }

    /// A path that leads nowhere.
    pub(crate) fn no_route(path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        Self::new(
            StatusCode::NOT_FOUND,
            "ROUTE_NOT_FOUND",
            "there is nothing at this path; see /docs",
        )
        .with(json!({ "path": path }))
    }

    /// A fault of ours; the log has the cause.
    pub(crate) fn internal() -> Self {
        let message =
            "something went wrong on our side; retry, and quote the request id if it stays";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", message)
    }

    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Its code.
    pub fn code(&self) -> &str {
        &self.code
    }

    /// Its sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    fn body(self) -> Failure {
        let Self { code, message, details, .. } = self;
        note_refusal(&code);
        Failure {
            success: false,
            error: ErrorBody { code, message, details: Any(details) },
            meta: Meta::now(),
        }
    }

    /// The whole response.
    pub fn response(self) -> Response {
        let (status, retry_after) = (self.status, self.retry_after);
        let allow = self.allow.as_ref().and_then(|allow| allow.parse().ok());
        let body = Body::from_string(self.body().to_json_string());
        let mut response = Response::builder()
            .status(status)
            .content_type("application/json; charset=utf-8")
            .body(body);
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(http::header::RETRY_AFTER, seconds.into());
        }
        if let Some(methods) = allow {
            response.headers_mut().insert(http::header::ALLOW, methods);
        }
        response
    }
}

/// An id of a path. A malformed one is answered exactly like an unknown one.
pub(crate) fn path_id<T: FromStr>(noun: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_| {
        let text: String = text.chars().take(64).collect();
        let message = match noun {
            // The specification's own sentence.
            "cloud" => "the specified cloud does not exist".to_owned(),
            "api_key" => format!("the API key {text} does not exist"),
            "application" => format!("the OAuth application {text} does not exist"),
            noun => format!("the {noun} {text} does not exist"),
        };
        let code = format!("{}_NOT_FOUND", noun.to_uppercase());
        let field = format!("{noun}_id");
        Problem::new(StatusCode::NOT_FOUND, &code, message).with(json!({ field: text }))
    })
}

/// Every error that an operation may answer with.
#[derive(ApiResponse)]
pub(crate) enum ApiError {
    /// The request cannot be carried out as it stands.
    #[oai(status = 400)]
    BadRequest(Json<Box<Failure>>),
    /// Credentials are missing or wrong.
    #[oai(status = 401)]
    Unauthorized(Json<Box<Failure>>),
    /// The caller is known but may not do this.
    #[oai(status = 403)]
    Forbidden(Json<Box<Failure>>),
    /// The resource does not exist.
    #[oai(status = 404)]
    NotFound(Json<Box<Failure>>),
    /// The method does not exist for this path.
    #[oai(status = 405)]
    MethodNotAllowed(Json<Box<Failure>>),
    /// The state of the resource does not allow it.
    #[oai(status = 409)]
    Conflict(Json<Box<Failure>>, #[oai(header = "Retry-After")] Option<u64>),
    /// The body is too large.
    #[oai(status = 413)]
    TooLarge(Json<Box<Failure>>),
    /// The address is too long.
    #[oai(status = 414)]
    UriTooLong(Json<Box<Failure>>),
    /// The body is of another type than the operation takes.
    #[oai(status = 415)]
    UnsupportedMediaType(Json<Box<Failure>>),
    /// Too many requests.
    #[oai(status = 429)]
    TooMany(Json<Box<Failure>>, #[oai(header = "Retry-After")] Option<u64>),
    /// The header is too large.
    #[oai(status = 431)]
    HeadersTooLarge(Json<Box<Failure>>),
    /// A fault of the service. The log has the cause; the caller gets the request id.
    #[oai(status = 500)]
    Internal(Json<Box<Failure>>),
    /// The agent failed.
    #[oai(status = 502)]
    BadGateway(Json<Box<Failure>>),
    /// Not right now.
    #[oai(status = 503)]
    Unavailable(Json<Box<Failure>>, #[oai(header = "Retry-After")] Option<u64>),
    /// The agent took too long.
    #[oai(status = 504)]
    Timeout(Json<Box<Failure>>),
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        let (status, retry_after) = (problem.status.as_u16(), problem.retry_after);
        let body = Json(Box::new(problem.body()));
        match status {
            400 => Self::BadRequest(body),
            401 => Self::Unauthorized(body),
            403 => Self::Forbidden(body),
            404 => Self::NotFound(body),
            405 => Self::MethodNotAllowed(body),
            409 => Self::Conflict(body, retry_after),
            413 => Self::TooLarge(body),
            414 => Self::UriTooLong(body),
            415 => Self::UnsupportedMediaType(body),
            429 => Self::TooMany(body, retry_after),
            431 => Self::HeadersTooLarge(body),
            502 => Self::BadGateway(body),
            503 => Self::Unavailable(body, retry_after),
            504 => Self::Timeout(body),
            _ => Self::Internal(body),
        }
    }
}

impl From<Rejection> for ApiError {
    fn from(reason: Rejection) -> Self {
        Problem::from(reason).into()
    }
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        Problem::from(error).into()
    }
}

impl From<Problem> for poem::Error {
    fn from(problem: Problem) -> Self {
        Self::from_response(problem.response().into_response())
    }
}

impl From<Rejection> for Problem {
    fn from(reason: Rejection) -> Self {
        use Rejection as R;
        use StatusCode as S;
        let message = reason.to_string();
        let make = |status, code, details| Self::new(status, code, message.clone()).with(details);
        match reason {
            R::AgentNotFound(id) => {
                make(S::NOT_FOUND, "AGENT_NOT_FOUND", json!({ "agent_id": id }))
            }
            R::CloudNotFound(id) => {
                make(S::NOT_FOUND, "CLOUD_NOT_FOUND", json!({ "cloud_id": id }))
            }
            R::JobNotFound(id) => make(S::NOT_FOUND, "JOB_NOT_FOUND", json!({ "job_id": id })),
            R::JobExpired { id, expired_at } => make(
                S::NOT_FOUND,
                "JOB_EXPIRED",
                json!({ "job_id": id, "expired_at": expired_at.to_string() }),
            ),
            R::DeploymentNotFound(id) => {
                make(S::NOT_FOUND, "DEPLOYMENT_NOT_FOUND", json!({ "deployment_id": id }))
            }
            R::UploadNotFound(id) => {
                make(S::NOT_FOUND, "UPLOAD_NOT_FOUND", json!({ "upload_id": id }))
            }
            R::ApiKeyNotFound(id) => {
                make(S::NOT_FOUND, "API_KEY_NOT_FOUND", json!({ "api_key_id": id }))
            }
            R::AgentNameTaken(name) => {
                make(S::CONFLICT, "AGENT_NAME_TAKEN", json!({ "name": name }))
            }
            R::CloudNameTaken(name) => {
                make(S::CONFLICT, "CLOUD_NAME_TAKEN", json!({ "name": name }))
            }
            R::InvalidState { current, allowed } => make(
                S::CONFLICT,
                "INVALID_STATE",
                json!({ "current": current, "allowed": allowed }),
            ),
            R::AgentNotRunning => make(S::CONFLICT, "AGENT_NOT_RUNNING", json!({})),
            R::AgentNotReady => make(S::CONFLICT, "AGENT_NOT_READY", json!({})),
            R::StaleObject => make(S::CONFLICT, "STALE_OBJECT", json!({})),
            R::CloudNotEmpty { cloud_id, agents } => make(
                S::CONFLICT,
                "CLOUD_NOT_EMPTY",
                json!({ "cloud_id": cloud_id, "agents": agents }),
            ),
            R::CloudFull { max } => {
                make(S::FORBIDDEN, "QUOTA_EXCEEDED", json!({ "max_agents": max }))
            }
            R::DeploymentInProgress => make(S::CONFLICT, "DEPLOYMENT_IN_PROGRESS", json!({})),
            R::VersionNotFound(_) => Self::field("version", message),
            R::UploadNotReady => make(S::CONFLICT, "UPLOAD_NOT_READY", json!({})),
            R::UploadCorrupt => make(S::BAD_REQUEST, "UPLOAD_CORRUPT", json!({})),
            R::JobAlreadyFinished => make(S::CONFLICT, "JOB_ALREADY_FINISHED", json!({})),
            R::JobNotFinished => make(S::CONFLICT, "INVALID_STATE", json!({})),
            R::TooManyInFlight { max } => {
                let details = json!({ "window": "in_flight", "limit": max });
                make(S::TOO_MANY_REQUESTS, "RATE_LIMITED", details).retry_after(1)
            }
            R::TooManyQueued { max } => {
                let details = json!({ "window": "queued_jobs", "limit": max });
                make(S::TOO_MANY_REQUESTS, "RATE_LIMITED", details).retry_after(1)
            }
            R::TooManyJobs => {
                make(S::TOO_MANY_REQUESTS, "AGENT_OVERLOADED", json!({})).retry_after(1)
            }
            R::IdempotencyKeyReused => make(S::BAD_REQUEST, "IDEMPOTENCY_KEY_REUSED", json!({})),
            R::IdempotencyInProgress => {
                make(S::CONFLICT, "IDEMPOTENCY_IN_PROGRESS", json!({})).retry_after(1)
            }
            R::NodeNotFound(id) => make(S::NOT_FOUND, "NODE_NOT_FOUND", json!({ "node_id": id })),
            R::NodeRemoved(id) => make(S::CONFLICT, "INVALID_STATE", json!({ "node_id": id })),
            R::JoinTokenInvalid => make(S::UNAUTHORIZED, "INVALID_CREDENTIALS", json!({})),
            R::TooManyJoinTokens => make(S::TOO_MANY_REQUESTS, "RATE_LIMITED", json!({})),
            R::NodeInUse(id) => make(S::CONFLICT, "INVALID_STATE", json!({ "node_id": id })),
            R::LastNode => make(S::CONFLICT, "INVALID_STATE", json!({})),
            R::OrganizationNotFound(id) => {
                make(S::NOT_FOUND, "ORGANIZATION_NOT_FOUND", json!({ "organization_id": id }))
            }
            R::UserNotFound(id) => make(S::NOT_FOUND, "USER_NOT_FOUND", json!({ "user_id": id })),
            R::InvitationNotFound(id) => {
                make(S::NOT_FOUND, "INVITATION_NOT_FOUND", json!({ "invitation_id": id }))
            }
            R::ApplicationNotFound(id) => {
                make(S::NOT_FOUND, "APPLICATION_NOT_FOUND", json!({ "application_id": id }))
            }
            R::SecretNotFound(name) => {
                make(S::NOT_FOUND, "SECRET_NOT_FOUND", json!({ "name": name }))
            }
            R::WebhookNotFound(id) => {
                make(S::NOT_FOUND, "WEBHOOK_NOT_FOUND", json!({ "webhook_id": id }))
            }
            R::DeliveryNotFound(id) => {
                make(S::NOT_FOUND, "DELIVERY_NOT_FOUND", json!({ "delivery_id": id }))
            }
            R::EventNotFound(id) => {
                make(S::NOT_FOUND, "EVENT_NOT_FOUND", json!({ "event_id": id }))
            }
            R::SessionNotFound(_) => make(S::UNAUTHORIZED, "INVALID_CREDENTIALS", json!({})),
            R::OrganizationNameTaken(name) => {
                make(S::CONFLICT, "ORGANIZATION_NAME_TAKEN", json!({ "name": name }))
            }
            R::EmailTaken => make(S::CONFLICT, "EMAIL_TAKEN", json!({})),
            R::InvitationInvalid => make(S::BAD_REQUEST, "INVALID_GRANT", json!({})),
            R::RoleTooHigh(role) => {
                make(S::FORBIDDEN, "INSUFFICIENT_SCOPE", json!({ "role": role }))
            }
            R::LastOwner => make(S::CONFLICT, "INVALID_STATE", json!({})),
            R::QuotaExceeded { what, max } => {
                make(S::FORBIDDEN, "QUOTA_EXCEEDED", json!({ "of": what, "max": max }))
            }
            R::TooManyMembers { field, .. } => Self::field(&field, message),
            R::LoginThrottled { until } => {
                make(S::TOO_MANY_REQUESTS, "LOGIN_THROTTLED", json!({ "until": until.to_string() }))
                    .retry_after(until.since(crate::envelope::Current::get().at).as_secs().max(1))
            }
            R::GrantInvalid => make(S::BAD_REQUEST, "INVALID_GRANT", json!({})),
            R::NotOwner => {
                make(S::SERVICE_UNAVAILABLE, "OWNER_UNAVAILABLE", json!({})).retry_after(1)
            }
        }
    }
}

impl From<ServiceError> for Problem {
    fn from(error: ServiceError) -> Self {
        use StatusCode as S;
        let message = error.to_string();
        match error {
            ServiceError::Rejected(reason) => reason.into(),
            ServiceError::Ledger(cause) => {
                tracing::error!(error = %cause, "a change was not agreed");
                let code = match cause {
                    ProposeError::Unavailable => "CLUSTER_UNAVAILABLE",
                    ProposeError::Unknown | ProposeError::Rejected(_) => "OWNER_UNAVAILABLE",
                };
                Self::new(S::SERVICE_UNAVAILABLE, code, message).retry_after(1)
            }
            ServiceError::Call(error) => error.into(),
            ServiceError::Elsewhere => {
                Self::new(S::SERVICE_UNAVAILABLE, "OWNER_UNAVAILABLE", message).retry_after(1)
            }
            ServiceError::TooLong => Self::new(S::BAD_REQUEST, "INVALID_REQUEST", message),
            ServiceError::Kept(error) => {
                let details = serde_json::from_str(&error.details).unwrap_or_else(|_| json!({}));
                let status = match error.code.as_str() {
                    "INVOCATION_TIMEOUT" => S::GATEWAY_TIMEOUT,
                    _ => S::BAD_GATEWAY,
                };
                Self::new(status, &error.code, message).with(details)
            }
            ServiceError::Blob(BlobError::TooLarge(max)) => Self::new(
                S::PAYLOAD_TOO_LARGE,
                "PAYLOAD_TOO_LARGE",
                format!("the archive is larger than {max} bytes"),
            )
            .with(json!({ "max_bytes": max })),
            ServiceError::Blob(BlobError::Broken(_)) => {
                Self::new(S::BAD_REQUEST, "UPLOAD_CORRUPT", "the upload broke off; send it again")
            }
            ServiceError::Blob(BlobError::NoCopy) => {
                Self::new(S::SERVICE_UNAVAILABLE, "OWNER_UNAVAILABLE", message).retry_after(1)
            }
            ServiceError::Blob(BlobError::Disk(cause)) => {
                tracing::error!(error = %cause, "a blob could not be kept");
                Self::internal()
            }
            ServiceError::Payload(cause) => {
                tracing::error!(error = %cause, "a payload could not be read");
                Self::internal()
            }
        }
    }
}

impl From<CallError> for Problem {
    fn from(error: CallError) -> Self {
        use StatusCode as S;
        let (code, details) = error.explained();
        let status = match error {
            CallError::NoSlot(NoSlot::Overloaded) => S::TOO_MANY_REQUESTS,
            CallError::NoSlot(NoSlot::Unavailable) | CallError::Unreached | CallError::Busy => {
                S::SERVICE_UNAVAILABLE
            }
            CallError::NoSlot(NoSlot::Timeout) | CallError::Timeout(_) => S::GATEWAY_TIMEOUT,
            CallError::Agent { .. }
            | CallError::Reported { .. }
            | CallError::Broken(_)
            | CallError::BadResponse(_)
            | CallError::TooLarge(_) => S::BAD_GATEWAY,
        };
        let problem = Self::new(status, code, error.to_string()).with(details);
        let waits = status == S::TOO_MANY_REQUESTS || status == S::SERVICE_UNAVAILABLE;
        if waits { problem.retry_after(1) } else { problem }
    }
}
