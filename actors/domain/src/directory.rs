//! The directory: small, written rarely, read everywhere. Accounts, keys, clouds, agents, their
//! deployments, versions and instances, and uploads. One line per command; bodies live with the noun.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    AgentId, ApiKeyId, ApplicationId, CloudId, DeploymentId, InstanceId, InvitationId, NodeId,
    OrgId, Rejection, SessionId, Timestamp, UploadId, UserId, WebhookId,
    account::{
        self, ApiKey, ApiKeyPatch, Application, Invitation, Organization, OrganizationPatch, Role,
        SIGNING_KEYS_KEPT, Scopes, SigningKey, Tenant, Used, User, UserPatch,
    },
    agent::{Agent, AgentPatch, Desired, lifecycle, rollout},
    audit::Audited,
    autopilot::Autopilot,
    cloud::{self, Cloud, CloudPatch},
    data_key::{self, DataKey, MasterKeyId},
    deployment::{Deployment, DeploymentStatus, Failure, Image, Version},
    event::DirectoryEvent as Event,
    idempotency::Keys,
    instance::{Instance, InstanceStatus},
    limits::{DEPLOYMENTS_KEPT, VERSIONS_KEPT},
    machine::{Claim, Entry, Machine},
    node::{self, JoinToken, Leader, Node, NodeFacts, NodeStatus},
    outbox::{self, Happening, Outbox},
    planted::{self, Bug},
    secret::{self, Secret},
    table::{AnyTable, Table},
    upload::{self, Received, Upload},
    webhook::{self, Webhook, WebhookPatch},
};

/// What may be asked of the directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are named after what they hold")]
pub enum Command {
    /// A new shard leader takes its place; older terms are refused from then on.
    Take,
    /// First start: the organization, its owner, its keys and its default clouds.
    Bootstrap(Box<Bootstrap>),
    /// `POST /v1/clouds`.
    CreateCloud(Box<Cloud>),
    /// `PATCH /v1/clouds/:id`.
    UpdateCloud { tenant: Tenant, id: CloudId, patch: CloudPatch, if_match: Option<u64> },
    /// `DELETE /v1/clouds/:id`.
    DeleteCloud { tenant: Tenant, id: CloudId },
    /// `POST /v1/uploads`.
    CreateUpload(Box<Upload>),
    /// The bytes of an upload have arrived.
    ReceiveUpload { id: UploadId, received: Received },
    /// `DELETE /v1/uploads/:id`, and the sweep of unused ones.
    DeleteUpload { id: UploadId },
    /// Forget uploads from before this time that nothing was made from.
    SweepUploads { unused_since: Timestamp },
    /// `POST /v1/agents`.
    CreateAgent(Box<Agent>),
    /// `PATCH /v1/agents/:id`.
    UpdateAgent {
        tenant: Tenant,
        id: AgentId,
        patch: Box<AgentPatch>,
        if_match: Option<u64>,
        deployment: DeploymentId,
    },
    /// `POST …/start`.
    StartAgent { tenant: Tenant, id: AgentId, deployment: DeploymentId },
    /// `POST …/stop`.
    StopAgent { tenant: Tenant, id: AgentId },
    /// `POST …/redeploy`.
    RedeployAgent {
        tenant: Tenant,
        id: AgentId,
        asked: Box<lifecycle::Redeploy>,
        deployment: DeploymentId,
    },
    /// `POST …/rollback`.
    RollbackAgent { tenant: Tenant, id: AgentId, version: u64, deployment: DeploymentId },
    /// `DELETE /v1/agents/:id`.
    DeleteAgent { tenant: Tenant, id: AgentId },
    /// `POST …/deployments/:dep_id/cancel`.
    CancelDeployment { tenant: Tenant, agent: AgentId, id: DeploymentId },
    /// A builder took the deployment.
    BeginBuild { agent: AgentId, id: DeploymentId },
    /// There is an image; instances may start.
    BeginRollout { agent: AgentId, id: DeploymentId, image: Option<Box<Image>> },
    /// The first new instance answers beside a live version.
    Verify { agent: AgentId, id: DeploymentId },
    /// The new version serves.
    Promote { agent: AgentId, id: DeploymentId },
    /// The deployment did not come up.
    FailDeployment { agent: AgentId, id: DeploymentId, failure: Failure },
    /// The agent cannot be kept up.
    FailAgent { agent: AgentId, failure: Failure },
    /// The last instance of a stopping agent is gone.
    ReportStopped { agent: AgentId },
    /// Nothing is left of a deleted agent.
    ForgetAgent { agent: AgentId },
    /// Instances of one agent get their places.
    PlaceInstances(Vec<Instance>),
    /// An instance moved.
    ReportInstance {
        agent: AgentId,
        id: InstanceId,
        status: InstanceStatus,
        isolation: Option<Vec<String>>,
    },
    /// An instance is gone.
    RemoveInstance { agent: AgentId, id: InstanceId },
    /// Forget the answers of keyed calls that are old enough.
    Sweep,
    /// A new shard leader takes its place and says who it is.
    Lead { node: NodeId },
    /// A node has started.
    RegisterNode(Box<NodeFacts>),
    /// `POST /v1/cluster/join-tokens`.
    MintJoinToken(Box<JoinToken>),
    /// A node joins.
    RedeemJoinToken { hash: [u8; 32], facts: Box<NodeFacts> },
    /// `POST /v1/cluster/nodes/:id/activate` and its like.
    SetNodeStatus { id: NodeId, to: NodeStatus },
    /// `PUT /v1/cluster/config`.
    SetAutopilot(Box<Autopilot>),
    /// `roost cluster rotate-gossip-key`: the new key, sealed.
    TurnGossipKey { sealed: Vec<u8> },
    /// Secrets of this owner are sealed with this key, unless there is one already.
    KeepDataKey { owner: OrgId, key: Box<DataKey> },
    /// `roost cluster rotate-master-key`: every data key, sealed with another master key that these
    /// nodes have.
    TurnMasterKey {
        from: MasterKeyId,
        to: MasterKeyId,
        known_by: Vec<NodeId>,
        sealed: Vec<(OrgId, Vec<u8>)>,
    },
    /// A session has ended: its access tokens are good no more.
    EndSession(SessionId),
    /// `POST /v1/organizations`.
    CreateOrganization { organization: Box<Organization>, owner: Box<User>, clouds: Vec<Cloud> },
    /// `PATCH /v1/organizations/:id`.
    UpdateOrganization { id: OrgId, patch: OrganizationPatch, if_match: Option<u64> },
    /// `POST /v1/invitations`, by somebody who may do this much.
    Invite { invitation: Box<Invitation>, by: Option<Role>, scopes: Scopes, answer: Vec<u8> },
    /// `DELETE /v1/invitations/:id`.
    WithdrawInvitation { org: OrgId, id: InvitationId },
    /// `POST /v1/invitations/accept`. Organization, address and role are the invitation's.
    AcceptInvitation { hash: [u8; 32], user: Box<User> },
    /// `PATCH /v1/users/:id`.
    UpdateUser {
        org: OrgId,
        id: UserId,
        patch: UserPatch,
        by: Option<Role>,
        scopes: Scopes,
        if_match: Option<u64>,
    },
    /// `DELETE /v1/users/:id`.
    RemoveUser { org: OrgId, id: UserId, by: Option<Role>, scopes: Scopes },
    /// `POST /v1/api-keys`.
    /// What an answer holds beside the row is kept sealed, for as long as the answer is repeated.
    CreateApiKey { key: Box<ApiKey>, answer: Vec<u8> },
    /// `PATCH /v1/api-keys/:id`.
    UpdateApiKey { tenant: Tenant, id: ApiKeyId, patch: ApiKeyPatch, if_match: Option<u64> },
    /// `POST /v1/api-keys/:id/rotate`.
    RotateApiKey {
        tenant: Tenant,
        id: ApiKeyId,
        hash: [u8; 32],
        last4: String,
        grace: Duration,
        answer: Vec<u8>,
    },
    /// `DELETE /v1/api-keys/:id`.
    DeleteApiKey { tenant: Tenant, id: ApiKeyId },
    /// What nodes have seen of keys.
    NoteKeyUse(Vec<(ApiKeyId, Used)>),
    /// `POST /v1/oauth/applications`.
    CreateApplication { application: Box<Application>, answer: Vec<u8> },
    /// `DELETE /v1/oauth/applications/:id`.
    DeleteApplication { tenant: Tenant, id: ApplicationId },
    /// `PUT /v1/secrets/:name`; version and times are the directory's.
    PutSecret(Box<Secret>),
    /// `DELETE /v1/secrets/:name`.
    DeleteSecret { tenant: Tenant, cloud_id: Option<CloudId>, name: String },
    /// Access tokens are signed with another key from now on. With `only_first`, unless there is one.
    PutSigningKey { key: Box<SigningKey>, only_first: bool },
    /// `POST /v1/webhooks`.
    CreateWebhook(Box<Webhook>),
    /// `PATCH /v1/webhooks/:id`, and `…/enable`.
    UpdateWebhook { tenant: Tenant, id: WebhookId, patch: WebhookPatch, if_match: Option<u64> },
    /// `POST /v1/webhooks/:id/rotate-secret`.
    RotateWebhook { tenant: Tenant, id: WebhookId, sealed: Vec<u8>, hint: String, grace: Duration },
    /// `DELETE /v1/webhooks/:id`.
    DeleteWebhook { tenant: Tenant, id: WebhookId },
    /// The receiver is gone, or failed for too long.
    DisableWebhook { id: WebhookId, reason: String },
    /// The health of an agent, as its owner sees it.
    ReportHealth { agent: AgentId, now: String, reason: String, instance: Option<InstanceId> },
    /// Everybody has what waited in the outbox, up to this number.
    Told { up_to: u64 },
    /// Everybody has these of what waited in the outbox; older ones still wait.
    ToldOf { numbers: Vec<u64> },
    /// `POST /v1/cluster/nodes/:id/drain`: by then what is still on it goes without anything in its place.
    DrainNode { id: NodeId, by: Timestamp },
}

