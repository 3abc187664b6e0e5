//! Everything that may happen to a machine. Events are what `decide` answers with and the only thing
//! `evolve` reads; later they are also what webhooks tell.

use std::sync::Arc;

use crate::{
    AgentId, ApiKeyId, ApplicationId, CloudId, DeploymentId, InstanceId, InvitationId, JobId,
    NodeId, OrgId, SessionId, Timestamp, UserId, WebhookId,
    account::{
        ApiKey, Application, Code, Invitation, Organization, Session, SigningKey, Tenant, Throttle,
        User,
    },
    agent::{Agent, Desired, Status, StatusReason},
    audit::Audited,
    autopilot::Autopilot,
    cloud::Cloud,
    data_key::DataKey,
    deployment::{Deployment, DeploymentStatus, Failure, Image, Version},
    idempotency::{KeyHash, Keyed},
    instance::{Instance, InstanceStatus},
    job::Job,
    machine::Claim,
    node::{JoinToken, Node},
    outbox::Occurrence,
    rate::Usage,
    secret::Secret,
    upload::Upload,
    webhook::{Webhook, delivery::Delivery},
};

/// What happened in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryEvent {
    /// A shard has a new leader.
    ShardTaken(Claim),
    /// Who a shard's new leader is.
    ShardLed {
        /// The shard and its term.
        claim: Claim,
        /// The leader.
        node: NodeId,
    },
    /// A node is new or changed.
    NodePut(Box<Node>),
    /// A token may be used to join.
    JoinTokenPut(Box<JoinToken>),
    /// A token was used, or its time is over.
    JoinTokenGone([u8; 32]),
    /// A session has ended; kept until then.
    SessionEnded {
        /// Which one.
        id: SessionId,
        /// When its last access token has expired.
        until: Timestamp,
    },
    /// All tokens of an ended session have expired.
    SessionForgotten(SessionId),
    /// What an owner's secrets are sealed with is sealed with this master key.
    DataKeyPut {
        /// Whose it is.
        owner: OrgId,
        /// The key.
        key: Box<DataKey>,
    },
    /// Gossip is sealed with another key.
    GossipKeyTurned(Vec<u8>),
    /// The operator wants replicas looked after like this.
    AutopilotPut(Box<Autopilot>),
    /// An organization exists.
    OrganizationPut(Box<Organization>),
    /// A person exists.
    UserPut(Box<User>),
    /// A person is gone.
    UserGone(UserId),
    /// Somebody is invited.
    InvitationPut(Box<Invitation>),
    /// An invitation was used, withdrawn or is too old.
    InvitationGone(InvitationId),
    /// A key is new or changed.
    ApiKeyPut(Box<ApiKey>),
    /// A key is gone.
    ApiKeyGone(ApiKeyId),
    /// An application is new.
    ApplicationPut(Box<Application>),
    /// An application is gone.
    ApplicationGone(ApplicationId),
    /// A secret has a value.
    SecretPut(Box<Secret>),
    /// A secret is gone.
    SecretGone(String),
    /// Access tokens are signed with another key.
    SigningKeyPut(Box<SigningKey>),
    /// A webhook is new or changed.
    WebhookPut(Box<Webhook>),
    /// A webhook is gone.
    WebhookGone(WebhookId),
    /// A webhook was disabled for its receiver's failures.
    WebhookDisabled {
        /// Which one.
        id: WebhookId,
        /// Why.
        reason: String,
        /// When.
        at: Timestamp,
    },
    /// `agent.health_changed`.
    HealthChanged {
        /// Which agent.
        agent_id: AgentId,
        /// What it was.
        before: String,
        /// What it is.
        now: String,
        /// Why.
        reason: String,
        /// Whose doing, if it was one instance's.
        instance: Option<InstanceId>,
        /// When.
        at: Timestamp,
    },
    /// Everybody has what waited in the outbox, up to this number.
    Told(u64),
    /// Everybody has these of what waited in the outbox.
    ToldOf(Vec<u64>),
    /// A cloud is new or changed.
    CloudPut(Box<Cloud>),
    /// A cloud is gone.
    CloudGone(CloudId),
    /// An upload is announced or received.
    UploadPut(Box<Upload>),
    /// An upload is gone.
    UploadGone(crate::UploadId),
    /// `agent.created`.
    AgentCreated(Arc<Agent>),
    /// `agent.updated`: fields that clients set.
    AgentUpdated(Arc<Agent>),
    /// The client wants something else.
    AgentDesired {
        /// Which agent.
        id: AgentId,
        /// What is wanted.
        desired: Desired,
        /// When.
        at: Timestamp,
    },
    /// The status moved.
    AgentMoved {
        /// Which agent.
        id: AgentId,
        /// Where it is now.
        to: Status,
        /// Why, when it is not running.
        reason: Option<StatusReason>,
        /// When.
        at: Timestamp,
    },
    /// Hidden at once, its name free; the row goes when its instances are gone.
    AgentDeleted {
        /// Which agent.
        id: AgentId,
        /// When.
        at: Timestamp,
    },
    /// The row is gone with all that belonged to it.
    AgentGone(AgentId),
    /// A deployment takes its place as the newest.
    DeploymentQueued(Box<Deployment>),
    /// A deployment waits for the one before it.
    DeploymentWaits(Box<Deployment>),
    /// A deployment moved.
    DeploymentMoved {
        /// The agent.
        agent_id: AgentId,
        /// Which deployment.
        id: DeploymentId,
        /// Where it is now.
        to: DeploymentStatus,
        /// Why, when it failed.
        error: Option<Failure>,
        /// When.
        at: Timestamp,
    },
    /// A build gave an image.
    ImageBuilt {
        /// The agent.
        agent_id: AgentId,
        /// Which deployment.
        id: DeploymentId,
        /// What came out.
        image: Box<Image>,
    },
    /// The waiting deployment's turn has come.
    DeploymentUnblocked {
        /// The agent.
        agent_id: AgentId,
    },
    /// `agent.deployed`: the version serves from now on.
    VersionLive {
        /// The agent.
        agent_id: AgentId,
        /// The version and what it froze.
        version: Box<Version>,
        /// Whether it served before: a start or a rollback.
        again: bool,
        /// When.
        at: Timestamp,
    },
    /// An instance was placed.
    InstancePlaced(Box<Instance>),
    /// An instance moved.
    InstanceMoved {
        /// The agent.
        agent_id: AgentId,
        /// Which instance.
        id: InstanceId,
        /// Where it is now.
        to: InstanceStatus,
        /// Isolation layers that hold, where it just came up.
        isolation: Option<Vec<String>>,
        /// When.
        at: Timestamp,
    },
    /// An instance is gone.
    InstanceGone {
        /// The agent.
        agent_id: AgentId,
        /// Which instance.
        id: InstanceId,
    },
    /// Answers of old keyed calls are forgotten.
    KeysForgotten(Timestamp),
}

