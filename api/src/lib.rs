//! How the world asks: the `/v1` interface, its envelope, its errors and its document.
//!
//! An endpoint reads, permits, asks and dresses; what it decides, the domain decides. The document is
//! generated from the same types that check requests ([`check`]), so the two cannot differ.

pub mod access;
mod agents;
mod audit;
mod auth;
mod authorize;
pub mod body;
pub mod caller;
mod changes;
mod check;
mod clouds;
mod cluster;
mod cursor;
mod deployments;
mod document;
mod envelope;
pub mod error;
mod events;
pub mod hasher;
mod invoke;
mod jobs;
mod keys;
mod layers;
mod listing;
mod logs;
mod metrics;
mod oauth;
mod organizations;
mod pages;
mod pass;
mod password;
mod query;
mod repeat;
mod secrets;
mod snapshots;
mod sse;
pub mod tokens;
mod traffic;
mod uploads;
mod used;
mod users;
mod webhooks;

use std::sync::Arc;

use actors::call::Service;
use domain::account::{IpRange, Tier};
use poem::{Endpoint, EndpointExt as _, IntoEndpoint as _, Response, Route};
use poem_openapi::OpenApiService;

pub use document::document;
pub use traffic::Traffic;
pub use uploads::UploadLinks;

/// What the interface needs beside the service.
pub struct Settings {
    /// Where clients reach this service, without a slash at the end.
    pub public_url: String,
    /// Signs links and cursors.
    pub signing_key: [u8; 32],
    /// Hashes API keys.
    pub pepper: [u8; 32],
    /// Where people log in, without a slash at the end: the issuer of tokens.
    pub auth_url: String,
    /// Origins of front ends that browsers may call from.
    pub cors_origins: Vec<String>,
    /// Proxies whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<IpRange>,
    /// The tier of a new organization that names none.
    pub default_tier: Tier,
}

/// Everything an endpoint reaches for.
pub struct Shared {
    /// The service.
    pub service: Service,
    /// The settings.
    pub settings: Settings,
    /// What is counted of requests.
    pub traffic: Arc<Traffic>,
    keys_used: Arc<used::KeysUsed>,
    tokens: tokens::TokenCache,
    passwords: password::Passwords,
    journal: audit::Journal,
}

impl Shared {
    /// Around a service. Its own tasks end with it.
    pub fn new(service: Service, settings: Settings, traffic: Arc<Traffic>) -> Self {
        repeat::set_pepper(settings.pepper);
        let keys_used = Arc::new(used::KeysUsed::default());
        actors::root::detach(used::tell(service.clone(), Arc::downgrade(&keys_used)));
        Self {
            journal: audit::Journal::new(service.clone()),
            service,
            settings,
            traffic,
            keys_used,
            tokens: tokens::TokenCache::default(),
            passwords: password::Passwords::new(),
        }
    }
}

type Apis = (
    agents::AgentsApi,
    deployments::DeploymentsApi,
    invoke::InvokeApi,
    jobs::JobsApi,
    logs::LogsApi,
    metrics::MetricsApi,
    clouds::CloudsApi,
    (cluster::ClusterApi, snapshots::SnapshotsApi),
    uploads::UploadsApi,
    (
        auth::AuthApi,
        oauth::OauthApi,
        keys::KeysApi,
        users::UsersApi,
        organizations::OrganizationsApi,
        secrets::SecretsApi,
        audit::AuditApi,
        webhooks::WebhooksApi,
        events::EventsApi,
    ),
);

fn apis(shared: Option<&Arc<Shared>>) -> OpenApiService<Apis, ()> {
    let shared = Handle(shared.cloned());
    let apis = (
        agents::AgentsApi(shared.clone()),
        deployments::DeploymentsApi(shared.clone()),
        invoke::InvokeApi(shared.clone()),
        jobs::JobsApi(shared.clone()),
        logs::LogsApi(shared.clone()),
        metrics::MetricsApi(shared.clone()),
        clouds::CloudsApi(shared.clone()),
        (cluster::ClusterApi(shared.clone()), snapshots::SnapshotsApi(shared.clone())),
        uploads::UploadsApi(shared.clone()),
        (
            auth::AuthApi(shared.clone()),
            oauth::OauthApi(shared.clone()),
            keys::KeysApi(shared.clone()),
            users::UsersApi(shared.clone()),
            organizations::OrganizationsApi(shared.clone()),
            secrets::SecretsApi(shared.clone()),
            audit::AuditApi(shared.clone()),
            webhooks::WebhooksApi(shared.clone()),
            events::EventsApi(shared),
        ),
    );
    OpenApiService::new(apis, "Roost", env!("CARGO_PKG_VERSION"))
}

/// The shared state, absent while only the document is made.
#[derive(Clone)]
struct Handle(Option<Arc<Shared>>);

impl std::ops::Deref for Handle {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        self.0.as_deref().expect("requests are served only with a service behind them")
    }
}

/// All routes, in their layers.
pub fn routes(shared: &Arc<Shared>) -> impl Endpoint<Output = Response> + use<> {
    let apis = apis(Some(shared));
    let route = Route::new()
        .at("/v1/openapi.json", document::endpoint())
        .at("/healthz", poem::get(cluster::healthz))
        .at("/readyz", poem::get(cluster::Readiness(Arc::clone(shared))))
        .at("/.well-known/jwks.json", poem::get(well_known(shared, Shared::jwks)))
        .at(
            "/.well-known/oauth-authorization-server",
            poem::get(well_known(shared, |shared| oauth::metadata(&shared.settings.auth_url))),
        )
        .at(access::CONSENT, authorize::Authorize(Arc::clone(shared)))
        .at("/v1/agents/:id/http", pass::PassThrough(Arc::clone(shared)))
        .at("/v1/agents/:id/http/*rest", pass::PassThrough(Arc::clone(shared)))
        .nest("/docs", document::page())
        .nest("/", apis);
    let (route, forms) = (Arc::new(route.into_endpoint().map_to_response()), Arc::clone(shared));
    let either = poem::endpoint::make(move |request| {
        let (route, forms) = (Arc::clone(&route), Arc::clone(&forms));
        async move {
            match oauth::is_form(&request) {
                // The layers around hand a call on as it is: a pointer, not all that it may come to hold.
                true => Ok(Box::pin(oauth::serve_form(&forms, request)).await),
                false => Box::pin(route.call(request)).await,
            }
        }
    });
    layers::around(Arc::clone(shared), either.map_to_response())
}

/// A document that anybody may read, as it is now.
fn well_known<R: Fn(&Shared) -> serde_json::Value + Send + Sync + 'static>(
    shared: &Arc<Shared>,
    read: R,
) -> impl Endpoint<Output = Response> + use<R> {
    let shared = Arc::clone(shared);
    poem::endpoint::make_sync(move |_| {
        Response::builder()
            .content_type("application/json")
            .header("cache-control", "public, max-age=300")
            .header("access-control-allow-origin", "*")
            .body(read(&shared).to_string())
    })
}