/// What the first start makes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bootstrap {
    /// The organization.
    pub organization: Organization,
    /// Its owner.
    pub owner: User,
    /// One live and one test key.
    pub keys: Vec<ApiKey>,
    /// One default cloud per mode, and one more where a Docker engine answers.
    pub clouds: Vec<Cloud>,
}

/// What a granted command is answered with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Nothing to say.
    Done,
    /// The agent as it is now, and its newest deployment.
    Agent(Box<AgentView>),
    /// The deployment as it is now.
    Deployment(Box<Deployment>),
    /// The cloud as it is now.
    Cloud(Box<Cloud>),
    /// The upload as it is now.
    Upload(Box<Upload>),
    /// The node as it is now.
    Node(Box<Node>),
    /// The organization as it is now.
    Organization(Box<Organization>),
    /// The person as they are now.
    User(Box<User>),
    /// The key as it is now.
    ApiKey(Box<ApiKey>),
    /// The key as it is now, and the sealed secret of the answer.
    NewKey(Box<ApiKey>, Vec<u8>),
    /// The invitation, and its sealed token.
    Invitation(Box<Invitation>, Vec<u8>),
    /// The application, and its sealed secret.
    Application(Box<Application>, Vec<u8>),
    /// The secret as it is now.
    Secret(Box<Secret>),
    /// The webhook as it is now.
    Webhook(Box<Webhook>),
}

/// An agent with what is shown beside it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AgentView {
    /// The record.
    pub agent: Arc<Agent>,
    /// Its newest deployment, or the one that waits behind it.
    pub deployment: Option<Arc<Deployment>>,
    /// The version that serves or served last.
    pub version: Option<Arc<Version>>,
}

