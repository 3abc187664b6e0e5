//! Images on this node: those that something may still need stay, and the live version of every agent
//! is on two nodes at least, so that the loss of one loses none.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use domain::{AgentId, NodeId, cloud::Provider, deployment::Image};

use crate::{root::detach, world::World};

/// Nodes that hold the image of a live version, whether they run it or not.
const HOLDERS: usize = 2;

impl World {
    /// A version went live: this node drops what nothing needs any more, and fetches what it should
    /// hold.
    pub fn tend_images(self: &Arc<Self>, agent: AgentId) {
        let world = Arc::clone(self);
        // Nobody is to wait for it.
        detach(async move {
            let kept = world.needed_images(agent);
            world.ports.runtime.forget_images(agent, kept).await;
            world.hold_image(agent).await;
        });
    }

    /// Holds the live versions that fall to this node, as after the loss of another.
    pub async fn hold_images(self: &Arc<Self>) {
        for agent in self.serving() {
            self.hold_image(agent).await;
        }
    }

    /// The images of live versions, by reference.
    pub fn live_images(&self) -> BTreeMap<String, (Provider, Image)> {
        let live = self.serving().into_iter().filter_map(|agent| self.live_image(agent));
        live.map(|(provider, image)| (image.reference.clone(), (provider, image))).collect()
    }

    /// The agents that have a live version.
    fn serving(&self) -> Vec<AgentId> {
        let directory = self.directory().read();
        let serving = directory.agents.rows().filter(|(_, one)| one.version.is_some());
        serving.map(|(id, _)| *id).collect()
    }

    async fn hold_image(self: &Arc<Self>, agent: AgentId) {
        let Some((provider, image)) = self.live_image(agent) else { return };
        if self.holders(agent).contains(&self.node_id)
            && !self.ports.runtime.hold(provider, image).await
        {
            tracing::info!(%agent, "the image of a live version is not on as many nodes as it should be");
        }
    }

    fn live_image(&self, agent: AgentId) -> Option<(Provider, Image)> {
        let directory = self.directory().read();
        let row = directory.agents.get(&agent)?;
        let provider = directory.clouds.get(&row.cloud_id)?.provider;
        let version = directory.version(agent, row.version?)?;
        Some((provider, version.image.clone()))
    }

    /// The nodes that hold an agent's image, the same from wherever one looks.
    fn holders(&self, agent: AgentId) -> BTreeSet<NodeId> {
        let mut nodes = self.others();
        nodes.push(self.node_id);
        nodes.sort_by_key(|node| {
            (node.0 ^ agent.0).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        nodes.into_iter().take(HOLDERS).collect()
    }

    /// Images that a kept version, a deployment on its way or an instance needs.
    fn needed_images(&self, agent: AgentId) -> Vec<String> {
        let directory = self.directory().read();
        let versions = directory.versions_of(agent).map(|row| row.image.reference.clone());
        let running: Vec<_> = directory.instances_of(agent).map(|row| row.deployment_id).collect();
        let needed = directory
            .deployments_of(agent)
            .filter(|row| row.status.is_active() || running.contains(&row.id));
        let needed = needed.flat_map(|row| {
            let built = row.image.as_ref().map(|image| image.reference.clone());
            [built, Some(format!("{}/{}", row.agent_id, row.id))]
        });
        versions.chain(needed.flatten()).collect()
    }
}
