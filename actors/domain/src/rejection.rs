//! Every reason for a no. A refusal is an answer, not a fault: it is replicated, expected, tested.

use serde::{Deserialize, Serialize};

use crate::{
    AgentId, ApiKeyId, ApplicationId, CloudId, DeliveryId, DeploymentId, EventId, InvitationId,
    JobId, NodeId, OrgId, SessionId, Timestamp, UploadId, UserId, WebhookId,
};

/// Why a command was refused. The text says what to do next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Rejection {
    /// No such agent, or not the caller's.
    #[error("the agent {0} does not exist")]
    AgentNotFound(AgentId),
    /// No such cloud, or not the caller's.
    #[error("the specified cloud does not exist")]
    CloudNotFound(CloudId),
    /// No such job, or not the caller's.
    #[error("the job {0} does not exist")]
    JobNotFound(JobId),
    /// The job was kept for its time and is forgotten.
    #[error("the job {id} was kept until {expired_at}; fetch results before then")]
    JobExpired {
        /// Which job.
        id: JobId,
        /// Since when.
        expired_at: Timestamp,
    },
    /// No such deployment of this agent.
    #[error("the deployment {0} does not exist")]
    DeploymentNotFound(DeploymentId),
    /// No such upload, or not the caller's.
    #[error("the upload {0} does not exist")]
    UploadNotFound(UploadId),
    /// No such key.
    #[error("the API key {0} does not exist")]
    ApiKeyNotFound(ApiKeyId),
    /// Names are unique within a cloud, whatever their case.
    #[error("an agent named `{0}` already exists in this cloud; choose another name")]
    AgentNameTaken(String),
    /// Names of clouds are unique within an organization.
    #[error("a cloud named `{0}` already exists; choose another name")]
    CloudNameTaken(String),
    /// The operation does not fit the state.
    #[error("the state is {current}; this needs {}", allowed.join(" or "))]
    InvalidState {
        /// The state now.
        current: String,
        /// The states it works in.
        allowed: Vec<String>,
    },
    /// The agent is stopped or failed.
    #[error("the agent is not running; start it, or redeploy it if it has failed")]
    AgentNotRunning,
    /// The agent has not come up yet.
    #[error("the agent has no running version yet; wait until it is running")]
    AgentNotReady,
    /// The object changed since the client read it.
    #[error("the object has changed since it was read; read it again and repeat the change")]
    StaleObject,
    /// A cloud with agents stays.
    #[error("the cloud still has {agents} agents; delete them first")]
    CloudNotEmpty {
        /// Which cloud.
        cloud_id: CloudId,
        /// How many agents it has.
        agents: usize,
    },
    /// The cloud has as many agents as its limits allow.
    #[error("the cloud takes at most {max} agents; delete one or raise its limit")]
    CloudFull {
        /// The limit.
        max: u32,
    },
    /// A deployment is under way.
    #[error("a deployment is in progress; wait for it or cancel it")]
    DeploymentInProgress,
    /// No such version any more.
    #[error("the agent has no version {0}; list them under /versions")]
    VersionNotFound(u64),
    /// The archive has not arrived.
    #[error("the upload has not been received yet; PUT the archive to its upload_url first")]
    UploadNotReady,
    /// What arrived is not what was announced.
    #[error("the bytes received differ from the announced size or SHA-256; upload again")]
    UploadCorrupt,
    /// The job ended already.
    #[error("the job has already finished")]
    JobAlreadyFinished,
    /// The job runs still.
    #[error("the job has not finished yet; cancel it or wait for its end")]
    JobNotFinished,
    /// The tier's limit of calls at once.
    #[error(
        "{max} calls are in flight, which is the tier's limit; wait for answers before you send more"
    )]
    TooManyInFlight {
        /// The limit.
        max: u64,
    },
    /// The tier's limit of jobs that wait.
    #[error("{max} jobs are waiting, which is the tier's limit; retry after some have begun")]
    TooManyQueued {
        /// The limit.
        max: u64,
    },
    /// Too many unfinished jobs.
    #[error("too many jobs are waiting; retry after some have finished")]
    TooManyJobs,
    /// The key was used with another body.
    #[error("this idempotency key was used with another body; use a new key for a new request")]
    IdempotencyKeyReused,
    /// The call with this key has not ended.
    #[error("a request with this idempotency key is still in progress; retry in a second")]
    IdempotencyInProgress,
    /// No such organization.
    #[error("the organization {0} does not exist")]
    OrganizationNotFound(OrgId),
    /// No such person in this organization.
    #[error("the user {0} does not exist")]
    UserNotFound(UserId),
    /// No such invitation in this organization.
    #[error("the invitation {0} does not exist")]
    InvitationNotFound(InvitationId),
    /// No such application in this organization.
    #[error("the OAuth application {0} does not exist")]
    ApplicationNotFound(ApplicationId),
    /// No such secret.
    #[error("the secret {0} does not exist; set it with PUT /v1/secrets/{0}")]
    SecretNotFound(String),
    /// No such webhook, or not the caller's.
    #[error("the webhook {0} does not exist")]
    WebhookNotFound(WebhookId),
    /// No such delivery of this webhook.
    #[error("the delivery {0} does not exist")]
    DeliveryNotFound(DeliveryId),
    /// No such event.
    #[error("the event {0} does not exist, or is older than 30 days")]
    EventNotFound(EventId),
    /// The session is over.
    #[error("the session {0} is over; log in again")]
    SessionNotFound(SessionId),
    /// Names of organizations are unique.
    #[error("an organization named `{0}` already exists; choose another name")]
    OrganizationNameTaken(String),
    /// An address belongs to one person.
    #[error("somebody with this email address is here already")]
    EmailTaken,
    /// A token that was used, is too old or was never given out.
    #[error("the invitation is not valid any more; ask for another one")]
    InvitationInvalid,
    /// Nobody hands on more than they have.
    #[error("the role {0} is more than you may give or take")]
    RoleTooHigh(String),
    /// Somebody has to be there.
    #[error("this is the organization's last owner; make somebody else an owner first")]
    LastOwner,
    /// The tier, or a limit of the service.
    #[error("there are {max} {what} already, which is the most there may be")]
    QuotaExceeded {
        /// Of what.
        what: String,
        /// The limit.
        max: u64,
    },
    /// With what is there already it would be more than it takes.
    #[error("would have more than {max} members with those that it has")]
    TooManyMembers {
        /// Which map.
        field: String,
        /// The limit.
        max: usize,
    },
    /// Too many wrong passwords.
    #[error("too many wrong passwords; try again later")]
    LoginThrottled {
        /// When the next one is heard.
        until: Timestamp,
    },
    /// A code or token that was used, is too old, or was given to somebody else.
    #[error(
        "the code or token is not valid: it was used, is too old or was given to somebody else"
    )]
    GrantInvalid,
    /// The proposer's leadership is over.
    #[error("another node has taken over")]
    NotOwner,
    /// No such node.
    #[error("the node {0} does not exist")]
    NodeNotFound(NodeId),
    /// The node left the cluster, or never belonged to it.
    #[error(
        "the node {0} does not belong to this cluster; join it again with an empty data folder"
    )]
    NodeRemoved(NodeId),
    /// A token that was used, is too old or was never given out.
    #[error("the join token is not valid any more; make a new one with `roost token`")]
    JoinTokenInvalid,
    /// Nobody redeems them.
    #[error("too many join tokens are waiting to be used; they are good for an hour")]
    TooManyJoinTokens,
    /// Instances have not moved away yet.
    #[error("the node {0} still runs instances; wait until it is drained")]
    NodeInUse(NodeId),
    /// A cluster needs one node.
    #[error("this is the last node of the cluster; it has to stay")]
    LastNode,
}