/// The directory's tables and what is derived from them.
pub struct Directory {
    /// Highest claim seen per shard.
    pub claims: Table<u64, Claim>,
    /// Organizations.
    pub organizations: Table<OrgId, Organization>,
    /// People.
    pub users: Table<UserId, User>,
    /// API keys.
    pub api_keys: Table<ApiKeyId, ApiKey>,
    /// Clouds.
    pub clouds: Table<CloudId, Cloud>,
    /// Agents, deleted ones included until they are gone.
    pub agents: Table<AgentId, Agent>,
    /// `cloud/name` → agent.
    pub names: Table<String, AgentId>,
    /// Deployments by agent.
    pub deployments: Table<(u128, DeploymentId), Deployment>,
    /// Versions by agent.
    pub versions: Table<(u128, u64), Version>,
    /// Instances by agent.
    pub instances: Table<(u128, InstanceId), Instance>,
    /// Uploads.
    pub uploads: Table<UploadId, Upload>,
    /// Answers of keyed calls.
    pub keys: Keys,
    /// Who leads each shard.
    pub leaders: Table<u64, Leader>,
    /// The nodes of the cluster, removed ones included.
    pub nodes: Table<NodeId, Node>,
    /// Tokens that wait to be redeemed.
    pub join_tokens: Table<[u8; 32], JoinToken>,
    /// The key of gossip, sealed, under the number of its turn; only the newest is kept.
    pub gossip_keys: Table<u64, Vec<u8>>,
    /// Sessions that have ended, until the last of their access tokens has expired.
    pub ended_sessions: Table<SessionId, Timestamp>,
    /// What seals secrets, itself sealed with the master key.
    pub data_keys: Table<OrgId, DataKey>,
    /// People who were asked to come.
    pub invitations: Table<InvitationId, Invitation>,
    /// Third parties' programs.
    pub applications: Table<ApplicationId, Application>,
    /// Sealed values, under [`Secret::place`].
    pub secrets: Table<String, Secret>,
    /// Keys of access tokens, the newest last.
    pub signing_keys: Table<u64, SigningKey>,
    /// Subscriptions to events.
    pub webhooks: Table<WebhookId, Webhook>,
    /// The health of serving agents, as it was told last.
    pub health: Table<AgentId, String>,
    /// How the cluster looks after its replicas, under 0.
    pub autopilot: Table<u64, Autopilot>,
    /// What waits to be told.
    pub outbox: Outbox,
    /// Keys by the first bytes of their hashes; derived.
    api_key_by_hash: BTreeSet<(u64, ApiKeyId)>,
    /// How many keys a tenant has; derived.
    keys_of: BTreeMap<Tenant, usize>,
    pub(crate) user_by_email: BTreeSet<(String, UserId)>,
    /// The names that clouds have, in lower case; derived.
    pub(crate) cloud_names: BTreeSet<(Tenant, String)>,
    /// Builds that are under way; derived.
    pub(crate) building: BTreeMap<Tenant, BTreeSet<DeploymentId>>,
}

impl Default for Directory {
    fn default() -> Self {
        Self {
            claims: Table::live(1),
            organizations: Table::live(2),
            users: Table::live(3),
            api_keys: Table::live(4),
            clouds: Table::live(5),
            agents: Table::live(6),
            names: Table::live(7),
            deployments: Table::live(8),
            versions: Table::live(9),
            instances: Table::live(10),
            uploads: Table::live(11),
            keys: Keys::new(12),
            leaders: Table::live(15),
            nodes: Table::live(TABLES_OF_MACHINES[0]),
            join_tokens: Table::live(TABLES_OF_MACHINES[1]),
            gossip_keys: Table::live(TABLES_OF_MACHINES[2]),
            invitations: Table::live(19),
            applications: Table::live(20),
            secrets: Table::live(21),
            signing_keys: Table::live(22),
            webhooks: Table::live(23),
            health: Table::live(24),
            autopilot: Table::live(27),
            ended_sessions: Table::live(28),
            data_keys: Table::live(29),
            outbox: Outbox::new(25, 30),
            api_key_by_hash: BTreeSet::new(),
            keys_of: BTreeMap::new(),
            user_by_email: BTreeSet::new(),
            cloud_names: BTreeSet::new(),
            building: BTreeMap::new(),
        }
    }
}

/// Tables that speak of the machines of one cluster: nodes, join tokens and the key of gossip. A
/// cluster that begins from a backup has others.
pub const TABLES_OF_MACHINES: [u8; 3] = [16, 17, 18];

/// Reads.
impl Directory {
    /// An agent that this tenant may see.
    pub fn agent(&self, tenant: Tenant, id: AgentId) -> Result<Arc<Agent>, Rejection> {
        self.agents
            .get(&id)
            .filter(|agent| agent.tenant == tenant && agent.desired != Desired::Delete)
            .ok_or(Rejection::AgentNotFound(id))
    }

    /// All agents that this tenant may see, oldest first.
    pub fn agents_of(&self, tenant: Tenant) -> impl DoubleEndedIterator<Item = &Arc<Agent>> {
        self.agents
            .rows()
            .map(|(_, agent)| agent)
            .filter(move |agent| agent.tenant == tenant && agent.desired != Desired::Delete)
    }

    /// A cloud that this tenant may see.
    pub fn cloud(&self, tenant: Tenant, id: CloudId) -> Result<Arc<Cloud>, Rejection> {
        self.clouds
            .get(&id)
            .filter(|cloud| cloud.tenant == tenant)
            .ok_or(Rejection::CloudNotFound(id))
    }

    /// An upload that this tenant may see.
    pub fn upload(&self, tenant: Tenant, id: UploadId) -> Result<Arc<Upload>, Rejection> {
        self.uploads
            .get(&id)
            .filter(|upload| upload.tenant == tenant)
            .ok_or(Rejection::UploadNotFound(id))
    }

    /// One deployment of an agent.
    pub fn deployment(&self, agent: AgentId, id: DeploymentId) -> Option<Arc<Deployment>> {
        self.deployments.get(&(agent.0, id))
    }

    /// Whether the agent's newest deployment is still on its way.
    pub fn is_deploying(&self, agent: &Agent) -> bool {
        self.deployment(agent.id, agent.deployment).is_some_and(|row| row.status.is_active())
    }

    /// An agent's deployments, oldest first.
    pub fn deployments_of(&self, agent: AgentId) -> impl Iterator<Item = &Arc<Deployment>> {
        self.deployments
            .rows_from((agent.0, DeploymentId(0)))
            .take_while(move |(key, _)| key.0 == agent.0)
            .map(|(_, row)| row)
    }

    /// One version of an agent.
    pub fn version(&self, agent: AgentId, number: u64) -> Option<Arc<Version>> {
        self.versions.get(&(agent.0, number))
    }

    /// An agent's versions, oldest first.
    pub fn versions_of(&self, agent: AgentId) -> impl Iterator<Item = &Arc<Version>> {
        self.versions
            .rows_from((agent.0, 0))
            .take_while(move |(key, _)| key.0 == agent.0)
            .map(|(_, row)| row)
    }

