//! What surrounds every request: a name, limits, identification, the envelope for whatever goes
//! wrong, and a line in the log.

use std::{net::IpAddr, panic::AssertUnwindSafe, sync::Arc};

use actors::{
    call::{Consistency, auditing},
    limiter::{Admission, Standing},
    world::World,
};
use domain::{RequestId, Timestamp, account::Application};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
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
use tokio::{sync::oneshot, time::Instant};
use tracing::Instrument as _;

use crate::{
    Shared,
    access::{self, Need, Operation},
    audit::Watched,
    caller::{
        ClientAddress, Identified, Identity, NotLetIn, identified, identify, shows_credentials,
    },
    envelope::{Current, refusal},
    error::Problem,
};

/// Most bytes of a JSON body.
const BODY_BYTES_MAX: usize = 1024 * 1024;
/// Most bytes of an invocation's body: 6 MiB of input and its wrapping.
const INVOKE_BODY_BYTES_MAX: usize = 6 * 1024 * 1024 + 64 * 1024;
/// Longest body that is looked at for who an application is; what shows a secret is shorter.
const PROOF_BYTES_MAX: usize = 64 * 1024;
/// Longest address.
const URI_BYTES_MAX: usize = 8 * 1024;
/// Largest header.
const HEADER_BYTES_MAX: usize = 32 * 1024;
/// Longest request id of a client that is written to our log.
const CLIENT_REQUEST_ID_MAX: usize = 128;

/// How much of a refused body is read, and for how long.
const DISCARD_BYTES_MAX: usize = 16 * 1024 * 1024;
const DISCARD_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);

/// Operations whose answer goes on for as long as the client listens: it ends when the credentials do. Calls
/// of agents go on to their end, as they do without a stream.
const WATCHING: [&str; 3] = ["getAgentLogs", "getDeploymentLogs", "watchCluster"];
/// Between looks whether the credentials of a stream are still good.
const LOOKED_AT_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

/// Puts the layers around the routes.
pub(crate) fn around(
    shared: Arc<Shared>,
    routes: impl Endpoint<Output = Response> + 'static,
) -> impl Endpoint<Output = Response> {
    let routes = Arc::new(routes);
    poem::endpoint::make(move |request| {
        let (shared, routes) = (Arc::clone(&shared), Arc::clone(&routes));
        async move { Ok::<_, Error>(serve(&shared, &routes, request).await) }
    })
    .map_to_response()
}

