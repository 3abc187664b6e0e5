//! The next steps from what is to what should be. Asking again after a crash gives the same answer,
//! so start-up, failover and repair are one path.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Agent, Desired};
use crate::{
    DeploymentId, InstanceId, Timestamp,
    deployment::{Deployment, DeploymentStatus, Failure, Strategy},
    instance::{Instance, InstanceStatus},
};

/// Exits in a row, each before the instance had stayed up, that make a crash loop.
pub const CRASHES_MAX: u32 = 3;

/// The code of an agent whose process keeps ending.
pub const CRASH_LOOP: &str = "CRASH_LOOP";
/// The code of one that keeps being ended for its use of memory.
pub const OUT_OF_MEMORY: &str = "OUT_OF_MEMORY";
/// The code of one whose image can't be had now.
pub const IMAGE_PULL_FAILED: &str = "IMAGE_PULL_FAILED";

/// Pauses before the next start after one, two, … exits in a row. The later ones are for an agent that other
/// instances keep up.
const PAUSES: [Duration; 7] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(15),
    Duration::from_secs(30),
];

/// Exits that are further apart do not come in a row.
const ROW_ENDS_AFTER: Duration = Duration::from_secs(600);

/// Instances that are placed with one entry of the log.
const PLACED_AT_ONCE: usize = 100;

/// How long an instance has to say that it drains before it is told again.
pub const DRAINED_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The times a rollout goes by; every one is a setting.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a new instance beside a live version must stay healthy before it takes over, and
    /// how long any instance must stay up for its end not to count as a crash.
    pub min_healthy: Duration,
    /// How long a first instance may take to answer.
    pub healthy_deadline: Duration,
    /// How long an agent may be without an instance before it has failed.
    pub lost_after: Duration,
    /// How long a call in flight may go on after a stop.
    pub drain_timeout: Duration,
    /// How long a call in flight may go on when only its instance is replaced.
    pub replace_timeout: Duration,
}

/// What the node says of one of its instances.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seen {
    /// It waits until its node starts it: there are enough on their way up.
    Waiting,
    /// The process is on its way up since then.
    Starting(Timestamp),
    /// It has answered since then.
    Ready(Timestamp),
    /// It no longer answers and has no calls.
    Sick,
    /// It finishes its calls.
    Draining,
    /// It ended.
    Exited,
}

/// How often instances of a version ended soon after their start.
#[derive(Clone, Debug)]
pub struct Crashes {
    /// The version counted.
    pub version: u64,
    /// Exits in a row, each of an instance that was started after the one before.
    pub count: u32,
    /// When the last of them was.
    pub last_at: Timestamp,
    /// Why the last one ended.
    pub last_cause: Failure,
}

impl Default for Crashes {
    fn default() -> Self {
        Self {
            version: 0,
            count: 0,
            last_at: Timestamp::default(),
            last_cause: Failure::new(CRASH_LOOP, ""),
        }
    }
}

impl Crashes {
    /// An instance ended; `stayed_up` says that it had been healthy long enough. One that was started before the
    /// last exit tells nothing new: those that are started together and end together have ended once.
    pub fn exited(
        &mut self,
        version: u64,
        stayed_up: bool,
        started_at: Timestamp,
        at: Timestamp,
        cause: Failure,
    ) {
        let is_first =
            stayed_up || version != self.version || at.since(self.last_at) >= ROW_ENDS_AFTER;
        if !is_first && started_at < self.last_at {
            return;
        }
        let before = if is_first { 0 } else { self.count };
        *self = Self { version, count: before.saturating_add(1), last_at: at, last_cause: cause };
    }

    /// When the next start may be tried.
    pub fn next_start(&self, version: u64) -> Timestamp {
        if version != self.version || self.count == 0 {
            return Timestamp::default();
        }
        let pause = PAUSES[(self.count as usize - 1).min(PAUSES.len() - 1)];
        self.last_at.plus(pause)
    }

    fn is_loop(&self, version: u64) -> bool {
        version == self.version && self.count >= CRASHES_MAX
    }

    fn failure(&self) -> Failure {
        let count = self.count;
        let message = match self.last_cause.code.as_str() {
            CRASH_LOOP => format!(
                "the agent's process ended {count} times soon after its start; read its logs and redeploy"
            ),
            OUT_OF_MEMORY => format!(
                "the agent was ended {count} times for its use of memory; raise resources.memory_mb"
            ),
            // It never ran: why it could not be started says more.
            _ => self.last_cause.message.clone(),
        };
        Failure { message, ..self.last_cause.clone() }
    }
}