    /// One instance of an agent.
    pub fn instance(&self, agent: AgentId, id: InstanceId) -> Option<Arc<Instance>> {
        self.instances.get(&(agent.0, id))
    }

    /// An agent's instances, oldest first.
    pub fn instances_of(&self, agent: AgentId) -> impl Iterator<Item = &Arc<Instance>> {
        self.instances
            .rows_from((agent.0, InstanceId(0)))
            .take_while(move |(key, _)| key.0 == agent.0)
            .map(|(_, row)| row)
    }

    /// The API key whose secret has this hash.
    pub fn api_key(&self, hash: &[u8; 32]) -> Option<Arc<ApiKey>> {
        let first = beginning(hash);
        let alike = self.api_key_by_hash.range((first, ApiKeyId(0))..=(first, ApiKeyId(u128::MAX)));
        alike.filter_map(|(_, id)| self.api_keys.get(id)).find(|key| key.has_hash(hash))
    }

    /// How many keys a tenant has.
    pub fn count_keys(&self, tenant: Tenant) -> usize {
        self.keys_of.get(&tenant).copied().unwrap_or(0)
    }

    /// An agent with what is shown beside it.
    pub fn view(&self, agent: &Arc<Agent>) -> AgentView {
        let shown = agent.waiting.unwrap_or(agent.deployment);
        AgentView {
            agent: Arc::clone(agent),
            deployment: self.deployment(agent.id, shown),
            version: agent.version.and_then(|number| self.version(agent.id, number)),
        }
    }

    fn fence(&self, claim: Option<Claim>) -> Result<(), Rejection> {
        let Some(claim) = claim else { return Ok(()) };
        match self.claims.get(&u64::from(claim.shard)) {
            Some(highest) if highest.term > claim.term && !planted::has(Bug::NoFencing) => {
                Err(Rejection::NotOwner)
            }
            _ => Ok(()),
        }
    }
}

impl Machine for Directory {
    type Command = Command;
    type Reply = Reply;
    type Event = Event;

    fn decide(&self, entry: &Entry<Command>) -> Result<Vec<Event>, Rejection> {
        use Command as C;
        self.fence(entry.claim)?;
        let at = entry.at;
        match &entry.command {
            C::Take => Ok(entry.claim.map(Event::ShardTaken).into_iter().collect()),
            C::Bootstrap(first) => Ok(bootstrap(self, first)),
            C::CreateCloud(cloud) => cloud::create(self, cloud),
            C::UpdateCloud { tenant, id, patch, if_match } => {
                cloud::update(self, *tenant, *id, patch, *if_match, at)
            }
            C::DeleteCloud { tenant, id } => cloud::delete(self, *tenant, *id),
            C::CreateUpload(upload) => Ok(vec![Event::UploadPut(upload.clone())]),
            C::ReceiveUpload { id, received } => upload::receive(self, *id, received),
            C::SweepUploads { unused_since } => Ok(upload::sweep(self, *unused_since)),
            C::DeleteUpload { id } => Ok(vec![Event::UploadGone(*id)]),
            C::CreateAgent(agent) => lifecycle::create(self, agent),
            C::UpdateAgent { tenant, id, patch, if_match, deployment } => {
                lifecycle::update(self, (*tenant, *id), patch, *if_match, *deployment, at)
            }
            C::StartAgent { tenant, id, deployment } => {
                lifecycle::start(self, (*tenant, *id), *deployment, at)
            }
            C::StopAgent { tenant, id } => lifecycle::stop(self, (*tenant, *id), at),
            C::RedeployAgent { tenant, id, asked, deployment } => {
                lifecycle::redeploy(self, (*tenant, *id), asked, *deployment, at)
            }
            C::RollbackAgent { tenant, id, version, deployment } => {
                lifecycle::rollback(self, (*tenant, *id), *version, *deployment, at)
            }
            C::DeleteAgent { tenant, id } => lifecycle::delete(self, (*tenant, *id), at),
            C::CancelDeployment { tenant, agent, id } => {
                rollout::cancel(self, (*tenant, *agent), *id, at)
            }
            C::BeginBuild { agent, id } => rollout::begin_build(self, *agent, *id, at),
            C::BeginRollout { agent, id, image } => {
                Ok(rollout::begin_rollout(self, *agent, *id, image.as_deref(), at))
            }
            C::Verify { agent, id } => Ok(rollout::verify(self, *agent, *id, at)),
            C::Promote { agent, id } => Ok(rollout::promote(self, *agent, *id, at)),
            C::FailDeployment { agent, id, failure } => {
                Ok(rollout::fail(self, *agent, *id, failure, at))
            }
            C::FailAgent { agent, failure } => Ok(rollout::fail_agent(self, *agent, failure, at)),
            C::ReportStopped { agent } => Ok(rollout::report_stopped(self, *agent, at)),
            C::ForgetAgent { agent } => Ok(rollout::forget(self, *agent)),
            C::PlaceInstances(instances) => Ok(rollout::place(self, instances)),
            C::ReportInstance { agent, id, status, isolation } => {
                Ok(rollout::report_instance(self, (*agent, *id), *status, isolation.as_ref(), at))
            }
            C::RemoveInstance { agent, id } => Ok(rollout::remove_instance(self, *agent, *id)),
            C::Sweep => Ok(vec![Event::KeysForgotten(at)]),
            C::Lead { node } => Ok(node::lead(*node, entry.claim)),
            C::RegisterNode(facts) => node::register(self, facts, at),
            C::MintJoinToken(token) => node::mint_token(self, token, at),
            C::RedeemJoinToken { hash, facts } => node::redeem(self, hash, facts, at),
            C::SetAutopilot(row) => Ok(vec![Event::AutopilotPut(row.clone())]),
            C::TurnGossipKey { sealed } => Ok(vec![Event::GossipKeyTurned(sealed.clone())]),
            C::KeepDataKey { owner, key } => data_key::keep(self, *owner, key),
            C::TurnMasterKey { from, to, known_by, sealed } => {
                data_key::turn_master(self, (*from, *to), known_by, sealed)
            }
            C::SetNodeStatus { id, to } => node::set_status(self, *id, *to, at),
            C::DrainNode { id, by } => node::drain(self, *id, *by, at),
            C::EndSession(id) => Ok(account::end_session(self, *id, at)),
            C::CreateOrganization { organization, owner, clouds } => {
                account::create_organization(self, organization, owner, clouds)
            }
            C::UpdateOrganization { id, patch, if_match } => {
                account::update_organization(self, *id, patch, *if_match, at)
            }
            C::Invite { invitation, by, scopes, .. } => {
                account::invite(self, invitation, *by, scopes, at)
            }
            C::WithdrawInvitation { org, id } => {
                self.invitation(*org, *id).map(|row| vec![Event::InvitationGone(row.id)])
            }
            C::AcceptInvitation { hash, user } => account::accept(self, hash, user, at),
            C::UpdateUser { org, id, patch, by, scopes, if_match } => {
                account::change_user(self, (*org, *id), patch, (*by, scopes), *if_match, at)
            }
            C::RemoveUser { org, id, by, scopes } => {
                account::remove_user(self, (*org, *id), (*by, scopes))
            }
            C::CreateApiKey { key, .. } => account::create_key(self, key),
            C::UpdateApiKey { tenant, id, patch, if_match } => {
                account::update_key(self, (*tenant, *id), patch, *if_match, at)
            }
            C::RotateApiKey { tenant, id, hash, last4, grace, .. } => {
                account::rotate_key(self, (*tenant, *id), (hash, last4), *grace, at)
            }
            C::DeleteApiKey { tenant, id } => {
                self.key(*tenant, *id).map(|row| vec![Event::ApiKeyGone(row.id)])
            }
            C::NoteKeyUse(uses) => Ok(self.newer_uses(uses)),
            C::CreateApplication { application, .. } => {
                account::create_application(self, application)
            }
            C::DeleteApplication { tenant, id } => account::delete_application(self, *tenant, *id),
            C::PutSecret(row) => secret::put(self, row, at),
            C::DeleteSecret { tenant, cloud_id, name } => {
                secret::delete(self, *tenant, *cloud_id, name)
            }
            C::PutSigningKey { only_first: true, .. } if !self.signing_keys.is_empty() => {
                Ok(vec![])
            }
            C::PutSigningKey { key, .. } => Ok(vec![Event::SigningKeyPut(key.clone())]),
            C::CreateWebhook(row) => webhook::create(self, row),
            C::UpdateWebhook { tenant, id, patch, if_match } => {
                webhook::update(self, (*tenant, *id), patch, *if_match, at)
            }
            C::RotateWebhook { tenant, id, sealed, hint, grace } => {
                webhook::rotate(self, (*tenant, *id), (sealed, hint), *grace, at)
            }
            C::DeleteWebhook { tenant, id } => {
                self.webhook(*tenant, *id).map(|row| vec![Event::WebhookGone(row.id)])
            }
            C::DisableWebhook { id, reason } => Ok(webhook::disable(self, *id, reason, at)),
            C::ReportHealth { agent, now, reason, instance } => {
                Ok(rollout::report_health(self, *agent, now, reason, *instance, at))
            }
            C::Told { up_to } => Ok(vec![Event::Told(*up_to)]),
            C::ToldOf { numbers } => Ok(vec![Event::ToldOf(numbers.clone())]),
        }
    }