async fn serve<E: Endpoint<Output = Response> + 'static>(
    shared: &Arc<Shared>,
    routes: &Arc<E>,
    mut request: Request,
) -> Response {
    let _counted = shared.traffic.one_more();
    let world = &shared.service.world;
    let current =
        Current { request_id: world.mint(RequestId::new), at: world.now(), began: Instant::now() };
    let span = tracing::debug_span!("request", request_id = %current.request_id);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let client_id = client_request_id(&request);
    let answer = async {
        let visit = Visit::of(shared, &mut request).await;
        let (standing, mut response) = visit.serve(shared, routes, request).await;
        tell_standing(&mut response, standing);
        response
    };
    let mut response = current.scope(Box::pin(answer.instrument(span))).await;
    if let Ok(value) = HeaderValue::from_str(&current.request_id.to_string()) {
        response.headers_mut().insert("x-request-id", value);
    }
    if response.status() == StatusCode::UNAUTHORIZED {
        // RFC 9110, section 15.5.2; who said already how to authenticate meant it.
        let how = HeaderValue::from_static("Bearer realm=\"roost\"");
        response.headers_mut().entry(header::WWW_AUTHENTICATE).or_insert(how);
    }
    let status = response.status().as_u16();
    let elapsed = current.began.elapsed();
    shared.traffic.answered(response.status(), current.began);
    tracing::debug!(request_id = %current.request_id, client_request_id = client_id, %method, path, status, ?elapsed, "answered");
    response
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

/// What is known of a request before anything is decided.
struct Visit {
    address: ClientAddress,
    identity: Result<Arc<Identity>, Problem>,
    /// Whose good key is used from where it may not be.
    turned_away: Option<Arc<Identity>>,
    operation: Option<Operation>,
    origin: Option<HeaderValue>,
    consistency: Result<Consistency, Problem>,
    /// Whether this node may say whose credentials these are, or goes on without being sure.
    vouched: bool,
}

impl Visit {
    async fn of(shared: &Shared, request: &mut Request) -> Self {
        let address = client_address(shared, request);
        let operation = access::operation_of(request.method(), request.uri().path());
        let consistency = match operation.map(|operation| operation.id) {
            // What stands there is the agent's.
            Some("passThrough") => Ok(Consistency::Linearizable),
            Some(_) | None => consistency(request),
        };
        let goes_on = goes_on(operation, consistency.as_ref().ok());
        let world = &shared.service.world;
        // Who shows nothing is turned away by any node.
        let vouched = operation.is_none_or(|operation| operation.need == Need::Nobody)
            || world.vouches_now()
            || !shows_credentials(request.headers())
            || world.vouches(!goes_on).await
            || goes_on;
        let (identity, turned_away) = match identify(shared, request.headers(), address).await {
            Ok(identity) => (Ok(identity), None),
            Err(NotLetIn::Stranger(problem)) => (Err(problem), None),
            Err(NotLetIn::Known(identity, problem)) => (Err(problem), Some(identity)),
        };
        let origin = request.headers().get(header::ORIGIN).filter(|origin| {
            let allowed = &shared.settings.cors_origins;
            origin.to_str().is_ok_and(|origin| allowed.iter().any(|known| known == origin))
        });
        let origin = origin.cloned();
        request.extensions_mut().insert(address);
        request.extensions_mut().insert(Identified(identity.clone()));
        Self { address, identity, turned_away, operation, origin, consistency, vouched }
    }

    async fn serve<E: Endpoint<Output = Response> + 'static>(
        self,
        shared: &Arc<Shared>,
        routes: &Arc<E>,
        mut request: Request,
    ) -> (Standing, Response) {
        let admission = self.count(shared, &mut request).await;
        let standing = match admission {
            Admission::Allowed(standing) => standing,
            Admission::Refused(standing) => {
                let problem = too_many(standing, shared.service.world.now());
                let watched = self.watched(&request);
                let refused = Box::pin(self.refuse(shared, &mut request, watched, problem)).await;
                return (standing, refused);
            }
            Admission::Unknown(standing) if self.is_look_at_trouble() => standing,
            Admission::Unknown(standing) => {
                Box::pin(discard(&mut request)).await;
                return (standing, self.dressed(cannot_count().response()));
            }
        };
        if let Some(answer) = self.preflight(&request) {
            return (standing, answer);
        }
        let watched = self.watched(&request);
        let response = match self.admit(shared, &mut request).await {
            Ok(()) => match watched {
                Some(watched) => carry_through(shared, routes, request, watched).await,
                None => {
                    let again = self.again(&request);
                    let response = self.read(shared, call(routes, request)).await;
                    match again {
                        Some(again) => again.end_with_credentials(shared, response),
                        None => response,
                    }
                }
            },
            Err(problem) => {
                let refused = Box::pin(self.refuse(shared, &mut request, watched, problem)).await;
                return (standing, refused);
            }
        };
        (standing, self.dressed(response))
    }

    /// Turns a call away, and writes down which change it would have been.
    async fn refuse(
        &self,
        shared: &Shared,
        request: &mut Request,
        watched: Option<Watched>,
        problem: Problem,
    ) -> Response {
        discard(request).await;
        let whose = watched.as_ref().and_then(Watched::whose);
        if let Some((watched, whose)) = watched.zip(whose) {
            let code = problem.code().to_owned();
            shared.audit(shared.audited(watched, whose), Some(code)).await;
        }
        self.dressed(problem.response())
    }

    /// Answers a read as fresh as it asks to be; a stale one is told how old it may be.
    async fn read(&self, shared: &Shared, call: impl Future<Output = Response>) -> Response {
        if self.consistency.as_ref().ok() != Some(&Consistency::Stale) {
            return call.await;
        }
        let contact = shared.service.world.ports.cluster.contact();
        let mut response = Consistency::Stale.scope(call).await;
        let headers = response.headers_mut();
        let known = if contact.knows_leaders { "true" } else { "false" };
        headers.insert("x-known-leader", HeaderValue::from_static(known));
        if let Some(last) = contact.last.and_then(|last| u64::try_from(last.as_millis()).ok()) {
            headers.insert("x-last-contact-ms", last.into());
        }
        response
    }

    /// An operator's look at the cluster must not hang on the cluster's being well.
    fn is_look_at_trouble(&self) -> bool {
        let is_operators =
            self.operation.is_some_and(|operation| matches!(operation.need, Need::Operator(_)));
        is_operators && self.consistency.as_ref().ok() == Some(&Consistency::Stale)
    }

    /// Counts the call: for its organization, or for its address if nobody knows whose it is.
    async fn count(&self, shared: &Shared, request: &mut Request) -> Admission {
        let world = &shared.service.world;
        let path = request.uri().path();
        let is_exempt = matches!(path, "/healthz" | "/readyz")
            || path.starts_with("/.well-known/")
            || self.operation.is_some_and(|operation| operation.id == "putUpload")
            // A browser asks that for a page that counts by itself.
            || self.preflight(request).is_some();
        // Whoever guesses passwords does not do so on the account of a key.
        let logs_in = self.operation.is_some_and(|operation| operation.id == "login");
        match &self.identity {
            Ok(identity) if is_exempt => Admission::Allowed(world.standing(identity.tenant)),
            Ok(identity) if !logs_in => count_known(world, identity).await,
            Err(_) if is_exempt => Admission::Allowed(world.standing_of_address(self.address.0)),
            Ok(_) | Err(_) => match self.application(shared, request).await {
                Some(application) => world.admit(application.tenant).await,
                None => world.admit_address(self.address.0).await,
            },
        }
    }

    /// The application that proves itself, where applications do: in a header, or in a short body (RFC 6749,
    /// section 2.3.1).
    async fn application(
        &self,
        shared: &Shared,
        request: &mut Request,
    ) -> Option<Arc<Application>> {
        let proves = ["exchangeToken", "revokeToken", "introspectToken"];
        self.operation.filter(|operation| proves.contains(&operation.id))?;
        if let Some(known) = shared.client_by_header(request.headers()) {
            return Some(known);
        }
        announced_length(request).filter(|length| *length <= PROOF_BYTES_MAX)?;
        read_body(request, false).await.ok()?;
        let body = request.take_body().into_bytes().await.ok()?;
        request.set_body(body.clone());
        shared.client_by_body(&body)
    }

    /// Whether the request may go on; it leaves with a bounded body and a caller who may do this.
    async fn admit(&self, shared: &Shared, request: &mut Request) -> Result<(), Problem> {
        check_size(request)?;
        read_body(request, self.identity.is_ok()).await?;
        self.consistency.as_ref().map_err(Problem::clone)?;
        let Some(operation) = self.operation.filter(|operation| operation.need != Need::Nobody)
        else {
            return Ok(());
        };
        if !self.vouched {
            return Err(cannot_vouch());
        }
        let identity = self.identity.as_ref().map_err(Problem::clone)?;
        permitted(shared, operation, identity, request.uri().path())
    }

    /// What it takes to identify the caller of a stream once more.
    fn again(&self, request: &Request) -> Option<Again> {
        let operation = self.operation.filter(|operation| WATCHING.contains(&operation.id))?;
        let (headers, path) = (request.headers().clone(), request.uri().path().to_owned());
        Some(Again { operation, headers, path, address: self.address })
    }

    fn watched(&self, request: &Request) -> Option<Watched> {
        let operation =
            self.operation.filter(|operation| operation.is_audited(request.method()))?;
        // Credentials that nobody asked for say nothing about the call.
        let identity = match operation.need == Need::Nobody {
            true => None,
            false => {
                let known = self.identity.as_ref().ok().or(self.turned_away.as_ref())?;
                Some(Arc::clone(known))
            }
        };
        let target = request.uri().path().to_owned();
        Some(Watched { operation, identity, address: self.address, target })
    }

    /// A browser asks whether a front end may call.
    fn preflight(&self, request: &Request) -> Option<Response> {
        let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        if request.method() != Method::OPTIONS || self.origin.is_none() {
            return None;
        }
        let answer = Response::builder()
            .header(header::ACCESS_CONTROL_ALLOW_METHODS, wanted)
            .header(
                header::ACCESS_CONTROL_ALLOW_HEADERS,
                "authorization, content-type, accept, idempotency-key, if-match, last-event-id, \
                 x-request-id",
            )
            .header(header::ACCESS_CONTROL_MAX_AGE, "600")
            .finish();
        Some(self.dressed(answer))
    }

    /// With what a browser wants to see where a front end may call.
    fn dressed(&self, mut response: Response) -> Response {
        let Some(origin) = &self.origin else { return response };
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        response
    }
}