/// Everything a plan looks at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The record.
    pub agent: &'a Agent,
    /// Its newest deployment.
    pub deployment: Option<&'a Deployment>,
    /// The rows of its instances.
    pub rows: &'a [Instance],
    /// What their nodes say.
    pub seen: &'a BTreeMap<InstanceId, Seen>,
    /// Those whose node drains: they are replaced like instances of an old version, and go without a
    /// replacement when this time has come.
    pub leaving: &'a BTreeMap<InstanceId, Timestamp>,
    /// Exits so far.
    pub crashes: &'a Crashes,
    /// Since when it serves without a ready instance.
    pub lost_since: Option<Timestamp>,
    /// The settings.
    pub timing: &'a Timing,
    /// Now.
    pub now: Timestamp,
}

/// One step of an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Get a builder and build.
    Build(DeploymentId),
    /// There is an image: begin to start instances.
    BeginRollout(DeploymentId),
    /// Watch the first new instance before it takes over.
    Verify(DeploymentId),
    /// The new version serves.
    Promote(DeploymentId),
    /// The deployment did not come up.
    FailDeployment(DeploymentId, Failure),
    /// The agent cannot be kept up.
    FailAgent(Failure),
    /// Place and start instances of this version.
    Place {
        /// How many.
        instances: usize,
        /// The version.
        version: u64,
        /// The deployment that brought it.
        deployment: DeploymentId,
    },
    /// Let it finish its calls, then end it.
    Drain(InstanceId, Duration),
    /// Its row has nothing behind it any more.
    Remove(InstanceId),
    /// Its row should say that it answers.
    ReportRunning(InstanceId),
    /// The last instance is gone.
    ReportStopped,
    /// Nothing is left of a deleted agent.
    Forget,
}

/// The steps that are due now, and when to look again though nothing happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In order.
    pub steps: Vec<Step>,
    /// A deadline or a pause that ends then.
    pub look_again: Option<Timestamp>,
}

impl Plan {
    fn wait_until(&mut self, at: Timestamp) {
        self.look_again = Some(self.look_again.map_or(at, |before| before.min(at)));
    }
}

/// What to do next.
pub fn plan(view: &View<'_>) -> Plan {
    let mut plan = Plan::default();
    sweep_rows(view, &mut plan);
    if !plan.steps.is_empty() {
        // What has ended is counted first: the pause before the next start depends on it.
        return plan;
    }
    match view.agent.desired {
        Desired::Run => {
            roll_out(view, &mut plan);
            keep_up(view, &mut plan);
        }
        Desired::Stop | Desired::Delete => wind_down(view, &mut plan),
    }
    drain_again(view, &mut plan);
    plan
}

/// Rows without a process go; rows of processes that answer say so.
fn sweep_rows(view: &View<'_>, plan: &mut Plan) {
    for row in view.rows {
        match view.seen.get(&row.id) {
            None | Some(Seen::Exited) => plan.steps.push(Step::Remove(row.id)),
            Some(Seen::Ready(_)) if row.status == InstanceStatus::Starting => {
                plan.steps.push(Step::ReportRunning(row.id));
            }
            Some(
                Seen::Waiting | Seen::Starting(_) | Seen::Ready(_) | Seen::Sick | Seen::Draining,
            ) => {}
        }
    }
}

/// An instance that is to drain and goes on has not heard of it: its node was away.
fn drain_again(view: &View<'_>, plan: &mut Plan) {
    let in_use = match view.agent.desired {
        Desired::Run => view.timing.replace_timeout,
        Desired::Stop | Desired::Delete => view.timing.drain_timeout,
    };
    for row in view.rows.iter().filter(|row| row.status == InstanceStatus::Draining) {
        let timeout = match view.seen.get(&row.id) {
            Some(Seen::Waiting | Seen::Starting(_) | Seen::Ready(_)) => in_use,
            Some(Seen::Sick) => Duration::ZERO,
            Some(Seen::Draining | Seen::Exited) | None => continue,
        };
        plan.steps.push(Step::Drain(row.id, timeout));
        plan.wait_until(view.now.plus(DRAINED_AGAIN_AFTER));
    }
}

fn wind_down(view: &View<'_>, plan: &mut Plan) {
    for row in view.alive() {
        plan.steps.push(Step::Drain(row.id, view.timing.drain_timeout));
    }
    if view.present() == 0 {
        match view.agent.desired {
            Desired::Delete => plan.steps.push(Step::Forget),
            Desired::Stop if view.agent.status == super::Status::Running => {
                plan.steps.push(Step::ReportStopped);
            }
            Desired::Stop | Desired::Run => {}
        }
    }
}