    fn evolve(&mut self, event: &Event) {
        use Event as E;
        match event {
            E::ShardTaken(claim) => self.claims.put(u64::from(claim.shard), *claim),
            E::ShardLed { claim, node } => {
                self.leaders.put(u64::from(claim.shard), Leader { node: *node, term: claim.term })
            }
            E::NodePut(row) => self.nodes.put(row.facts.id, Node::clone(row)),
            E::JoinTokenPut(row) => self.join_tokens.put(row.hash, JoinToken::clone(row)),
            E::AutopilotPut(row) => self.autopilot.put(0, Autopilot::clone(row)),
            E::GossipKeyTurned(sealed) => self.turn_gossip_key(sealed),
            E::DataKeyPut { owner, key } => self.data_keys.put(*owner, DataKey::clone(key)),
            E::JoinTokenGone(hash) => self.join_tokens.remove(hash),
            E::SessionEnded { id, until } => self.ended_sessions.put(*id, *until),
            E::SessionForgotten(id) => self.ended_sessions.remove(id),
            E::OrganizationPut(row) => self.organizations.put(row.id, Organization::clone(row)),
            E::UserPut(row) => self.put_user(row),
            E::UserGone(id) => self.drop_user(*id),
            E::InvitationPut(row) => self.invitations.put(row.id, Invitation::clone(row)),
            E::InvitationGone(id) => self.invitations.remove(id),
            E::ApiKeyGone(id) => self.drop_api_key(*id),
            E::ApplicationPut(row) => self.applications.put(row.id, Application::clone(row)),
            E::ApplicationGone(id) => self.applications.remove(id),
            E::SecretPut(row) => self
                .secrets
                .put(Secret::place(row.tenant, row.cloud_id, &row.name), Secret::clone(row)),
            E::SecretGone(key) => self.secrets.remove(key),
            E::SigningKeyPut(row) => self.turn_signing_key(row),
            E::WebhookPut(row) => self.webhooks.put(row.id, Webhook::clone(row)),
            E::WebhookGone(id) => self.webhooks.remove(id),
            E::WebhookDisabled { .. } => {}
            E::HealthChanged { agent_id, now, .. } => self.health.put(*agent_id, now.clone()),
            E::Told(up_to) => self.outbox.told(*up_to),
            E::ToldOf(numbers) => self.outbox.told_of(numbers),
            E::ApiKeyPut(row) => self.put_api_key(row),
            E::CloudPut(row) => self.put_cloud(row),
            E::CloudGone(id) => self.drop_cloud(*id),
            E::UploadPut(row) => self.uploads.put(row.id, Upload::clone(row)),
            E::UploadGone(id) => self.uploads.remove(id),
            E::AgentCreated(row) => self.create_agent(row),
            E::AgentUpdated(row) => self.agents.put(row.id, Arc::clone(row)),
            E::AgentDesired { id, desired, at } => {
                self.touch(*id, *at, |agent| agent.desired = *desired);
            }
            E::AgentMoved { id, to, reason, at } => {
                // Whatever comes next begins anew.
                self.health.remove(id);
                self.touch(*id, *at, |agent| {
                    agent.status = *to;
                    agent.reason.clone_from(reason);
                });
            }
            E::AgentDeleted { id, at } => self.hide_agent(*id, *at),
            E::AgentGone(id) => self.drop_agent(*id),
            E::DeploymentQueued(row) => self.queue_deployment(row),
            E::DeploymentWaits(row) => self.hold_deployment(row),
            E::DeploymentMoved { agent_id, id, to, error, at } => {
                self.move_deployment(*agent_id, *id, *to, error.as_ref(), *at);
            }
            E::ImageBuilt { agent_id, id, image } => {
                self.deployments.change(&(agent_id.0, *id), |row| {
                    row.image = Some(Image::clone(image));
                });
            }
            E::DeploymentUnblocked { agent_id } => self.unblock_deployment(*agent_id),
            E::VersionLive { agent_id, version, at, .. } => self.go_live(*agent_id, version, *at),
            E::InstancePlaced(row) => {
                self.instances.put((row.agent_id.0, row.id), Instance::clone(row));
            }
            E::InstanceMoved { agent_id, id, to, isolation, at } => {
                self.move_instance(*agent_id, *id, *to, isolation.as_ref(), *at);
            }
            E::InstanceGone { agent_id, id } => self.instances.remove(&(agent_id.0, *id)),
            E::KeysForgotten(at) => {
                let due = self.keys.expired(*at);
                self.keys.forget(&due);
            }
        }
    }

