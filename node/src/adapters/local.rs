//! What this machine runs agents with: processes, and containers where an engine answers.

use std::{collections::BTreeSet, sync::Arc};

use actors::ports::{BuildRequest, LineSink, Runtime, StartRequest, Started};
use domain::{
    AgentId,
    agent::plan::IMAGE_PULL_FAILED,
    cloud::Provider,
    deployment::{Failure, Image},
};
use futures::{FutureExt as _, future::BoxFuture};

use super::{builder::Builder, carry::Carrier, docker::DockerRuntime, process::ProcessRuntime};

/// The runtimes of this node behind one port.
pub struct LocalRuntime {
    /// Runs processes.
    pub process: Arc<ProcessRuntime>,
    /// Builds for them.
    pub builder: Arc<Builder>,
    /// Builds and runs containers.
    pub docker: Arc<DockerRuntime>,
    /// Brings images from other nodes.
    pub carrier: Carrier,
}

/// Nobody here can give an agent the graphics processors that it asks for.
pub fn no_gpu() -> Failure {
    let message = "no node of this cloud has the GPU that resources.gpu asks for; leave it out";
    Failure::new("NO_CAPACITY", message)
}

/// The image was on nodes that do not answer.
fn no_image() -> Failure {
    let message = "no node that answers has the agent's image; redeploy it";
    Failure::new(IMAGE_PULL_FAILED, message)
}

impl Runtime for LocalRuntime {
    fn lack(&self, provider: Provider, gpu: bool) -> Option<Failure> {
        match provider {
            Provider::Docker => self.docker.lack(gpu),
            Provider::Process | Provider::Sandbox => gpu.then(no_gpu),
        }
    }

    fn adopts(&self, provider: Provider) -> bool {
        match provider {
            Provider::Docker => true,
            Provider::Process | Provider::Sandbox => false,
        }
    }

    fn build(&self, request: BuildRequest, log: LineSink) -> BoxFuture<'_, Result<Image, Failure>> {
        match request.provider {
            Provider::Docker => self.docker.build(request, log).boxed(),
            Provider::Process | Provider::Sandbox => self.builder.build(request, log).boxed(),
        }
    }

    fn start(&self, request: StartRequest) -> BoxFuture<'_, Result<Started, Failure>> {
        async move {
            if !self.carrier.hold(request.provider, &request.image).await {
                return Err(no_image());
            }
            match request.provider {
                Provider::Docker => self.docker.start(request).await,
                Provider::Process | Provider::Sandbox => self.process.start(request).await,
            }
        }
        .boxed()
    }

    fn hold(&self, provider: Provider, image: Image) -> BoxFuture<'_, bool> {
        async move { self.carrier.hold(provider, &image).await }.boxed()
    }

    fn forget_images(&self, agent: AgentId, kept: Vec<String>) -> BoxFuture<'_, ()> {
        let builder = Arc::clone(&self.builder);
        let of_docker = kept.clone();
        let forget = tokio::task::spawn_blocking(move || builder.forget(agent, &kept));
        async move {
            forget.await.unwrap_or_default();
            self.docker.forget(agent, &of_docker).await;
        }
        .boxed()
    }
}

impl LocalRuntime {
    /// Asks what is there, and removes what no row names.
    pub async fn tend(&self, known: &BTreeSet<String>) {
        self.docker.engine().look().await;
        self.docker.sweep(known).await;
    }
}