/// Brings the newest deployment one step on.
fn roll_out(view: &View<'_>, plan: &mut Plan) {
    let Some(deployment) = view.deployment.filter(|d| d.status.is_active()) else { return };
    match deployment.status {
        DeploymentStatus::Queued if deployment.image.is_some() => {
            plan.steps.push(Step::BeginRollout(deployment.id));
        }
        DeploymentStatus::Queued | DeploymentStatus::Building => {
            plan.steps.push(Step::Build(deployment.id));
        }
        DeploymentStatus::Deploying | DeploymentStatus::Verifying => {
            start_first(view, deployment, plan);
        }
        DeploymentStatus::Live
        | DeploymentStatus::Superseded
        | DeploymentStatus::Failed
        | DeploymentStatus::Canceled => {}
    }
}

/// Starts the first instance of a new version and waits until it may take over.
fn start_first(view: &View<'_>, deployment: &Deployment, plan: &mut Plan) {
    let id = deployment.id;
    if view.crashes.is_loop(deployment.version) {
        plan.steps.push(Step::FailDeployment(id, view.crashes.failure()));
        return;
    }
    let first = view
        .alive()
        .filter(|row| row.deployment_id == id)
        .filter_map(|row| match view.seen.get(&row.id) {
            Some(Seen::Ready(since)) => Some(*since),
            _ => None,
        })
        .min();
    match first {
        Some(since) => take_over(view, deployment, since, plan),
        None => await_first(view, deployment, plan),
    }
}

fn take_over(view: &View<'_>, deployment: &Deployment, since: Timestamp, plan: &mut Plan) {
    let replaces = view.agent.is_serving() && deployment.strategy == Strategy::Rolling;
    let due = since.plus(view.timing.min_healthy);
    if !replaces || view.now >= due {
        plan.steps.push(Step::Promote(deployment.id));
        return;
    }
    if deployment.status == DeploymentStatus::Deploying {
        plan.steps.push(Step::Verify(deployment.id));
    }
    plan.wait_until(due);
}

fn await_first(view: &View<'_>, deployment: &Deployment, plan: &mut Plan) {
    let own = || view.alive().filter(|row| row.deployment_id == deployment.id);
    let seen = || own().filter_map(|row| view.seen.get(&row.id));
    if seen().any(|seen| *seen == Seen::Waiting) {
        plan.wait_until(view.now.plus(view.timing.healthy_deadline));
        return;
    }
    let begun = seen().filter_map(|seen| match seen {
        Seen::Starting(since) => Some(*since),
        Seen::Waiting | Seen::Ready(_) | Seen::Sick | Seen::Draining | Seen::Exited => None,
    });
    let rollout = deployment.rollout_started_at.unwrap_or(deployment.created_at);
    let deadline = begun.min().unwrap_or(rollout).plus(view.timing.healthy_deadline);
    if view.now >= deadline {
        let failure = Failure::new(
            "HEALTH_CHECK_FAILED",
            "no instance answered its health check in time; read the agent's logs and redeploy",
        );
        plan.steps.push(Step::FailDeployment(deployment.id, failure));
        return;
    }
    plan.wait_until(deadline);
    if own().next().is_none() {
        place(view, deployment.version, deployment.id, 1, plan);
    }
}

/// Keeps the wanted number of instances of the live version, starts before it stops, and drains
/// whatever is neither live nor coming.
fn keep_up(view: &View<'_>, plan: &mut Plan) {
    let coming = view.deployment.filter(|d| d.status.is_active()).map(|d| d.id);
    let live = view.agent.version.filter(|_| view.agent.is_serving());
    let (mut ready, mut starting, mut waiting) = (0, 0, 0);
    let mut old = vec![];
    for row in view.alive() {
        let is_live =
            Some(row.version) == live && view.agent.live_deployment == Some(row.deployment_id);
        match view.seen.get(&row.id) {
            _ if coming == Some(row.deployment_id) && !is_live => {}
            Some(Seen::Sick) => plan.steps.push(Step::Drain(row.id, Duration::ZERO)),
            _ if view.must_go(row, plan) => {
                plan.steps.push(Step::Drain(row.id, view.timing.replace_timeout));
            }
            _ if view.leaving.contains_key(&row.id) => old.push(row.id),
            Some(Seen::Ready(_)) if is_live => ready += 1,
            Some(Seen::Starting(since)) if is_live && view.is_hung(*since) => {
                plan.steps.push(Step::Drain(row.id, Duration::ZERO));
            }
            Some(Seen::Starting(since)) if is_live => {
                plan.wait_until(since.plus(view.timing.healthy_deadline));
                starting += 1;
            }
            Some(Seen::Waiting) if is_live => waiting += 1,
            _ => old.push(row.id),
        }
    }
    let Some(version) = live else {
        let all = old.into_iter().map(|id| Step::Drain(id, view.timing.replace_timeout));
        plan.steps.extend(all);
        return;
    };
    balance(view, version, Counts { ready, starting, waiting, old: &old }, plan);
}