/// What happened in a shard.
#[derive(Clone, Debug, PartialEq)]
pub enum ShardEvent {
    /// A job was accepted.
    JobAccepted(Box<Job>),
    /// A job moved on: the whole row, since attempts change many of its fields at once.
    JobMoved(Box<Job>),
    /// A job ended.
    JobFinished(Box<Job>),
    /// A finished job was removed.
    JobGone(JobId),
    /// A keyed synchronous call begins.
    CallBegun {
        /// The key.
        key: Keyed,
        /// Until when it may run.
        deadline: Timestamp,
        /// The life of the node that runs it.
        boot: String,
    },
    /// A keyed synchronous call ended.
    CallEnded {
        /// The key.
        key: Keyed,
        /// Its outcome.
        outcome: crate::shard::CallOutcome,
        /// When.
        at: Timestamp,
    },
    /// The answer of a keyed call is withdrawn: nothing had begun.
    CallWithdrawn(KeyHash),
    /// A session is new or was refreshed.
    SessionPut(Box<Session>),
    /// A session is over.
    SessionGone(SessionId),
    /// A code is new or was used.
    CodePut(Box<Code>),
    /// A wrong password was counted.
    ThrottlePut {
        /// Account and address.
        guess: [u8; 32],
        /// What is counted.
        row: Throttle,
    },
    /// Wrong passwords are forgotten.
    ThrottleGone([u8; 32]),
    /// What a tenant has used.
    UsagePut {
        /// Whose.
        tenant: Tenant,
        /// How much.
        usage: Usage,
    },
    /// Something that clients are told of is in the organization's log.
    EventKept(Arc<Occurrence>),
    /// An event is in line for a webhook.
    DeliveryQueued(Box<Delivery>),
    /// An attempt failed, and there will be another one.
    DeliveryTried(Box<Delivery>),
    /// A delivery succeeded or was given up.
    DeliveryEnded(Box<Delivery>),
    /// An ended or waiting delivery is tried at once.
    DeliveryAgain(Box<Delivery>),
    /// A webhook is gone.
    HookGone(WebhookId),
    /// Everybody has what waited in the outbox, up to this number.
    Told(u64),
    /// Everybody has these of what waited in the outbox.
    ToldOf(Vec<u64>),
    /// Rows of the audit log.
    Audited(Vec<Arc<Audited>>),
    /// Old keys and finished jobs are forgotten.
    Swept(Timestamp),
}
