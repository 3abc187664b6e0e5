//! `/v1/cluster`: the nodes that all of this runs on, for operators; and whether this node lives and
//! serves, for whoever balances load.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use actors::{
    ports::{GroupView, failure_tolerance},
    world::World,
};
use domain::{
    NodeId,
    autopilot::Autopilot,
    directory::{Command, Directory, Reply},
    idempotency::Keyed,
    node::{Node, NodeStatus},
};
use http::StatusCode;
use poem::{Endpoint, Request, Response, handler};
use poem_openapi::{OpenApi, param::Path, payload::Json};

use crate::{
    Handle, Shared,
    body::cluster::{
        ClusterBody, ClusterConfigBody, ClusterEventBody, ClusterHealthBody, DrainRequest,
        JoinTokenBody, NodeBody, Observed, PutClusterConfig, ServerHealthBody, ShardBody,
    },
    caller::Caller,
    changes,
    check::{Checked, MaybeChecked},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    repeat::keyed,
    sse::Sse,
};

pub(crate) struct ClusterApi(pub(crate) Handle);

type Result<T> = std::result::Result<T, ApiError>;

fn node_id(text: &str) -> std::result::Result<NodeId, Problem> {
    path_id("node", text)
}

#[OpenApi(prefix_path = "/v1/cluster", tag = "crate::document::Tag::Cluster")]
impl ClusterApi {
    /// Get the cluster
    ///
    /// Who leads, how many may be lost, which releases run.
    #[oai(path = "/", method = "get", operation_id = "getCluster")]
    async fn cluster(&self, _caller: Caller) -> Result<Json<Success<ClusterBody>>> {
        let world = &self.0.service.world;
        let (groups, alive) = (world.ports.cluster.groups(), world.ports.cluster.alive());
        let directory = self.0.service.directory().await?.read();
        let (mut nodes, mut versions) = (BTreeMap::new(), BTreeMap::new());
        for (_, node) in directory.nodes.rows() {
            *nodes.entry(node.status.as_str().to_owned()).or_default() += 1;
            if node.is_member() {
                *versions.entry(node.facts.version.clone()).or_default() += 1;
            }
        }
        let top = groups.first();
        Ok(Json(Success::of(ClusterBody {
            leader: top.and_then(|group| group.leader).map(|id| id.to_string()),
            term: top.map_or(0, |group| group.term),
            quorum: top.map_or(0, GroupView::quorum) as u64,
            failure_tolerance: failure_tolerance(&groups, &alive) as u64,
            healthy: is_healthy(&directory, &groups, &alive),
            nodes,
            shards: u64::from(world.ports.ledger.shards()),
            versions,
        })))
    }

    /// Get the health of every server
    #[oai(path = "/health", method = "get", operation_id = "getClusterHealth")]
    async fn health(&self, _caller: Caller) -> Result<Json<Success<ClusterHealthBody>>> {
        let cluster = &self.0.service.world.ports.cluster;
        let (groups, alive) = (cluster.groups(), cluster.alive());
        let top = groups.first();
        let directory = self.0.service.directory().await?.read();
        let members = directory.nodes.rows().filter(|(_, node)| node.status != NodeStatus::Removed);
        let threshold = self.autopilot(&directory).last_contact_threshold_ms;
        let contact = |id: &NodeId| top.and_then(|group| group.contact.get(id)).map(millis);
        let last = top.and_then(|group| group.last_index);
        let behind = |id: &NodeId| top.and_then(|group| group.behind.get(id)).copied();
        let server = |(id, node): (&NodeId, &Arc<Node>)| ServerHealthBody {
            id: id.to_string(),
            healthy: alive.contains(id) && contact(id).is_none_or(|contact| contact <= threshold),
            last_index: behind(id).and_then(|behind| last?.checked_sub(behind)),
            last_contact_ms: contact(id),
            voter: top.is_some_and(|group| group.voters.contains(id)),
            leader: top.is_some_and(|group| group.leader == Some(*id)),
            status: node.status.as_str().to_owned(),
            behind: behind(id),
            stable_since: node.since.to_string(),
        };
        Ok(Json(Success::of(ClusterHealthBody {
            healthy: is_healthy(&directory, &groups, &alive),
            failure_tolerance: failure_tolerance(&groups, &alive) as u64,
            servers: members.map(server).collect(),
        })))
    }

    /// List the nodes
    ///
    /// Removed ones included.
    #[oai(path = "/nodes", method = "get", operation_id = "listNodes")]
    async fn nodes(&self, _caller: Caller) -> Result<Json<Success<Page<NodeBody>>>> {
        let seen = self.seen();
        let directory = self.0.service.directory().await?.read();
        let items = directory.nodes.rows().map(|(_, node)| seen.body(&directory, node)).collect();
        Ok(Json(Success::of(Page { items, has_more: false, next_cursor: None })))
    }

