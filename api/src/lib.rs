//! How the world asks: the `/v1` interface, its envelope, its errors and its document.
//!
//! An endpoint reads, permits, asks and dresses; what it decides, the domain decides. The document is
//! generated from the same types that check requests ([`check`]), so the two cannot differ.

mod agents;
pub mod body;
pub mod caller;
mod check;
mod clouds;
mod cluster;
mod cursor;
mod deployments;
mod document;
mod envelope;
pub mod error;
mod invoke;
mod jobs;
mod layers;
mod logs;
mod metrics;
mod pass;
mod query;
mod repeat;
mod uploads;

use std::sync::{Arc, atomic::AtomicUsize};

use actors::call::Service;
use poem::{Endpoint, EndpointExt as _, IntoEndpoint as _, Response, Route};
use poem_openapi::OpenApiService;

pub use document::document;
pub use uploads::UploadLinks;

/// What the interface needs beside the service.
pub struct Settings {
    /// Where clients reach this service, without a slash at the end.
    pub public_url: String,
    /// Signs links and cursors.
    pub signing_key: [u8; 32],
    /// Hashes API keys.
    pub pepper: [u8; 32],
}

/// Everything an endpoint reaches for.
pub struct Shared {
    /// The service.
    pub service: Service,
    /// The settings.
    pub settings: Settings,
    /// Requests that are being served.
    pub requests: Arc<AtomicUsize>,
}

type Apis = (
    agents::AgentsApi,
    deployments::DeploymentsApi,
    invoke::InvokeApi,
    jobs::JobsApi,
    logs::LogsApi,
    metrics::MetricsApi,
    clouds::CloudsApi,
    cluster::ClusterApi,
    uploads::UploadsApi,
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
        cluster::ClusterApi(shared.clone()),
        uploads::UploadsApi(shared),
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
    let page = apis.swagger_ui();
    let route = Route::new()
        .at("/v1/openapi.json", document::endpoint())
        .at("/healthz", poem::get(cluster::healthz))
        .at("/readyz", poem::get(cluster::Readiness(Arc::clone(shared))))
        .at("/v1/agents/:id/http", pass::PassThrough(Arc::clone(shared)))
        .at("/v1/agents/:id/http/*rest", pass::PassThrough(Arc::clone(shared)))
        .nest("/docs", page)
        .nest("/", apis);
    layers::around(Arc::clone(shared), route.into_endpoint().map_to_response())
}