/// Counts a call for its key, if that has a limit of its own, and for its organization.
async fn count_known(world: &Arc<World>, identity: &Identity) -> Admission {
    let Some((key, most)) = identity.own_rate() else { return world.admit(identity.tenant).await };
    let own = match world.admit_key(key, most).await {
        Admission::Allowed(own) => own,
        refused @ (Admission::Refused(_) | Admission::Unknown(_)) => return refused,
    };
    match world.admit(identity.tenant).await {
        Admission::Allowed(all) if own.remaining < all.remaining => Admission::Allowed(own),
        all @ (Admission::Allowed(_) | Admission::Refused(_) | Admission::Unknown(_)) => all,
    }
}

/// Calls of agents and stale reads go on without a majority; whose they are is known as of the last word from
/// it.
fn goes_on(operation: Option<Operation>, consistency: Option<&Consistency>) -> bool {
    operation.is_some_and(|operation| matches!(operation.id, "invokeAgent" | "passThrough"))
        || consistency == Some(&Consistency::Stale)
}

/// A caller who is identified more than once.
struct Again {
    operation: Operation,
    headers: http::HeaderMap,
    path: String,
    address: ClientAddress,
}

impl Again {
    async fn is_good(&self, shared: &Shared) -> bool {
        if !shared.service.world.vouches(false).await {
            // Nobody can tell; who is here may stay.
            return true;
        }
        let Ok(identity) = identify(shared, &self.headers, self.address).await else {
            return false;
        };
        permitted(shared, self.operation, &identity, &self.path).is_ok()
    }