struct Counts<'a> {
    ready: usize,
    starting: usize,
    waiting: usize,
    old: &'a [InstanceId],
}

fn balance(view: &View<'_>, version: u64, counts: Counts<'_>, plan: &mut Plan) {
    let wanted = view.agent.scaling.wanted();
    let Counts { ready, starting, waiting, old } = counts;
    let coming = starting + waiting;
    // Some of many that end are no verdict on an agent that others keep up, or may still.
    let in_doubt = ready == 0 && view.crashes.is_loop(version);
    if in_doubt && coming == 0 {
        plan.steps.push(Step::FailAgent(view.crashes.failure()));
        return;
    }
    if let Some(since) = view.lost_since.filter(|_| waiting == 0) {
        // One that is on its way up has its own, longer deadline.
        let patience = if starting > 0 { view.timing.healthy_deadline } else { Duration::ZERO };
        let deadline = since.plus(view.timing.lost_after.max(patience));
        if view.now >= deadline {
            let message =
                "no instance could be brought back in time; read the logs and start it again";
            plan.steps.push(Step::FailAgent(Failure::new("HEALTH_CHECK_FAILED", message)));
            return;
        }
        plan.wait_until(deadline);
    }
    // Surge of one while old instances are replaced; all at once where nothing serves yet.
    let surge = if old.is_empty() { wanted } else { 1 };
    let missing = wanted.saturating_sub(ready + coming).min(surge.saturating_sub(coming));
    if missing > 0
        && !in_doubt
        && let Some(deployment) = view.agent.live_deployment
    {
        place(view, version, deployment, missing, plan);
    }
    let spare = (ready + old.len()).saturating_sub(wanted);
    let gone = old.iter().take(if ready > 0 { spare } else { 0 });
    plan.steps.extend(gone.map(|id| Step::Drain(*id, view.timing.replace_timeout)));
    let surplus = ready.saturating_sub(wanted);
    let newest = view.alive().filter(|row| row.version == version).map(|row| row.id);
    let gone = newest.collect::<Vec<_>>().into_iter().rev().take(surplus);
    plan.steps.extend(gone.map(|id| Step::Drain(id, view.timing.replace_timeout)));
}

fn place(view: &View<'_>, version: u64, deployment: DeploymentId, missing: usize, plan: &mut Plan) {
    let at = view.crashes.next_start(version);
    if view.now >= at {
        let instances = missing.min(PLACED_AT_ONCE);
        plan.steps.push(Step::Place { instances, version, deployment });
    } else {
        plan.wait_until(at);
    }
}

impl View<'_> {
    /// Instances that have a process and are not on their way out.
    fn alive(&self) -> impl Iterator<Item = &Instance> {
        self.rows.iter().filter(|row| {
            row.status != InstanceStatus::Draining
                && matches!(
                    self.seen.get(&row.id),
                    Some(Seen::Waiting | Seen::Starting(_) | Seen::Ready(_) | Seen::Sick)
                )
        })
    }

    /// Whether the time of an instance on a draining node is over.
    fn must_go(&self, row: &Instance, plan: &mut Plan) -> bool {
        let by = self.leaving.get(&row.id).copied();
        by.inspect(|by| plan.wait_until(*by));
        by.is_some_and(|by| self.now >= by)
    }

    /// Whether an instance has been starting for longer than any should.
    fn is_hung(&self, since: Timestamp) -> bool {
        self.now >= since.plus(self.timing.healthy_deadline)
    }

    /// Rows that have a process.
    fn present(&self) -> usize {
        let has_process =
            |row: &&Instance| !matches!(self.seen.get(&row.id), None | Some(Seen::Exited));
        self.rows.iter().filter(has_process).count()
    }
}