impl Rejection {
    /// Whether the same request would be refused alike after any wait: such a refusal is kept under
    /// an idempotency key.
    pub fn is_final(&self) -> bool {
        match self {
            Self::AgentNotFound(_)
            | Self::CloudNotFound(_)
            | Self::JobNotFound(_)
            | Self::JobExpired { .. }
            | Self::DeploymentNotFound(_)
            | Self::UploadNotFound(_)
            | Self::ApiKeyNotFound(_)
            | Self::AgentNameTaken(_)
            | Self::CloudNameTaken(_)
            | Self::InvalidState { .. }
            | Self::AgentNotRunning
            | Self::AgentNotReady
            | Self::StaleObject
            | Self::CloudNotEmpty { .. }
            | Self::CloudFull { .. }
            | Self::DeploymentInProgress
            | Self::VersionNotFound(_)
            | Self::UploadNotReady
            | Self::UploadCorrupt
            | Self::JobAlreadyFinished
            | Self::JobNotFinished
            | Self::NodeNotFound(_)
            | Self::NodeRemoved(_)
            | Self::JoinTokenInvalid
            | Self::OrganizationNotFound(_)
            | Self::UserNotFound(_)
            | Self::InvitationNotFound(_)
            | Self::ApplicationNotFound(_)
            | Self::SecretNotFound(_)
            | Self::WebhookNotFound(_)
            | Self::DeliveryNotFound(_)
            | Self::EventNotFound(_)
            | Self::SessionNotFound(_)
            | Self::OrganizationNameTaken(_)
            | Self::EmailTaken
            | Self::InvitationInvalid
            | Self::RoleTooHigh(_)
            | Self::LastOwner
            | Self::QuotaExceeded { .. }
            | Self::TooManyMembers { .. }
            | Self::GrantInvalid
            | Self::LastNode => true,
            Self::TooManyJobs
            | Self::TooManyInFlight { .. }
            | Self::TooManyQueued { .. }
            | Self::IdempotencyKeyReused
            | Self::IdempotencyInProgress
            | Self::TooManyJoinTokens
            | Self::LoginThrottled { .. }
            | Self::NodeInUse(_)
            | Self::NotOwner => false,
        }
    }
}
