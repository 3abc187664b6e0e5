//! What surrounds every request: a name, limits, identification, the envelope for whatever goes
//! wrong, and a line in the log.

use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use domain::RequestId;
use futures::{FutureExt as _, StreamExt as _};
use http::{HeaderValue, Method, StatusCode, header};
use poem::{
    Body, Endpoint, EndpointExt as _, Error, Request, Response,
    error::{MethodNotAllowedError, NotFoundError, ReadBodyError},
};
use poem_openapi::error::{
    AuthorizationError, ContentTypeError, ParseMultipartError, ParseParamError, ParsePathError,
    ParseRequestPayloadError,
};
use serde_json::json;
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::{
    Shared,
    caller::{Identified, identified, identify},
    envelope::Current,
    error::Problem,
};

/// Most bytes of a JSON body.
const BODY_BYTES_MAX: usize = 1024 * 1024;
/// Most bytes of an invocation's body: 6 MiB of input and its wrapping.
const INVOKE_BODY_BYTES_MAX: usize = 6 * 1024 * 1024 + 64 * 1024;
/// Longest address.
const URI_BYTES_MAX: usize = 8 * 1024;
/// Largest header.
const HEADER_BYTES_MAX: usize = 32 * 1024;
/// Longest request id of a client that is written to our log.
const CLIENT_REQUEST_ID_MAX: usize = 128;

/// How much of a refused body is read, and for how long.
const DISCARD_BYTES_MAX: usize = 16 * 1024 * 1024;
const DISCARD_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);

/// Puts the layers around the routes.
pub(crate) fn around(
    shared: Arc<Shared>,
    routes: impl Endpoint<Output = Response>,
) -> impl Endpoint<Output = Response> {
    let routes = Arc::new(routes);
    poem::endpoint::make(move |request| {
        let (shared, routes) = (Arc::clone(&shared), Arc::clone(&routes));
        async move { Ok::<_, Error>(serve(&shared, &*routes, request).await) }
    })
    .map_to_response()
}

async fn serve(
    shared: &Shared,
    routes: &impl Endpoint<Output = Response>,
    mut request: Request,
) -> Response {
    let _counted = Counted::one_more(&shared.requests);
    let world = &shared.service.world;
    let current =
        Current { request_id: world.mint(RequestId::new), at: world.now(), began: Instant::now() };
    let span = tracing::debug_span!("request", request_id = %current.request_id);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let client_id = client_request_id(&request);
    let answer = async {
        match admit(shared, &mut request).await {
            Ok(()) => call(routes, request).await,
            Err(problem) => {
                discard(&mut request).await;
                problem.response()
            }
        }
    };
    let mut response = current.scope(answer.instrument(span)).await;
    if let Ok(value) = HeaderValue::from_str(&current.request_id.to_string()) {
        response.headers_mut().insert("x-request-id", value);
    }
    let status = response.status().as_u16();
    let elapsed = current.began.elapsed();
    tracing::debug!(request_id = %current.request_id, client_request_id = client_id, %method, path, status, ?elapsed, "answered");
    response
}

/// One request, for as long as it is served.
struct Counted<'r>(&'r AtomicUsize);