    fn reply(&self, command: &Command) -> Reply {
        use Command as C;
        match command {
            C::CreateAgent(agent) => self.agent_reply(agent.id),
            C::UpdateAgent { id, .. }
            | C::StartAgent { id, .. }
            | C::StopAgent { id, .. }
            | C::RedeployAgent { id, .. }
            | C::RollbackAgent { id, .. } => self.agent_reply(*id),
            C::CancelDeployment { agent, id, .. } => self
                .deployment(*agent, *id)
                .map_or(Reply::Done, |row| Reply::Deployment(Box::new(Deployment::clone(&row)))),
            C::CreateCloud(cloud) => self.cloud_reply(cloud.id),
            C::UpdateCloud { id, .. } => self.cloud_reply(*id),
            C::CreateUpload(upload) => self.upload_reply(upload.id),
            C::ReceiveUpload { id, .. } => self.upload_reply(*id),
            C::RegisterNode(facts) | C::RedeemJoinToken { facts, .. } => self.node_reply(facts.id),
            C::SetNodeStatus { id, .. } | C::DrainNode { id, .. } => self.node_reply(*id),
            C::CreateOrganization { organization, .. } => self.organization_reply(organization.id),
            C::UpdateOrganization { id, .. } => self.organization_reply(*id),
            C::AcceptInvitation { user, .. } => self.user_reply(user.id),
            C::UpdateUser { id, .. } => self.user_reply(*id),
            C::CreateApiKey { key, answer } => Reply::NewKey(key.clone(), answer.clone()),
            C::Invite { invitation, answer, .. } => {
                Reply::Invitation(invitation.clone(), answer.clone())
            }
            C::CreateApplication { application, answer } => {
                Reply::Application(application.clone(), answer.clone())
            }
            C::RotateApiKey { id, answer, .. } => match self.api_keys.get(id) {
                Some(key) => Reply::NewKey(Box::new(ApiKey::clone(&key)), answer.clone()),
                None => Reply::Done,
            },
            C::UpdateApiKey { id, .. } => self.key_reply(*id),
            C::CreateWebhook(row) => self.webhook_reply(row.id),
            C::UpdateWebhook { id, .. } | C::RotateWebhook { id, .. } => self.webhook_reply(*id),
            C::PutSecret(row) => {
                self.secret_reply(&Secret::place(row.tenant, row.cloud_id, &row.name))
            }
            C::Take
            | C::Lead { .. }
            | C::MintJoinToken(_)
            | C::TurnGossipKey { .. }
            | C::KeepDataKey { .. }
            | C::TurnMasterKey { .. }
            | C::EndSession(_)
            | C::SetAutopilot(_)
            | C::Bootstrap(_)
            | C::DeleteCloud { .. }
            | C::WithdrawInvitation { .. }
            | C::RemoveUser { .. }
            | C::DeleteApiKey { .. }
            | C::NoteKeyUse(_)
            | C::DeleteApplication { .. }
            | C::DeleteSecret { .. }
            | C::PutSigningKey { .. }
            | C::DeleteWebhook { .. }
            | C::DisableWebhook { .. }
            | C::ReportHealth { .. }
            | C::Told { .. }
            | C::ToldOf { .. }
            | C::DeleteUpload { .. }
            | C::SweepUploads { .. }
            | C::DeleteAgent { .. }
            | C::BeginBuild { .. }
            | C::BeginRollout { .. }
            | C::Verify { .. }
            | C::Promote { .. }
            | C::FailDeployment { .. }
            | C::FailAgent { .. }
            | C::ReportStopped { .. }
            | C::ForgetAgent { .. }
            | C::PlaceInstances(_)
            | C::ReportInstance { .. }
            | C::RemoveInstance { .. }
            | C::Sweep => Reply::Done,
        }
    }

    fn happenings(&self, event: &Event) -> Vec<Happening> {
        outbox::of_directory(self, event)
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// On its way to the log of its organization.
    fn audited(&mut self, row: &Arc<Audited>) {
        self.outbox.push_audited(row);
    }

    fn keys(&mut self) -> &mut Keys {
        &mut self.keys
    }

    fn tables(&mut self) -> Vec<&mut dyn AnyTable> {
        vec![
            &mut self.claims,
            &mut self.organizations,
            &mut self.users,
            &mut self.api_keys,
            &mut self.clouds,
            &mut self.agents,
            &mut self.names,
            &mut self.deployments,
            &mut self.versions,
            &mut self.instances,
            &mut self.uploads,
            &mut self.keys.done,
            &mut self.keys.running,
            &mut self.keys.expiry,
            &mut self.leaders,
            &mut self.nodes,
            &mut self.join_tokens,
            &mut self.gossip_keys,
            &mut self.invitations,
            &mut self.applications,
            &mut self.secrets,
            &mut self.signing_keys,
            &mut self.webhooks,
            &mut self.health,
            &mut self.autopilot,
            &mut self.ended_sessions,
            &mut self.data_keys,
            &mut self.outbox.rows,
            &mut self.outbox.next,
            &mut self.outbox.audited,
        ]
    }

    fn reindex(&mut self) {
        self.api_key_by_hash.clear();
        self.keys_of.clear();
        let keys: Vec<_> = self.api_keys.rows().map(|(_, key)| Arc::clone(key)).collect();
        keys.iter().for_each(|key| self.index_api_key(key));
        self.index_builds();
        self.user_by_email =
            self.users.rows().map(|(id, user)| (user.email.to_lowercase(), *id)).collect();
        self.cloud_names = self.clouds.rows().map(|(_, cloud)| cloud.taken_name()).collect();
    }
}

/// Writes.
impl Directory {
    fn turn_gossip_key(&mut self, sealed: &[u8]) {
        let last = self.gossip_keys.rows().next_back().map(|(turn, _)| *turn);
        if let Some(last) = last {
            self.gossip_keys.remove(&last);
        }
        self.gossip_keys.put(last.unwrap_or(0) + 1, sealed.to_vec());
    }