    fn end_with_credentials(self, shared: &Arc<Shared>, mut response: Response) -> Response {
        let kind = response.header(header::CONTENT_TYPE).unwrap_or_default();
        if !kind.starts_with("text/event-stream") {
            return response;
        }
        let shared = Arc::clone(shared);
        let ended = async move {
            loop {
                tokio::time::sleep(LOOKED_AT_EVERY).await;
                if !self.is_good(&shared).await {
                    return;
                }
            }
        };
        let body = response.take_body().into_bytes_stream().take_until(Box::pin(ended));
        response.set_body(Body::from_bytes_stream(body));
        response
    }
}

/// Carries out a change and writes it down, also when the client hangs up meanwhile: what was begun is
/// in the audit log.
async fn carry_through<E: Endpoint<Output = Response> + 'static>(
    shared: &Arc<Shared>,
    routes: &Arc<E>,
    request: Request,
    watched: Watched,
) -> Response {
    let told = begin(shared, call(routes, request), watched);
    told.await.unwrap_or_else(|_| Problem::internal().response())
}

/// Begins a change as a task of its own, which goes on without whoever waits for its answer.
fn begin(
    shared: &Arc<Shared>,
    call: BoxFuture<'static, Response>,
    watched: Watched,
) -> oneshot::Receiver<Response> {
    let shared = Arc::clone(shared);
    let (tell, told) = oneshot::channel();
    let change = async move {
        let (response, row) = match watched.whose() {
            Some(whose) => auditing::audited(shared.audited(watched, whose), call).await,
            None => {
                let of_this_call = Arc::clone(&shared);
                let make = move |whose| of_this_call.audited(watched, whose);
                auditing::of_stranger(make, call).await
            }
        };
        let refused = response.status().is_client_error() || response.status().is_server_error();
        let code = refused.then(|| refusal().unwrap_or_else(|| response.status().to_string()));
        if let Some(row) = row {
            Box::pin(shared.audit(row, code)).await;
        }
        // The client may be gone.
        let _ = tell.send(response);
    };
    actors::root::detach(Current::get().scope(change));
    told
}

/// How fresh a request asks its reads to be.
fn consistency(request: &Request) -> Result<Consistency, Problem> {
    let query = request.uri().query().unwrap_or_default();
    let named = query.split('&').find_map(|pair| pair.strip_prefix("consistency="));
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    match named {
        None | Some("linearizable") => Ok(Consistency::Linearizable),
        Some("stale") if reads => Ok(Consistency::Stale),
        Some("stale") => Err(Problem::field("consistency", "stale is for reads alone")),
        Some(_) => Err(Problem::field("consistency", "must be linearizable or stale")),
    }
}

/// Whether a caller may do something to what a path names.
fn permitted(
    shared: &Shared,
    operation: Operation,
    identity: &Identity,
    path: &str,
) -> Result<(), Problem> {
    let operator = shared.service.world.directory().read().operator();
    operation.permit(identity, operator == Some(identity.tenant.org))?;
    touches(identity, path)
}