    /// Get a node
    #[oai(path = "/nodes/:id", method = "get", operation_id = "getNode")]
    async fn node(
        &self,
        _caller: Caller,
        /// The node.
        id: Path<String>,
    ) -> Result<Json<Success<NodeBody>>> {
        let id = node_id(&id)?;
        let seen = self.seen();
        let directory = self.0.service.directory().await?.read();
        let node = directory.nodes.get(&id).ok_or(domain::Rejection::NodeNotFound(id))?;
        Ok(Json(Success::of(seen.body(&directory, &node))))
    }

    /// Drain a node
    ///
    /// Leaderships and instances move to other nodes, calls in
    /// flight finish; nothing new comes. Look at `drained`. What has found no room elsewhere when `deadline_s` is
    /// over goes without anything in its place. Ask again for another deadline.
    #[oai(path = "/nodes/:id/drain", method = "post", operation_id = "drainNode")]
    async fn drain(
        &self,
        caller: Caller,
        request: &Request,
        /// The node.
        id: Path<String>,
        body: MaybeChecked<DrainRequest>,
    ) -> Result<Json<Success<NodeBody>>> {
        let id = node_id(&id)?;
        let key = keyed(request, caller.tenant(), Some(&body.0.json))?;
        let within = body.0.body.within()?;
        let by = self.0.service.world.now().plus(within);
        self.change(Command::DrainNode { id, by }, key).await
    }

    /// Activate a node
    ///
    /// Ends its draining.
    #[oai(path = "/nodes/:id/activate", method = "post", operation_id = "activateNode")]
    async fn activate(
        &self,
        caller: Caller,
        request: &Request,
        /// The node.
        id: Path<String>,
    ) -> Result<Json<Success<NodeBody>>> {
        self.set(caller, request, &id, NodeStatus::Active).await
    }

    /// Remove a node
    ///
    /// A drained or a dead one; its replicas are made anew
    /// elsewhere and its certificate opens nothing any more.
    #[oai(path = "/nodes/:id/remove", method = "post", operation_id = "removeNode")]
    async fn remove(
        &self,
        caller: Caller,
        request: &Request,
        /// The node.
        id: Path<String>,
    ) -> Result<Json<Success<NodeBody>>> {
        self.set(caller, request, &id, NodeStatus::Removed).await
    }

    /// List the replicated groups
    ///
    /// The directory and every shard: who leads, who has replicas,
    /// how far they are.
    #[oai(path = "/shards", method = "get", operation_id = "listShards")]
    async fn shards(&self, _caller: Caller) -> Result<Json<Success<Page<ShardBody>>>> {
        let groups = self.0.service.world.ports.cluster.groups();
        let items = groups.into_iter().map(shard_body).collect();
        Ok(Json(Success::of(Page { items, has_more: false, next_cursor: None })))
    }

    /// Get how the cluster looks after its replicas
    #[oai(path = "/config", method = "get", operation_id = "getClusterConfig")]
    async fn config(&self, _caller: Caller) -> Result<Json<Success<ClusterConfigBody>>> {
        let directory = self.0.service.directory().await?.read();
        Ok(Json(Success::of(self.autopilot(&directory).into())))
    }

    /// Say how the cluster looks after its replicas
    ///
    /// It holds on every node from then on, in the place of the setting `cluster.dead_after`.
    #[oai(path = "/config", method = "put", operation_id = "putClusterConfig")]
    async fn put_config(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<PutClusterConfig>,
    ) -> Result<Json<Success<ClusterConfigBody>>> {
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        let autopilot = Autopilot::from(body.body);
        let command = Command::SetAutopilot(Box::new(autopilot.clone()));
        self.0.service.change(command, key).await?;
        Ok(Json(Success::of(autopilot.into())))
    }

    /// Watch the cluster
    ///
    /// As server-sent events: first `cluster.seen` with how it is, then whatever changes. Nothing is
    /// kept for those who were away: look again.
    #[oai(path = "/events", method = "get", operation_id = "watchCluster")]
    async fn events(&self, _caller: Caller) -> Result<Sse<ClusterEventBody>> {
        Ok(changes::stream(self.0.service.world.clone()))
    }