    fn turn_signing_key(&mut self, row: &SigningKey) {
        let last = self.signing_keys.rows().next_back().map_or(0, |(turn, _)| *turn);
        self.signing_keys.put(last + 1, row.clone());
        let turns: Vec<u64> = self.signing_keys.rows().map(|(turn, _)| *turn).collect();
        let surplus = turns.len().saturating_sub(SIGNING_KEYS_KEPT);
        turns.iter().take(surplus).for_each(|turn| self.signing_keys.remove(turn));
    }

    fn put_user(&mut self, row: &User) {
        self.forget_email(row.id);
        self.user_by_email.insert((row.email.to_lowercase(), row.id));
        self.users.put(row.id, row.clone());
    }

    fn drop_user(&mut self, id: UserId) {
        self.forget_email(id);
        self.users.remove(&id);
    }

    fn forget_email(&mut self, id: UserId) {
        if let Some(before) = self.users.get(&id) {
            self.user_by_email.remove(&(before.email.to_lowercase(), id));
        }
    }

    fn put_cloud(&mut self, row: &Cloud) {
        self.cloud_names.insert(row.taken_name());
        self.clouds.put(row.id, row.clone());
    }

    fn drop_cloud(&mut self, id: CloudId) {
        if let Some(before) = self.clouds.get(&id) {
            self.cloud_names.remove(&before.taken_name());
        }
        self.clouds.remove(&id);
    }

    fn put_api_key(&mut self, row: &ApiKey) {
        self.forget_hashes(row.id);
        self.index_api_key(row);
        self.api_keys.put(row.id, row.clone());
    }

    fn drop_api_key(&mut self, id: ApiKeyId) {
        self.forget_hashes(id);
        self.api_keys.remove(&id);
    }

    fn index_api_key(&mut self, row: &ApiKey) {
        *self.keys_of.entry(row.tenant).or_default() += 1;
        self.api_key_by_hash.extend(row.hashes().map(|hash| (beginning(hash), row.id)));
    }

    fn forget_hashes(&mut self, id: ApiKeyId) {
        let Some(before) = self.api_keys.get(&id) else { return };
        if let Some(count) = self.keys_of.get_mut(&before.tenant) {
            *count -= 1;
        }
        for hash in before.hashes() {
            self.api_key_by_hash.remove(&(beginning(hash), id));
        }
    }

    /// Uses that are later than the known ones.
    fn newer_uses(&self, uses: &[(ApiKeyId, Used)]) -> Vec<Event> {
        let newer = |(id, used): &(ApiKeyId, Used)| {
            let key = self.api_keys.get(id)?;
            let is_newer = key.last_used.as_ref().is_none_or(|known| known.at < used.at);
            is_newer.then(|| {
                let last_used = Some(Box::new(used.clone()));
                Event::ApiKeyPut(Box::new(ApiKey { last_used, ..ApiKey::clone(&key) }))
            })
        };
        uses.iter().filter_map(newer).collect()
    }

    fn create_agent(&mut self, row: &Arc<Agent>) {
        self.names.put(Agent::name_key(row.cloud_id, &row.name), row.id);
        self.agents.put(row.id, Arc::clone(row));
    }

    fn touch(&mut self, id: AgentId, at: Timestamp, change: impl FnOnce(&mut Agent)) {
        let known = self.agents.change(&id, |agent| {
            change(agent);
            agent.updated_at = at;
            agent.revision += 1;
        });
        debug_assert!(known, "decide emitted an event for {id}, which is not in the state");
    }

    fn hide_agent(&mut self, id: AgentId, at: Timestamp) {
        if let Some(agent) = self.agents.get(&id) {
            self.names.remove(&Agent::name_key(agent.cloud_id, &agent.name));
        }
        self.touch(id, at, |agent| agent.desired = Desired::Delete);
    }

    fn drop_agent(&mut self, id: AgentId) {
        let deployments: Vec<_> = self.deployments_of(id).map(|row| (id.0, row.id)).collect();
        deployments.iter().for_each(|(_, row)| self.note_building(id, *row, false));
        let versions: Vec<_> = self.versions_of(id).map(|row| (id.0, row.number)).collect();
        let instances: Vec<_> = self.instances_of(id).map(|row| (id.0, row.id)).collect();
        deployments.iter().for_each(|key| self.deployments.remove(key));
        versions.iter().for_each(|key| self.versions.remove(key));
        instances.iter().for_each(|key| self.instances.remove(key));
        self.health.remove(&id);
        self.agents.remove(&id);
    }

    fn queue_deployment(&mut self, row: &Deployment) {
        self.deployments.put((row.agent_id.0, row.id), row.clone());
        self.touch(row.agent_id, row.created_at, |agent| {
            agent.deployment = row.id;
            agent.waiting = None;
        });
        self.prune_deployments(row.agent_id);
    }

    fn hold_deployment(&mut self, row: &Deployment) {
        self.deployments.put((row.agent_id.0, row.id), row.clone());
        self.touch(row.agent_id, row.created_at, |agent| agent.waiting = Some(row.id));
    }

    fn note_building(&mut self, agent: AgentId, id: DeploymentId, is_building: bool) {
        let Some(tenant) = self.agents.get(&agent).map(|agent| agent.tenant) else { return };
        if is_building {
            self.building.entry(tenant).or_default().insert(id);
        } else if let Some(builds) = self.building.get_mut(&tenant) {
            builds.remove(&id);
            if builds.is_empty() {
                self.building.remove(&tenant);
            }
        }
    }

