//! Images of the engine on their way between nodes.

use std::io;

use bollard::query_parameters::ImportImageOptionsBuilder;
use futures::{StreamExt as _, TryStreamExt as _};

use super::DockerRuntime;
use crate::adapters::carry::ImageStream;

impl DockerRuntime {
    /// Whether the engine has an image.
    pub async fn has_image(&self, reference: &str) -> bool {
        let Ok(here) = self.engine().here() else { return false };
        here.docker.inspect_image(reference).await.is_ok()
    }

    /// An image as the engine saves it; `None` if it has no such image.
    pub async fn save_image(&self, reference: &str) -> Option<ImageStream> {
        let here = self.engine().here().ok()?;
        here.docker.inspect_image(reference).await.ok()?;
        let (docker, reference) = (here.docker.clone(), reference.to_owned());
        let saved = async_stream(docker, reference);
        Some(saved)
    }

    /// Takes an image that another node's engine saved.
    pub async fn load_image(&self, bytes: ImageStream) -> io::Result<()> {
        let here = self.engine().here().map_err(|failure| io::Error::other(failure.message))?;
        let options = ImportImageOptionsBuilder::default().quiet(true).build();
        let mut loaded = here.docker.import_image_stream(options, bytes, None);
        while let Some(step) = loaded.next().await {
            step.map_err(io::Error::other)?;
        }
        Ok(())
    }
}

/// The engine's stream borrows its client, so a task of its own reads it.
fn async_stream(docker: bollard::Docker, reference: String) -> ImageStream {
    let (sender, mut receiver) = tokio::sync::mpsc::channel(8);
    tokio::spawn(async move {
        let mut saved = docker.export_image(&reference).map_err(io::Error::other);
        while let Some(piece) = saved.next().await {
            if sender.send(piece).await.is_err() {
                return;
            }
        }
    });
    futures::stream::poll_fn(move |cx| receiver.poll_recv(cx)).boxed()
}