    /// Make a join token
    ///
    /// It is good for one node and one hour.
    #[oai(path = "/join-tokens", method = "post", operation_id = "createJoinToken")]
    async fn join_token(
        &self,
        _caller: Caller,
        request: &Request,
    ) -> Result<Json<Success<JoinTokenBody>>> {
        if request.headers().contains_key("idempotency-key") {
            let why = "is not taken here: a token is shown once; make another one";
            return Err(Problem::field("Idempotency-Key", why).into());
        }
        let made = self.0.service.world.ports.cluster.mint_token().await;
        let made = made.map_err(actors::call::ServiceError::from)?;
        Ok(Json(Success::of(JoinTokenBody {
            token: made.token,
            address: made.address,
            expires_at: made.expires_at.to_string(),
        })))
    }
}

impl ClusterApi {
    async fn set(
        &self,
        caller: Caller,
        request: &Request,
        id: &str,
        to: NodeStatus,
    ) -> Result<Json<Success<NodeBody>>> {
        let id = node_id(id)?;
        let key = keyed(request, caller.tenant(), None)?;
        self.change(Command::SetNodeStatus { id, to }, key).await
    }

    async fn change(
        &self,
        command: Command,
        key: Option<Keyed>,
    ) -> Result<Json<Success<NodeBody>>> {
        let answer = self.0.service.change(command, key).await?;
        let Reply::Node(node) = answer.value else { return Err(Problem::internal().into()) };
        let seen = self.seen();
        let directory = self.0.service.world.directory().read();
        Ok(Json(Success::of(seen.body(&directory, &node))))
    }

    fn seen(&self) -> Seen {
        Seen::of(&self.0.service.world)
    }

    fn autopilot(&self, directory: &Directory) -> Autopilot {
        directory.autopilot().unwrap_or_else(|| self.0.service.world.settings.autopilot())
    }
}

/// Who answers, and who serves.
pub(crate) struct Seen {
    alive: BTreeSet<NodeId>,
    ready: BTreeSet<NodeId>,
}

impl Seen {
    /// As this node sees it.
    pub(crate) fn of(world: &World) -> Self {
        let cluster = &world.ports.cluster;
        Self { alive: cluster.alive(), ready: cluster.ready() }
    }

    /// A node with that.
    pub(crate) fn body(&self, directory: &Directory, node: &Node) -> NodeBody {
        let id = node.facts.id;
        let leads = directory.leaders.rows().filter(|(_, leader)| leader.node == id);
        let seen = Observed {
            alive: self.alive.contains(&id),
            ready: self.ready.contains(&id),
            instances: directory.instances_on(id).count() as u64,
            leads: leads.map(|(shard, _)| *shard).collect(),
        };
        NodeBody::of(node, seen)
    }
}

/// Voters that must agree, and voters that may be lost beside those that are.
fn is_healthy(directory: &Directory, groups: &[GroupView], alive: &BTreeSet<NodeId>) -> bool {
    let mut members = directory.nodes.rows().filter(|(_, node)| node.status != NodeStatus::Removed);
    groups.iter().all(|group| group.leader.is_some()) && members.all(|(id, _)| alive.contains(id))
}

fn millis(span: &std::time::Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// A group on the wire.
pub(crate) fn shard_body(group: GroupView) -> ShardBody {
    let names = |ids: &[NodeId]| ids.iter().map(ToString::to_string).collect();
    ShardBody {
        name: group.name(),
        leader: group.leader.map(|id| id.to_string()),
        term: group.term,
        voters: names(&group.voters),
        learners: names(&group.learners),
        last_index: group.last_index,
        applied_index: group.applied_index,
        behind: group.behind.iter().map(|(id, behind)| (id.to_string(), *behind)).collect(),
    }
}

/// The process lives.
#[handler]
pub(crate) fn healthz() -> &'static str {
    "ok\n"
}

/// Whether this node serves: the directory has a leader and this node is not draining.
pub(crate) struct Readiness(pub(crate) Arc<Shared>);

impl Endpoint for Readiness {
    type Output = Response;

    async fn call(&self, _: Request) -> poem::Result<Response> {
        let world = &self.0.service.world;
        let has_leader =
            world.ports.cluster.groups().first().is_none_or(|group| group.leader.is_some());
        let drains = {
            let directory = world.directory().read();
            let own = directory.nodes.get(&world.node_id);
            own.is_some_and(|node| node.status != NodeStatus::Active)
        };
        let (status, words) = match (has_leader, drains) {
            (true, false) => (StatusCode::OK, "ready\n"),
            (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "the cluster has no leader\n"),
            (true, true) => (StatusCode::SERVICE_UNAVAILABLE, "this node drains\n"),
        };
        Ok(Response::builder().status(status).content_type("text/plain").body(words))
    }
}