impl<'r> Counted<'r> {
    fn one_more(requests: &'r AtomicUsize) -> Self {
        requests.fetch_add(1, Relaxed);
        Self(requests)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Reads a refused body, up to a limit: many clients look for the answer only after they have sent
/// everything.
async fn discard(request: &mut Request) {
    let reading = async {
        let (mut bytes, mut left) = (request.take_body().into_bytes_stream(), DISCARD_BYTES_MAX);
        while let Some(Ok(part)) = bytes.next().await {
            left = left.saturating_sub(part.len());
            if left == 0 {
                break;
            }
        }
    };
    // A client that sends no more is not waited for.
    let _ = tokio::time::timeout(DISCARD_WITHIN, reading).await;
}

fn client_request_id(request: &Request) -> Option<String> {
    let text = request.headers().get("x-request-id")?.to_str().ok()?;
    let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
    (visible && text.len() <= CLIENT_REQUEST_ID_MAX).then(|| text.to_owned())
}

/// Whether the request may go on; it leaves with a bounded body and a known caller.
async fn admit(shared: &Shared, request: &mut Request) -> Result<(), Problem> {
    if request.uri().to_string().len() > URI_BYTES_MAX {
        let message = format!("the address is longer than {URI_BYTES_MAX} bytes");
        return Err(Problem::new(StatusCode::URI_TOO_LONG, "INVALID_REQUEST", message));
    }
    let header_bytes: usize =
        request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if header_bytes > HEADER_BYTES_MAX {
        let message = format!("the header is larger than {HEADER_BYTES_MAX} bytes");
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        return Err(Problem::new(status, "INVALID_REQUEST", message));
    }
    let identity = identify(shared, request.headers());
    let is_known = identity.is_ok();
    request.extensions_mut().insert(Identified(identity));
    read_body(request, is_known).await
}

fn announced_length(request: &Request) -> Option<usize> {
    let length = request.headers().get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Routes that take a large body as a stream and bound it themselves.
fn takes_stream(request: &Request) -> bool {
    let path = request.uri().path();
    let is_multipart = request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.starts_with("multipart/form-data"));
    let is_upload = path.starts_with("/v1/uploads/") && request.method() == Method::PUT
        || path == "/v1/uploads" && is_multipart;
    is_upload && announced_length(request).is_none_or(|length| length > BODY_BYTES_MAX)
}

/// Reads the whole body before anything is decided, up to the limit of its route: a connection whose
/// request is left unread can't be used again, and many clients take that for a failure.
async fn read_body(request: &mut Request, is_known: bool) -> Result<(), Problem> {
    if takes_stream(request) {
        return Ok(());
    }
    let path = request.uri().path();
    let is_call = is_known && (path.ends_with("/invoke") || path.contains("/http/"));
    let most = if is_call { INVOKE_BODY_BYTES_MAX } else { BODY_BYTES_MAX };
    if announced_length(request).is_some_and(|length| length > most) {
        return Err(too_large(most));
    }
    let mut stream = request.take_body().into_bytes_stream();
    let mut whole = bytes::BytesMut::new();
    while let Some(part) = stream.next().await {
        let part = part.map_err(|_| {
            let message = "the body could not be read to its end";
            Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message)
        })?;
        if whole.len() + part.len() > most {
            request.set_body(Body::from_bytes_stream(stream));
            return Err(too_large(most));
        }
        whole.extend_from_slice(&part);
    }
    request.set_body(whole.freeze());
    Ok(())
}

fn too_large(most: usize) -> Problem {
    let message = format!("the body is larger than {most} bytes");
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE", message)
        .with(json!({ "max_bytes": most }))
}

async fn call(routes: &impl Endpoint<Output = Response>, request: Request) -> Response {
    let credentials = identified(&request).err();
    let (path, is_head) = (request.uri().path().to_owned(), request.method() == Method::HEAD);
    let answered = AssertUnwindSafe(routes.call(request)).catch_unwind().await;
    let mut response = match answered {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => dressed(error, credentials, &path),
        Err(_) => {
            tracing::error!(path, "a handler panicked");
            Problem::internal().response()
        }
    };
    if is_head {
        response.set_body(Body::empty());
    }
    response
}

/// An error of the framework in our own words.
fn dressed(error: Error, credentials: Option<Problem>, path: &str) -> Response {
    if error.is_from_response() {
        return error.into_response();
    }
    problem_of(&error, credentials, path).response()
}

fn problem_of(error: &Error, credentials: Option<Problem>, path: &str) -> Problem {
    if error.is::<NotFoundError>() || error.is::<ParsePathError>() {
        return Problem::no_route(path);
    }
    if error.is::<MethodNotAllowedError>() {
        let message = "this path does not take this method; see /docs";
        return Problem::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message)
            .allow(crate::document::methods_of(path));
    }
    if error.is::<AuthorizationError>() {
        return credentials.unwrap_or_else(Problem::internal);
    }
    if error.is::<ContentTypeError>() {
        let message = "this operation does not take this Content-Type; see /docs";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Problem::new(status, "UNSUPPORTED_MEDIA_TYPE", message);
    }
    if let Some(param) = error.downcast_ref::<ParseParamError>() {
        return Problem::field(param.name, plain(&param.reason));
    }
    if let Some(body) = error.downcast_ref::<ReadBodyError>() {
        return unreadable_body(body);
    }
    if error.is::<ParseMultipartError>() || error.is::<ParseRequestPayloadError>() {
        let message = "the body can't be read; see /docs for its shape";
        return Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message);
    }
    match error.status() {
        StatusCode::UNAUTHORIZED => credentials.unwrap_or_else(Problem::internal),
        status if status.is_client_error() => {
            Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", "the request can't be read")
        }
        _ => {
            tracing::error!(%error, path, "a request failed");
            Problem::internal()
        }
    }
}

/// A body that a handler could not read: the connection broke, since limits were checked before.
pub(crate) fn unreadable_body(_: &ReadBodyError) -> Problem {
    let message = "the body could not be read to its end";
    Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message)
}

/// The framework's words for a wrong parameter, in ours.
fn plain(reason: &str) -> String {
    if let Some((_, rule)) = reason.split_once("verification failed. ") {
        let number = |name: &str| {
            let rest = rule.strip_prefix(name)?.strip_prefix('(')?;
            rest.split([',', ')']).next().map(str::to_owned)
        };
        return match (number("minimum"), number("maximum")) {
            (Some(least), _) => format!("must be at least {least}"),
            (_, Some(most)) => format!("must be at most {most}"),
            _ => "is not valid".to_owned(),
        };
    }
    let known = [
        ("bool", "must be true or false"),
        ("float", "must be a number"),
        ("double", "must be a number"),
        ("int", "must be a whole number"),
    ];
    let found = known.iter().find(|(word, _)| reason.contains(word));
    found.map_or("is missing or not valid", |(_, why)| why).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_parameters_are_told_in_our_words() {
        let reason =
            "failed to parse parameter `limit`: verification failed. minimum(1, exclusive: false)";
        assert_eq!(plain(reason), "must be at least 1");
        assert_eq!(
            plain("x verification failed. maximum(100, exclusive: false)"),
            "must be at most 100"
        );
        assert_eq!(
            plain("failed to parse \"optional_integer(uint32)\": invalid digit"),
            "must be a whole number"
        );
        assert_eq!(plain("failed to parse \"optional_boolean\": no"), "must be true or false");
    }
}
