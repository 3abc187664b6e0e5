//! What clients are told of: kept in the group that made the change, in the very entry that made it,
//! until the organization's event log and every webhook have it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    AgentId, CloudId, EventId, OrgId, Timestamp,
    account::Tenant,
    agent::{Agent, Status},
    audit::Audited,
    deployment::{DeploymentStatus, Failure, Trigger},
    directory::Directory,
    event::{DirectoryEvent, ShardEvent},
    ids::dice_of,
    job::{Job, JobStatus},
    table::{Row, Table},
};

/// Stands in data for the address of the service, which no state machine knows.
pub const SERVICE: &str = "{service}";

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $about:literal;)*) => {
        /// A type of event (`interface`, Events, and the additive ones of `decisions` §12).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Kind {
            $(#[doc = $about] #[serde(rename = $word)] $name,)*
        }

        impl Kind {
            /// Every type, in the order they are shown.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The word used in bodies.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// What it means.
            pub fn about(self) -> &'static str {
                match self { $(Self::$name => $about,)* }
            }
        }
    };
}

kinds! {
    AgentDeployed = "agent.deployed", "Agent successfully deployed";
    AgentFailed = "agent.failed", "Agent deployment or runtime failure";
    AgentStarted = "agent.started", "Agent started";
    AgentStopped = "agent.stopped", "Agent stopped";
    AgentScaled = "agent.scaled", "Agent auto-scaled up or down";
    AgentHealthChanged = "agent.health_changed", "Agent health status changed";
    ChainCompleted = "chain.completed", "Chain execution completed";
    ChainFailed = "chain.failed", "Chain execution failed";
    ThreatBlocked = "security.threat_blocked", "The threat-protection feature blocked a threat";
    ThresholdReached = "billing.threshold_reached", "Usage threshold reached";
    PaymentFailed = "billing.payment_failed", "Payment processing failed";
    AgentCreated = "agent.created", "Agent accepted, before its first deployment";
    AgentUpdated = "agent.updated", "Agent configuration changed";
    AgentDeleted = "agent.deleted", "Agent deleted";
    DeploymentRolledBack = "deployment.rolled_back", "A deployment failed and the version before it goes on serving";
    JobCompleted = "job.completed", "Asynchronous invocation completed";
    JobFailed = "job.failed", "Asynchronous invocation failed";
    JobCanceled = "job.canceled", "Asynchronous invocation canceled";
    WebhookDisabled = "webhook.disabled", "A webhook was disabled because its receiver failed for too long";
}

impl std::str::FromStr for Kind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.iter().copied().find(|kind| kind.as_str() == text).ok_or(())
    }
}

impl Kind {
    /// Events that are kept only while somebody listens: there may be thousands a second.
    pub fn is_kept_unheard(self) -> bool {
        !matches!(self, Self::JobCompleted | Self::JobFailed | Self::JobCanceled)
    }
}

/// Something that clients are told of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occurrence {
    /// Its id, the same wherever it is told.
    pub id: EventId,
    /// Whose.
    pub tenant: Tenant,
    /// What.
    pub kind: Kind,
    /// When.
    pub at: Timestamp,
    /// The JSON object of `data`, as text.
    pub data: String,
    /// The agent it is about: deliveries may be ordered by it.
    pub agent: Option<AgentId>,
}

/// Something to be told, before it has a number.
#[derive(Clone, Debug, PartialEq)]
pub struct Happening {
    /// Whose.
    pub tenant: Tenant,
    /// What.
    pub kind: Kind,
    /// The JSON object of `data`, as text.
    pub data: String,
    /// The agent it is about.
    pub agent: Option<AgentId>,
}

/// What waits to be told, oldest first.
pub struct Outbox {
    /// By number.
    pub rows: Table<u64, Occurrence>,
    /// Rows of the audit log, numbered with the others.
    pub audited: Table<u64, Audited>,
    /// The number of the next one, under 0. Numbers are never used again.
    pub next: Table<u64, u64>,
}

/// The oldest of what waits, by number.
#[derive(Clone, Debug, Default)]
pub struct Waiting {
    /// The number of the last of it.
    pub up_to: Option<u64>,
    /// Whether there is more behind it.
    pub has_more: bool,
    /// What clients are told of.
    pub events: Vec<(u64, Arc<Occurrence>)>,
    /// Rows of the audit log.
    pub audited: Vec<(u64, Arc<Audited>)>,
}