    fn index_builds(&mut self) {
        self.building.clear();
        let rows = self.deployments.rows().map(|(_, row)| Arc::clone(row));
        let building = rows.filter(|row| row.status == DeploymentStatus::Building);
        for row in building.collect::<Vec<_>>() {
            self.note_building(row.agent_id, row.id, true);
        }
    }

    fn prune_deployments(&mut self, id: AgentId) {
        let live = self.agents.get(&id).and_then(|agent| agent.live_deployment);
        let ended: Vec<_> = self
            .deployments_of(id)
            .filter(|row| !row.status.is_active() && Some(row.id) != live)
            .map(|row| row.id)
            .collect();
        let surplus = ended.len().saturating_sub(DEPLOYMENTS_KEPT);
        ended.iter().take(surplus).for_each(|old| self.deployments.remove(&(id.0, *old)));
    }

    fn move_deployment(
        &mut self,
        agent_id: AgentId,
        id: DeploymentId,
        to: DeploymentStatus,
        error: Option<&Failure>,
        at: Timestamp,
    ) {
        self.deployments.change(&(agent_id.0, id), |row| {
            row.status = to;
            row.error = error.cloned().or_else(|| row.error.take());
            match to {
                DeploymentStatus::Building => row.build_started_at = Some(at),
                DeploymentStatus::Deploying => row.rollout_started_at = Some(at),
                DeploymentStatus::Live
                | DeploymentStatus::Superseded
                | DeploymentStatus::Failed
                | DeploymentStatus::Canceled => {
                    row.finished_at.get_or_insert(at);
                }
                DeploymentStatus::Queued | DeploymentStatus::Verifying => {}
            }
        });
        self.note_building(agent_id, id, to == DeploymentStatus::Building);
        let waits = self.agents.get(&agent_id).is_some_and(|agent| agent.waiting == Some(id));
        if waits && !to.is_active() {
            self.touch(agent_id, at, |agent| agent.waiting = None);
        }
    }

    /// The waiting deployment's turn: if the one before it went live meanwhile, its number is taken.
    fn unblock_deployment(&mut self, agent_id: AgentId) {
        let Some(agent) = self.agents.get(&agent_id) else { return };
        let Some(next) = agent.waiting else { return };
        self.agents.change(&agent_id, |agent| {
            agent.waiting = None;
            agent.deployment = next;
            agent.revision += 1;
        });
        self.deployments.change(&(agent_id.0, next), |row| {
            row.version = row.version.max(agent.latest_version + 1);
        });
    }

    fn go_live(&mut self, agent_id: AgentId, version: &Version, at: Timestamp) {
        let deployment = self.agents.get(&agent_id).map(|agent| agent.deployment);
        self.versions.put((agent_id.0, version.number), version.clone());
        self.touch(agent_id, at, |agent| {
            agent.version = Some(version.number);
            agent.latest_version = agent.latest_version.max(version.number);
            agent.live_deployment = deployment;
            agent.deployed_at = Some(at);
        });
        let numbers: Vec<_> = self.versions_of(agent_id).map(|row| row.number).collect();
        let surplus = numbers.len().saturating_sub(VERSIONS_KEPT);
        let old = numbers.iter().filter(|number| **number != version.number).take(surplus);
        old.for_each(|number| self.versions.remove(&(agent_id.0, *number)));
    }

    fn move_instance(
        &mut self,
        agent_id: AgentId,
        id: InstanceId,
        to: InstanceStatus,
        isolation: Option<&Vec<String>>,
        at: Timestamp,
    ) {
        self.instances.change(&(agent_id.0, id), |row| {
            row.status = to;
            if let Some(isolation) = isolation {
                row.isolation.clone_from(isolation);
            }
            if to == InstanceStatus::Running {
                row.ready_at.get_or_insert(at);
            }
        });
    }

    fn agent_reply(&self, id: AgentId) -> Reply {
        self.agents.get(&id).map_or(Reply::Done, |agent| Reply::Agent(Box::new(self.view(&agent))))
    }

    fn cloud_reply(&self, id: CloudId) -> Reply {
        self.clouds.get(&id).map_or(Reply::Done, |row| Reply::Cloud(Box::new(Cloud::clone(&row))))
    }

    fn organization_reply(&self, id: OrgId) -> Reply {
        let row = self.organizations.get(&id);
        row.map_or(Reply::Done, |row| Reply::Organization(Box::new(Organization::clone(&row))))
    }

    fn user_reply(&self, id: UserId) -> Reply {
        self.users.get(&id).map_or(Reply::Done, |row| Reply::User(Box::new(User::clone(&row))))
    }

    fn key_reply(&self, id: ApiKeyId) -> Reply {
        let row = self.api_keys.get(&id);
        row.map_or(Reply::Done, |row| Reply::ApiKey(Box::new(ApiKey::clone(&row))))
    }

    fn webhook_reply(&self, id: WebhookId) -> Reply {
        let row = self.webhooks.get(&id);
        row.map_or(Reply::Done, |row| Reply::Webhook(Box::new(Webhook::clone(&row))))
    }

    fn secret_reply(&self, key: &String) -> Reply {
        let row = self.secrets.get(key);
        row.map_or(Reply::Done, |row| Reply::Secret(Box::new(Secret::clone(&row))))
    }

    fn node_reply(&self, id: NodeId) -> Reply {
        self.nodes.get(&id).map_or(Reply::Done, |row| Reply::Node(Box::new(Node::clone(&row))))
    }

    fn upload_reply(&self, id: UploadId) -> Reply {
        self.uploads
            .get(&id)
            .map_or(Reply::Done, |row| Reply::Upload(Box::new(Upload::clone(&row))))
    }
}

/// Once and for all: a second first start changes nothing.
fn bootstrap(state: &Directory, first: &Bootstrap) -> Vec<Event> {
    if !state.organizations.is_empty() {
        return vec![];
    }
    let mut events = vec![
        Event::OrganizationPut(Box::new(first.organization.clone())),
        Event::UserPut(Box::new(first.owner.clone())),
    ];
    events.extend(first.keys.iter().map(|key| Event::ApiKeyPut(Box::new(key.clone()))));
    events.extend(first.clouds.iter().map(|cloud| Event::CloudPut(Box::new(cloud.clone()))));
    events
}

/// What a key is looked up by: two keys whose hashes begin alike are told apart by the rest.
fn beginning(hash: &[u8; 32]) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|byte| hash[byte]))
}