/// A key for certain agents sees no others: they are not there.
fn touches(identity: &Identity, path: &str) -> Result<(), Problem> {
    if identity.agent_ids().is_empty() {
        return Ok(());
    }
    let mut parts = path.split('/').skip(2);
    match (parts.next(), parts.next()) {
        (Some("agents"), Some(id)) => {
            let agent = crate::agents::agent_id(id)?;
            match identity.may_touch(agent) {
                true => Ok(()),
                false => Err(domain::Rejection::AgentNotFound(agent).into()),
            }
        }
        _ => Ok(()),
    }
}

/// The address that a call comes from. What a header says of it counts only from a trusted proxy:
/// then it is the last address that no trusted proxy has.
fn client_address(shared: &Shared, request: &Request) -> ClientAddress {
    let peer = request.remote_addr().as_socket_addr().map(|peer| peer.ip().to_canonical());
    let trusted = &shared.settings.trusted_proxies;
    let is_trusted = |ip: IpAddr| trusted.iter().any(|range| range.contains(ip));
    if !peer.is_some_and(is_trusted) {
        return ClientAddress(peer);
    }
    let lines = request.headers().get_all("x-forwarded-for");
    let text: Vec<&str> = lines.iter().filter_map(|line| line.to_str().ok()).collect();
    let text = text.join(",");
    let told = text.rsplit(',').map(|one| one.trim().parse::<IpAddr>().ok());
    let first = told.map_while(|ip| ip).find(|ip| !is_trusted(*ip));
    ClientAddress(first.map(|ip| ip.to_canonical()).or(peer))
}

fn too_many(standing: Standing, now: Timestamp) -> Problem {
    let window = if standing.is_day { "day" } else { "minute" };
    let message = format!(
        "there were {} calls within a {window}, which is the limit; slow down, or ask for a higher one",
        standing.limit
    );
    let reset_at = Timestamp::from_millis(standing.reset * 1000);
    let details =
        json!({ "window": window, "limit": standing.limit, "reset_at": reset_at.to_string() });
    let seconds = standing.reset.saturating_sub(now.seconds()).max(1);
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "RATE_LIMITED", message)
        .with(details)
        .retry_after(seconds)
}

fn cannot_count() -> Problem {
    let message = "the cluster can't count this call right now; retry in a moment";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "OWNER_UNAVAILABLE", message).retry_after(1)
}

fn cannot_vouch() -> Problem {
    let message = "this node does not hear of the cluster and can't tell whether these credentials are \
                   still good; retry in a moment, or at another node";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "CLUSTER_UNAVAILABLE", message).retry_after(1)
}

fn tell_standing(response: &mut Response, standing: Standing) {
    let headers = response.headers_mut();
    headers.insert("x-ratelimit-limit", standing.limit.into());
    headers.insert("x-ratelimit-remaining", standing.remaining.into());
    headers.insert("x-ratelimit-reset", standing.reset.into());
}

fn check_size(request: &Request) -> Result<(), Problem> {
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
    Ok(())
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

/// The call itself, on the heap: what it takes differs much from call to call, and what goes around it would hold
/// room for the largest several times over.
fn call<E: Endpoint<Output = Response> + 'static>(
    routes: &Arc<E>,
    request: Request,
) -> BoxFuture<'static, Response> {
    let routes = Arc::clone(routes);
    let credentials = identified(&request).err();
    let (path, is_head) = (request.uri().path().to_owned(), request.method() == Method::HEAD);
    let answer = async move {
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
    };
    answer.boxed()
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
    use poem::endpoint::BoxEndpoint;

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

    type Routes = Arc<BoxEndpoint<'static>>;

    fn outside<F>(_: impl Fn(&'static Arc<Shared>, &'static Routes, Request) -> F) -> usize {
        size_of::<F>()
    }

    fn inside<F>(_: impl Fn(Visit, &'static Arc<Shared>, &'static Routes, Request) -> F) -> usize {
        size_of::<F>()
    }

    /// It is made anew and moved for each call.
    #[test]
    fn what_surrounds_a_call_takes_little_room() {
        let (outside, inside) = (outside(serve), inside(Visit::serve));
        assert!(outside <= 2048 && inside <= 4096, "{outside} and {inside} bytes");
    }
}