/// One of what waits.
#[derive(Clone, Copy, Debug)]
pub enum Item<'w> {
    /// What clients are told of.
    Event(&'w Occurrence),
    /// A row of the audit log.
    Row(&'w Audited),
}

impl Outbox {
    /// In two tables that begin at this number, and one for the audit log.
    pub fn new(first_table: u8, audited: u8) -> Self {
        Self {
            rows: Table::live(first_table),
            next: Table::live(first_table + 1),
            audited: Table::live(audited),
        }
    }

    /// Keeps something to be told.
    pub fn push(&mut self, happening: Happening, at: Timestamp) {
        let number = self.number();
        let Happening { tenant, kind, data, agent } = happening;
        let mut digest = Sha256::new();
        digest.update(number.to_be_bytes());
        digest.update(kind.as_str());
        digest.update(&data);
        let id = EventId::new(at, dice_of(digest));
        self.rows.put(number, Occurrence { id, tenant, kind, at, data, agent });
    }

    /// Keeps a row of the audit log.
    pub fn push_audited(&mut self, row: &Arc<Audited>) {
        let number = self.number();
        self.audited.put(number, Arc::clone(row));
    }

    fn number(&mut self) -> u64 {
        let number = self.next.get(&0).map_or(1, |next| *next);
        self.next.put(0, number + 1);
        number
    }

    /// The number of an organization's newest row of the audit log that waits here.
    pub fn newest_audited(&self, org: OrgId) -> Option<u64> {
        let mut rows = self.audited.rows().rev();
        rows.find(|(_, row)| row.org == org).map(|(number, _)| *number)
    }

    /// The oldest rows but those that stay: at most so many of each kind, and none that is younger than one left
    /// behind for its number.
    pub fn oldest(&self, most: usize, stays: impl Fn(Item<'_>) -> bool) -> Waiting {
        let events = self.rows.rows().filter(|(_, row)| !stays(Item::Event(row)));
        let mut events: Vec<_> = events.take(most + 1).collect();
        let audited = self.audited.rows().filter(|(_, row)| !stays(Item::Row(row)));
        let mut audited: Vec<_> = audited.take(most + 1).collect();
        let cut = [cut(&mut events, most), cut(&mut audited, most)].into_iter().flatten().min();
        let newest = [newest(&events), newest(&audited)].into_iter().flatten().max();
        let Some(up_to) = cut.or(newest) else { return Waiting::default() };
        let (events, audited) = (events.into_iter(), audited.into_iter());
        let events = events.take_while(|(number, _)| **number <= up_to);
        let audited = audited.take_while(|(number, _)| **number <= up_to);
        Waiting {
            up_to: Some(up_to),
            has_more: cut.is_some(),
            events: events.map(|(number, row)| (*number, Arc::clone(row))).collect(),
            audited: audited.map(|(number, row)| (*number, Arc::clone(row))).collect(),
        }
    }

    /// Forgets what was told, up to this number.
    pub fn told(&mut self, up_to: u64) {
        forget(&mut self.rows, up_to);
        forget(&mut self.audited, up_to);
    }

    /// Forgets what was told.
    pub fn told_of(&mut self, numbers: &[u64]) {
        for number in numbers {
            self.rows.remove(number);
            self.audited.remove(number);
        }
    }
}

/// Leaves the oldest rows; the number of the last of them, if there are others behind them.
fn cut<V>(rows: &mut Vec<(&u64, V)>, most: usize) -> Option<u64> {
    let has_more = rows.len() > most;
    rows.truncate(most);
    newest(rows).filter(|_| has_more)
}

fn forget<V: Row>(rows: &mut Table<u64, V>, up_to: u64) {
    let done = rows.rows().map(|(number, _)| *number).take_while(|number| *number <= up_to);
    done.collect::<Vec<_>>().iter().for_each(|number| rows.remove(number));
}

fn newest<V>(rows: &[(&u64, V)]) -> Option<u64> {
    rows.last().map(|(number, _)| **number)
}

fn joined(mut data: Value, more: Value) -> Value {
    if let (Some(data), Value::Object(more)) = (data.as_object_mut(), more) {
        data.extend(more);
    }
    data
}

fn text(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("a JSON value writes JSON")
}

fn with_data(agent: &Agent, kind: Kind, data: &impl Serialize) -> Happening {
    Happening { tenant: agent.tenant, kind, data: text(data), agent: Some(agent.id) }
}

fn about(agent: &Agent, kind: Kind, more: Value) -> Happening {
    let who = json!({ "agent_id": agent.id, "agent_name": agent.name });
    with_data(agent, kind, &joined(who, more))
}

fn version_of(agent: &Agent) -> Value {
    agent.version.map_or(Value::Null, |version| json!(version.to_string()))
}

fn failed(agent: &Agent, code: &str, message: &str, details: &str) -> Happening {
    let more = json!({
        "error": { "code": code, "message": message, "details": details },
        "logs_url": format!("{SERVICE}/v1/agents/{}/logs", agent.id),
    });
    about(agent, Kind::AgentFailed, more)
}

/// What a move of an agent's status tells. `agent` is as it was before.
fn moved(
    state: &Directory,
    agent: &Agent,
    to: Status,
    reason: Option<&crate::agent::StatusReason>,
    at: Timestamp,
) -> Vec<Happening> {
    let common = json!({ "cloud_id": agent.cloud_id, "version": version_of(agent) });
    let with = |kind, more: Value| about(agent, kind, joined(common.clone(), more));
    match to {
        Status::Running => {
            let trigger = state.deployment(agent.id, agent.deployment).map(|row| row.trigger);
            let reason = trigger.map_or("start", Trigger::as_str);
            let more =
                json!({ "status": "running", "started_at": at.to_string(), "reason": reason });
            vec![with(Kind::AgentStarted, more)]
        }
        Status::Stopped => {
            let more =
                json!({ "status": "stopped", "stopped_at": at.to_string(), "reason": "user" });
            vec![with(Kind::AgentStopped, more)]
        }
        Status::Failed => {
            let reason = reason.cloned().unwrap_or(crate::agent::StatusReason {
                code: "UNKNOWN".to_owned(),
                message: "the agent failed".to_owned(),
                since: at,
            });
            let mut told = vec![failed(agent, &reason.code, &reason.message, "")];
            let known = state.health.get(&agent.id);
            let before = known.as_ref().map_or("healthy", |known| known.as_str());
            if agent.status == Status::Running && before != "unhealthy" {
                told.push(health(agent, before, "unhealthy", &reason.message, None, at));
            }
            told
        }
        Status::Created | Status::Building | Status::Deploying => vec![],
    }
}

fn health(
    agent: &Agent,
    before: &str,
    now: &str,
    reason: &str,
    instance: Option<crate::InstanceId>,
    at: Timestamp,
) -> Happening {
    let more = json!({
        "previous_status": before, "current_status": now, "reason": reason,
        "instance_id": instance, "changed_at": at.to_string(),
    });
    about(agent, Kind::AgentHealthChanged, more)
}

/// A deployment that failed while the version before it serves.
fn rolled_back(agent: &Agent, id: crate::DeploymentId, error: Option<&Failure>) -> Vec<Happening> {
    let unknown = Failure::new("UNKNOWN", "the deployment failed");
    let error = error.unwrap_or(&unknown);
    let details = match error.details.as_str() {
        "" => "rolled back".to_owned(),
        details => format!("rolled back; {details}"),
    };
    let more = json!({
        "cloud_id": agent.cloud_id, "deployment_id": id, "version": version_of(agent),
        "error": { "code": error.code, "message": error.message, "details": error.details },
    });
    vec![
        failed(agent, &error.code, &error.message, &details),
        about(agent, Kind::DeploymentRolledBack, more),
    ]
}

/// What is told of an agent whose record changed: so often that it is written without a [`Value`]. Its members are in
/// order, as those of a [`Value`] are.
#[derive(Serialize)]
struct Standing<'a> {
    agent_id: AgentId,
    agent_name: &'a str,
    cloud_id: CloudId,
    status: &'static str,
    version: Value,
}

fn standing(agent: &Agent, kind: Kind) -> Happening {
    let data = Standing {
        agent_id: agent.id,
        agent_name: &agent.name,
        cloud_id: agent.cloud_id,
        status: agent.status.as_str(),
        version: version_of(agent),
    };
    with_data(agent, kind, &data)
}

/// What events of the directory tell, seen before they take effect.
pub(crate) fn of_directory(state: &Directory, event: &DirectoryEvent) -> Vec<Happening> {
    use DirectoryEvent as E;
    let agent = |id: &AgentId| state.agents.get(id);
    match event {
        E::AgentCreated(row) => vec![standing(row, Kind::AgentCreated)],
        E::AgentUpdated(row) => vec![standing(row, Kind::AgentUpdated)],
        E::AgentDeleted { id, .. } => {
            agent(id).map(|row| standing(&row, Kind::AgentDeleted)).into_iter().collect()
        }
        E::AgentMoved { id, to, reason, at } => match agent(id) {
            Some(row) if row.status != *to => moved(state, &row, *to, reason.as_ref(), *at),
            _ => vec![],
        },
        E::HealthChanged { agent_id, before, now, reason, instance, at } => agent(agent_id)
            .map(|row| health(&row, before, now, reason, *instance, *at))
            .into_iter()
            .collect(),
        E::DeploymentMoved { agent_id, id, to: DeploymentStatus::Failed, error, .. } => {
            match agent(agent_id) {
                Some(row) if row.status == Status::Running => {
                    rolled_back(&row, *id, error.as_ref())
                }
                _ => vec![],
            }
        }
        E::VersionLive { agent_id, version, again, .. } => {
            let Some(row) = agent(agent_id) else { return vec![] };
            let trigger = state.deployment(row.id, row.deployment).map(|row| row.trigger);
            if *again && trigger != Some(Trigger::Rollback) {
                return vec![];
            }
            let more = json!({
                "cloud_id": row.cloud_id, "version": version.number.to_string(),
                "status": "running", "endpoint": format!("{SERVICE}/v1/agents/{}/http", row.id),
            });
            vec![about(&row, Kind::AgentDeployed, more)]
        }
        E::WebhookDisabled { id, reason, at } => state
            .webhooks
            .get(id)
            .map(|row| Happening {
                tenant: row.tenant,
                kind: Kind::WebhookDisabled,
                data: text(&json!({
                    "webhook_id": id, "reason": reason,
                    "disabled_at": at.to_string(),
                })),
                agent: None,
            })
            .into_iter()
            .collect(),
        E::ShardTaken(_)
        | E::ShardLed { .. }
        | E::NodePut(_)
        | E::JoinTokenPut(_)
        | E::JoinTokenGone(_)
        | E::DataKeyPut { .. }
        | E::GossipKeyTurned(_)
        | E::SessionEnded { .. }
        | E::SessionForgotten(_)
        | E::AutopilotPut(_)
        | E::OrganizationPut(_)
        | E::UserPut(_)
        | E::UserGone(_)
        | E::InvitationPut(_)
        | E::InvitationGone(_)
        | E::ApiKeyPut(_)
        | E::ApiKeyGone(_)
        | E::ApplicationPut(_)
        | E::ApplicationGone(_)
        | E::SecretPut(_)
        | E::SecretGone(_)
        | E::SigningKeyPut(_)
        | E::WebhookPut(_)
        | E::WebhookGone(_)
        | E::Told(_)
        | E::ToldOf(_)
        | E::CloudPut(_)
        | E::CloudGone(_)
        | E::UploadPut(_)
        | E::UploadGone(_)
        | E::AgentDesired { .. }
        | E::AgentGone(_)
        | E::DeploymentQueued(_)
        | E::DeploymentWaits(_)
        | E::DeploymentMoved { .. }
        | E::ImageBuilt { .. }
        | E::DeploymentUnblocked { .. }
        | E::InstancePlaced(_)
        | E::InstanceMoved { .. }
        | E::InstanceGone { .. }
        | E::KeysForgotten(_) => vec![],
    }
}

fn of_job(job: &Job) -> Option<Happening> {
    let kind = match job.status {
        JobStatus::Completed => Kind::JobCompleted,
        JobStatus::Failed => Kind::JobFailed,
        JobStatus::Canceled => Kind::JobCanceled,
        JobStatus::Pending | JobStatus::Running => return None,
    };
    let error = job.error.as_ref().map(|error| {
        let details: Value = serde_json::from_str(&error.details).unwrap_or_default();
        json!({ "code": error.code, "message": error.message, "details": details })
    });
    let data = text(&json!({
        "job_id": job.id,
        "agent_id": job.agent_id,
        "status": job.status.as_str(),
        "attempt": job.attempt,
        "usage": { "tokens_used": job.usage.tokens_used, "compute_ms": job.usage.compute_ms },
        "error": error,
        "completed_at": job.completed_at.map(|at| at.to_string()),
        "job_url": format!("{SERVICE}/v1/jobs/{}", job.id),
    }));
    Some(Happening { tenant: job.tenant, kind, data, agent: Some(job.agent_id) })
}

/// What events of a shard tell.
pub(crate) fn of_shard(event: &ShardEvent) -> Vec<Happening> {
    match event {
        ShardEvent::JobFinished(job) => of_job(job).into_iter().collect(),
        ShardEvent::JobAccepted(_)
        | ShardEvent::JobMoved(_)
        | ShardEvent::JobGone(_)
        | ShardEvent::CallBegun { .. }
        | ShardEvent::CallEnded { .. }
        | ShardEvent::CallWithdrawn(_)
        | ShardEvent::SessionPut(_)
        | ShardEvent::SessionGone(_)
        | ShardEvent::CodePut(_)
        | ShardEvent::ThrottlePut { .. }
        | ShardEvent::ThrottleGone(_)
        | ShardEvent::UsagePut { .. }
        | ShardEvent::EventKept(_)
        | ShardEvent::DeliveryQueued(_)
        | ShardEvent::DeliveryTried(_)
        | ShardEvent::DeliveryEnded(_)
        | ShardEvent::DeliveryAgain(_)
        | ShardEvent::HookGone(_)
        | ShardEvent::Told(_)
        | ShardEvent::ToldOf(_)
        | ShardEvent::Audited(_)
        | ShardEvent::Swept(_) => vec![],
    }
}

/// Types that a subscription names: exact ones, `noun.*` and `*`.
pub fn is_selected(selection: &[String], kind: Kind) -> bool {
    let word = kind.as_str();
    selection.iter().any(|wanted| {
        wanted == "*"
            || wanted == word
            || wanted.strip_suffix(".*").is_some_and(|noun| word.split('.').next() == Some(noun))
    })
}

/// The first selection that names nothing.
pub fn unknown_selection(selection: &[String]) -> Option<&String> {
    selection.iter().find(|wanted| {
        !Kind::ALL.iter().any(|kind| is_selected(std::slice::from_ref(*wanted), *kind))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AuditId;

    #[test]
    fn a_selection_names_types() {
        let words =
            |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for (selection, kind, selected) in [
            (vec!["agent.failed"], Kind::AgentFailed, true),
            (vec!["agent.failed"], Kind::AgentDeployed, false),
            (vec!["agent.*"], Kind::AgentDeployed, true),
            (vec!["agent.*"], Kind::JobFailed, false),
            (vec!["*"], Kind::PaymentFailed, true),
        ] {
            assert_eq!(is_selected(&words(&selection), kind), selected, "{selection:?}");
        }
        assert_eq!(unknown_selection(&words(&["agent.*", "*", "job.failed"])), None);
        for wrong in ["agent", "agents.*", "agent.fail", "", "*.failed", "AGENT.*"] {
            assert!(unknown_selection(&words(&[wrong])).is_some(), "{wrong}");
        }
    }

    #[test]
    fn numbers_are_never_used_again() {
        let mut outbox = Outbox::new(1, 3);
        let happening = |number: u64| Happening {
            tenant: Tenant { org: crate::OrgId(1), mode: crate::account::Mode::Live },
            kind: Kind::AgentCreated,
            data: text(&json!({ "number": number })),
            agent: None,
        };
        (0..3).for_each(|n| outbox.push(happening(n), Timestamp::from_millis(5)));
        outbox.told(3);
        outbox.push(happening(0), Timestamp::from_millis(5));
        outbox.told(3);
        let left = outbox.oldest(10, |_| false);
        assert_eq!((left.up_to, left.has_more, left.events.len()), (Some(4), false, 1));
        // Both kinds leave in the order in which they came.
        let row = crate::audit::tests::row;
        outbox.push_audited(&Arc::new(row(5)));
        outbox.push(happening(1), Timestamp::from_millis(6));
        outbox.push_audited(&Arc::new(row(7)));
        let first = outbox.oldest(1, |_| false);
        assert_eq!((first.up_to, first.has_more), (Some(4), true));
        assert_eq!((first.events.len(), first.audited.len()), (1, 0));
        outbox.told(5);
        assert_eq!(outbox.newest_audited(crate::OrgId(1)), Some(7));
        let rest = outbox.oldest(10, |_| false);
        assert_eq!((rest.up_to, rest.events.len(), rest.audited[0].1.id), (Some(7), 1, AuditId(7)));
        // What stays keeps nobody back who comes after it.
        outbox.push(happening(2), Timestamp::from_millis(7));
        let events = outbox.oldest(10, |item| matches!(item, Item::Row(_)));
        assert_eq!((events.events.len(), events.audited.len()), (2, 0));
        outbox.told_of(&events.events.iter().map(|(number, _)| *number).collect::<Vec<_>>());
        assert_eq!(outbox.oldest(10, |_| false).up_to, Some(7));
        outbox.told(7);
        assert_eq!(outbox.oldest(10, |_| false).up_to, None);
    }
}
