//! `/v1/agents/{id}/http/…`: an authenticated way to the agent itself, for any method and path.
//!
//! The agent's status and body pass unchanged; only our own errors wear the envelope. Credentials and
//! headers of the connection do not pass in, and cookies and CORS do not pass out: the agent speaks
//! for itself, not for this service.

use std::{sync::Arc, time::Duration};

use actors::{call::ServiceError, flight::Flight, invocation::CallError};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use poem::{Body, Endpoint, Request, Response};
use tokio::time::Instant;

use crate::{Shared, agents::agent_id, caller::identified, error::Problem};

/// The endpoint.
pub(crate) struct PassThrough(pub(crate) Arc<Shared>);

/// Headers of one connection only (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

fn passes_in(name: &HeaderName) -> bool {
    let own = [
        header::AUTHORIZATION,
        header::PROXY_AUTHORIZATION,
        header::COOKIE,
        header::HOST,
        header::CONTENT_LENGTH,
        header::EXPECT,
    ];
    !HOP_BY_HOP.contains(name) && !own.contains(name) && name != "x-api-key"
}

fn passes_out(name: &HeaderName) -> bool {
    !HOP_BY_HOP.contains(name)
        && *name != header::SET_COOKIE
        && *name != header::STRICT_TRANSPORT_SECURITY
        && !name.as_str().starts_with("access-control-")
}

impl Endpoint for PassThrough {
    type Output = Response;

    async fn call(&self, request: Request) -> poem::Result<Response> {
        Ok(self.pass(request).await.unwrap_or_else(Problem::response))
    }
}

impl PassThrough {
    async fn pass(&self, mut request: Request) -> Result<Response, Problem> {
        let identity = identified(&request)?;
        if request.headers().contains_key(header::UPGRADE) {
            return Err(Problem::field(
                "Upgrade",
                "is not passed on; use plain requests or server-sent events",
            ));
        }
        let id = agent_id(request.raw_path_param("id").unwrap_or_default())?;
        self.0.service.serving(identity.tenant, id).map_err(Problem::from)?;
        let flight = self.0.service.world.fly(identity.tenant).await?;
        let body = request.take_body().into_bytes().await;
        let body = body.map_err(|error| crate::layers::unreadable_body(&error))?;
        let (timeout, _) = self.0.service.world.settings.sync_timeout;
        self.exchange(id, &request, body, timeout, flight).await
    }

    async fn exchange(
        &self,
        id: domain::AgentId,
        request: &Request,
        body: Bytes,
        timeout: Duration,
        flight: Flight,
    ) -> Result<Response, Problem> {
        let world = &self.0.service.world;
        let deadline = Instant::now() + timeout;
        let began = Instant::now();
        let (slot, answer) = loop {
            let slot = world.slot(id, deadline).await.map_err(CallError::from)?;
            let outbound = outbound(request, body.clone())?;
            let sent = world.send_to(&slot.endpoint, outbound);
            let sent = tokio::time::timeout_at(deadline, sent).await;
            match sent.unwrap_or(Err(CallError::Timeout(timeout))) {
                Err(CallError::Unreached) => world.give_up(&slot),
                Err(CallError::Busy) => slot.endpoint.mark_busy(),
                answer => break (slot, answer),
            }
        };
        let well = answer.as_ref().is_ok_and(|answer| !answer.status().is_server_error());
        let sample = actors::meter::Sample::ended(began.elapsed(), well, 0);
        world.meter.record(id, sample, world.now());
        let (parts, body) = answer.map_err(ServiceError::from)?.into_parts();
        let mut response = Response::builder().status(parts.status).finish();
        copy(&parts.headers, response.headers_mut(), passes_out);
        // The slot goes back when the body has passed.
        let body = body.map_err(std::io::Error::other).map_frame(move |frame| {
            let _held = (&slot, &flight);
            frame
        });
        response.set_body(Body::from(http_body_util::BodyExt::boxed(body)));
        Ok(response)
    }
}

fn outbound(request: &Request, body: Bytes) -> Result<http::Request<Bytes>, Problem> {
    let path = request.original_uri().path();
    let rest = path.splitn(6, '/').nth(5).unwrap_or_default();
    let query = request.original_uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let wrong =
        || Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", "the path can't be passed on");
    let uri: Uri = format!("/{rest}{query}").parse().map_err(|_| wrong())?;
    let mut outbound = http::Request::new(body);
    *outbound.method_mut() = request.method().clone();
    *outbound.uri_mut() = uri;
    copy(request.headers(), outbound.headers_mut(), passes_in);
    Ok(outbound)
}

fn copy(from: &HeaderMap, to: &mut HeaderMap, passes: fn(&HeaderName) -> bool) {
    for (name, value) in from.iter().filter(|(name, _)| passes(name)) {
        to.append(name, value.clone());
    }
}
