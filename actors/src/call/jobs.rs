//! Jobs: accept, look, wait, list, cancel, repeat, remove.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use domain::{
    AgentId, JobId, NodeId, Rejection, RequestId, Timestamp,
    account::Tenant,
    agent::{Agent, Status},
    idempotency::Keyed,
    job::{Job, JobStatus, Payload, Retry, Usage},
    shard::{Command, Reply, Shard},
    table::{Order, Table},
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{
    Answered, Service, ServiceError,
    walk::{Fit, TooLong, page},
};
use crate::{
    ask::{self, Ask, Told},
    invocation,
    job::attempt,
    ports::ProposeError,
    root::Thing,
    route::Serves,
};

/// A job to be.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// The agent.
    pub agent_id: AgentId,
    /// What goes in.
    pub input: Payload,
    /// Headers for the agent.
    pub headers: BTreeMap<String, String>,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
    /// How long one attempt may take.
    pub timeout: Duration,
    /// When to try again.
    pub retry: Retry,
    /// The request that makes it.
    pub request_id: RequestId,
    /// The job it repeats.
    pub retried_from: Option<JobId>,
}

/// What goes into and comes out of a job, as JSON texts.
#[derive(Clone, Debug, Default)]
pub struct JobTexts {
    /// If asked for.
    pub input: Option<String>,
    /// Once there is one that may be shown.
    pub output: Option<String>,
}

/// A page of jobs.
#[derive(Clone, Debug)]
pub struct JobsWanted {
    /// Whose.
    pub tenant: Tenant,
    /// Which.
    pub filter: JobFilter,
    /// Beyond this one.
    pub from: Option<JobId>,
    /// In order of their making.
    pub order: Order,
    /// At most so many.
    pub limit: usize,
}

/// Which jobs are wanted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct JobFilter {
    /// Of these agents; empty is all.
    pub agents: Vec<AgentId>,
    /// In these states; empty is all.
    pub statuses: Vec<JobStatus>,
    /// Only after this time.
    pub created_after: Option<Timestamp>,
    /// Only before this time.
    pub created_before: Option<Timestamp>,
    /// With these notes.
    pub metadata: BTreeMap<String, String>,
}

impl JobFilter {
    fn takes(&self, job: &Job) -> bool {
        (self.agents.is_empty() || self.agents.contains(&job.agent_id))
            && (self.statuses.is_empty() || self.statuses.contains(&job.status))
            && self.created_after.is_none_or(|after| job.created_at > after)
            && self.created_before.is_none_or(|before| job.created_at < before)
            && self.metadata.iter().all(|(key, value)| job.metadata.get(key) == Some(value))
    }
}

/// A slot that goes back unless its job was accepted, even if the caller hung up meanwhile.
struct Parked<'s> {
    service: &'s Service,
    id: JobId,
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.service.handover().remove(&self.id);
    }
}

/// Each once, so many.
fn in_order(mut found: Vec<Arc<Job>>, order: Order, limit: usize) -> Vec<Arc<Job>> {
    found.sort_by_key(|job| job.id);
    found.dedup_by_key(|job| job.id);
    if order == Order::Descending {
        found.reverse();
    }
    found.truncate(limit);
    found
}

type Pick = fn(&Shard) -> &Table<JobId, Job>;

/// Where jobs are. A job that ends meanwhile goes from the first to the second: it is seen at least
/// once.
const TABLES: [Pick; 2] = [|state| &state.jobs, |state| &state.finished];

impl Service {
    fn home(&self, id: JobId) -> u16 {
        self.world.home_of(id)
    }

    /// An id whose home is where its key lives, or where this node leads.
    fn mint_job(&self, key: Option<&Keyed>) -> JobId {
        let ledger = &self.world.ports.ledger;
        let wanted = key.map(|key| ledger.home(&key.hash));
        let leading = ledger.leading();
        let leading = leading.borrow();
        loop {
            let id = self.world.mint(JobId::new);
            let home = self.home(id);
            let fits = match wanted {
                Some(wanted) => home == wanted,
                None => leading.is_empty() || leading.contains_key(&home),
            };
            if fits {
                return id;
            }
        }
    }

    /// Accepts a job: durable on return. Where an instance is free, its first attempt begins with it.
    pub async fn accept_job(
        &self,
        tenant: Tenant,
        new: NewJob,
        key: Option<Keyed>,
    ) -> Result<Answered<Job>, ServiceError> {
        let id = self.mint_job(key.as_ref());
        let shard = self.home(id);
        let agent = match self.accepting(tenant, new.agent_id) {
            Ok(agent) => Some(agent),
            Err(_) if self.was_seen(shard, key.as_ref()).await? => None,
            Err(reason) => return Err(reason),
        };
        self.check_queue(tenant, shard, key.as_ref()).await?;
        let new = self.with_kept_input(new).await?;
        let agent = agent.filter(|agent| agent.is_serving());
        // A first attempt begins with the job only where its owner is.
        let agent = agent.filter(|_| self.world.claim(shard).is_some());
        let slot = agent.and_then(|agent| self.world.routes.try_take(agent.id, Serves::by(&agent)));
        let first = slot.as_ref().map(|slot| attempt(&self.world, Some(slot)));
        let parked = Parked { service: self, id };
        if let Some(slot) = slot {
            self.handover().insert(id, slot);
        }
        let job = Box::new(self.job_of(id, tenant, new));
        let command = Command::AcceptJob { job, first };
        let answer = self.world.ask_shard(shard, command, key, None).await;
        let job = match answer.map(|answer| (answer.result, answer.replayed)) {
            Ok((Ok(Reply::Job(job)), replayed)) => Ok(Answered { value: *job, replayed }),
            Ok((Ok(_), _)) => Err(Rejection::JobNotFound(id).into()),
            Ok((Err(reason), _)) => Err(reason.into()),
            Err(error) => Err(error.into()),
        };
        if job.as_ref().is_ok_and(|job| job.value.id == id) {
            // The job's actor has it from here.
            std::mem::forget(parked);
        }
        job
    }

    /// A long input is durable before the log names it.
    async fn with_kept_input(&self, new: NewJob) -> Result<NewJob, ServiceError> {
        let input = match new.input {
            Payload::Here(text) => self.world.keep(text).await?,
            blob @ Payload::Blob { .. } => blob,
        };
        Ok(NewJob { input, ..new })
    }

    fn handover(
        &self,
    ) -> std::sync::MutexGuard<'_, std::collections::HashMap<JobId, crate::route::Slot>> {
        self.world.watch.handover.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Jobs are taken for agents that run or are coming up.
    fn accepting(&self, tenant: Tenant, id: AgentId) -> Result<Arc<Agent>, ServiceError> {
        let agent = self.world.directory().read().agent(tenant, id)?;
        match agent.status {
            Status::Running if !agent.is_serving() => Err(Rejection::AgentNotRunning.into()),
            Status::Stopped | Status::Failed => Err(invocation::refusal(&agent).into()),
            Status::Created | Status::Building | Status::Deploying | Status::Running => Ok(agent),
        }
    }

    pub(super) async fn was_seen(
        &self,
        shard: u16,
        key: Option<&Keyed>,
    ) -> Result<bool, ServiceError> {
        let Some(key) = key else { return Ok(false) };
        if self.world.ports.ledger.has_shard(shard) {
            return self.was_seen_here(shard, key).await;
        }
        let ask = Ask::Seen { shard, key: key.clone() };
        let told = self.ask_owner(shard, ask, ask::ANSWER_WITHIN).await?;
        let Told::Seen(seen) = told else { return Err(ServiceError::Elsewhere) };
        Ok(seen)
    }

    /// Whether a key of a shard that this node has was seen.
    pub(crate) async fn was_seen_here(
        &self,
        shard: u16,
        key: &Keyed,
    ) -> Result<bool, ServiceError> {
        self.world.ports.ledger.refresh_shard(shard).await?;
        let state = self.world.ports.ledger.shard(shard).read();
        Ok(state.keys.knows(key, self.world.now()))
    }

    fn job_of(&self, id: JobId, tenant: Tenant, new: NewJob) -> Job {
        Job {
            id,
            tenant,
            agent_id: new.agent_id,
            agent_version: None,
            status: JobStatus::Pending,
            input: new.input,
            headers: new.headers,
            metadata: new.metadata,
            timeout_ms: u64::try_from(new.timeout.as_millis()).unwrap_or(u64::MAX),
            retry: new.retry,
            attempt: 0,
            epoch: 0,
            boot: None,
            instance_id: None,
            node_id: None,
            created_at: self.world.now(),
            started_at: None,
            completed_at: None,
            next_attempt_at: None,
            cancel_requested_at: None,
            cancel_by_force: false,
            output: None,
            error: None,
            usage: Usage::default(),
            request_id: new.request_id,
            retried_from: new.retried_from,
        }
    }

    /// Asks the owner of a shard.
    pub(super) async fn ask_owner(
        &self,
        shard: u16,
        ask: Ask,
        within: Duration,
    ) -> Result<Told, ServiceError> {
        let owner = self.world.owner(shard).ok_or(ServiceError::Elsewhere)?;
        self.world.ask_node(owner, ask, within).await.map_err(|_| ServiceError::Elsewhere)
    }

    /// A job as it is now; with `wait`, once it has ended or the time is up.
    pub async fn job(
        &self,
        tenant: Tenant,
        id: JobId,
        wait: Option<Duration>,
    ) -> Result<Arc<Job>, ServiceError> {
        let shard = self.home(id);
        if self.world.ports.ledger.has_shard(shard) {
            return self.job_here(tenant, id, wait).await;
        }
        let within = wait.unwrap_or_default() + ask::ANSWER_WITHIN;
        let told = self.ask_owner(shard, Ask::Job { tenant, id, wait }, within).await?;
        let Told::Job(job) = told else { return Err(ServiceError::Elsewhere) };
        Ok(Arc::from(job?))
    }

    /// A job of a shard that this node has.
    pub(crate) async fn job_here(
        &self,
        tenant: Tenant,
        id: JobId,
        wait: Option<Duration>,
    ) -> Result<Arc<Job>, ServiceError> {
        let shard = self.home(id);
        let Some(wait) = wait else { return self.job_now(tenant, id, shard).await };
        let until = Instant::now() + wait;
        loop {
            let change = self.world.watch.subscribe(Thing::Job(id));
            let changed = change.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let job = self.job_now(tenant, id, shard).await?;
            if job.status.is_final() {
                return Ok(job);
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Ok(job);
            }
        }
    }

    async fn job_now(
        &self,
        tenant: Tenant,
        id: JobId,
        shard: u16,
    ) -> Result<Arc<Job>, ServiceError> {
        self.freshen_shard(shard).await?;
        Ok(self.world.ports.ledger.shard(shard).read().job(tenant, id)?)
    }

    /// Jobs in order of their making; one more than the limit tells that there are more.
    pub async fn jobs(&self, wanted: JobsWanted) -> Result<Vec<Arc<Job>>, ServiceError> {
        let ledger = &self.world.ports.ledger;
        let (here, there): (Vec<u16>, Vec<u16>) =
            (0..ledger.shards()).partition(|shard| ledger.has_shard(*shard));
        let mut elsewhere: BTreeMap<NodeId, Vec<u16>> = BTreeMap::new();
        for shard in there {
            let owner = self.world.owner(shard).ok_or(ServiceError::Elsewhere)?;
            elsewhere.entry(owner).or_default().push(shard);
        }
        let mut found = self.jobs_here(here, wanted.clone()).await?;
        for (node, shards) in elsewhere {
            let JobsWanted { tenant, filter, from, order, limit } = wanted.clone();
            let ascending = order == Order::Ascending;
            let ask = Ask::Jobs { shards, tenant, filter, from, ascending, limit };
            match self.world.ask_node(node, ask, ask::ANSWER_WITHIN * 2).await {
                Ok(Told::Jobs(jobs)) => found.extend(jobs.into_iter().map(Arc::new)),
                Ok(Told::TooLong) => return Err(ServiceError::TooLong),
                Ok(_) | Err(_) => return Err(ServiceError::Elsewhere),
            }
        }
        Ok(in_order(found, wanted.order, wanted.limit))
    }

    /// Jobs of shards that this node has.
    pub(crate) async fn jobs_here(
        &self,
        shards: Vec<u16>,
        wanted: JobsWanted,
    ) -> Result<Vec<Arc<Job>>, ServiceError> {
        let ledger = Arc::clone(&self.world.ports.ledger);
        for shard in &shards {
            self.freshen_shard(*shard).await?;
        }
        // History is read from disk, so this leaves the runtime's threads alone.
        let found = tokio::task::spawn_blocking(move || {
            let JobsWanted { tenant, filter, from, order, limit } = wanted;
            let mut found = vec![];
            for shard in shards {
                let fit =
                    |_: &JobId, job: &Job| Fit::if_taken(job.tenant == tenant && filter.takes(job));
                for table in TABLES {
                    found.extend(page(&*ledger, shard, table, (from, order), limit, fit)?);
                }
            }
            Ok(in_order(found, order, limit))
        });
        let found = found.await.map_err(|_| ServiceError::Ledger(ProposeError::Unavailable))?;
        found.map_err(|TooLong| ServiceError::TooLong)
    }

    /// Asks for a job's end.
    pub async fn cancel_job(
        &self,
        tenant: Tenant,
        id: JobId,
        by_force: bool,
        key: Option<Keyed>,
    ) -> Result<Answered<Job>, ServiceError> {
        let command = Command::CancelJob { tenant, id, by_force };
        let answer = self.world.ask_shard(self.home(id), command, key, None).await?;
        let Reply::Job(job) = answer.result? else { return Err(Rejection::JobNotFound(id).into()) };
        Ok(Answered { value: *job, replayed: answer.replayed })
    }

    /// A new job like an ended one.
    pub async fn retry_job(
        &self,
        tenant: Tenant,
        id: JobId,
        request_id: RequestId,
        key: Option<Keyed>,
    ) -> Result<Answered<Job>, ServiceError> {
        let old = self.job(tenant, id, None).await?;
        if !old.status.is_final() {
            return Err(Rejection::JobNotFinished.into());
        }
        let new = NewJob {
            agent_id: old.agent_id,
            input: self.still_there(&old).await?,
            headers: old.headers.clone(),
            metadata: old.metadata.clone(),
            timeout: Duration::from_millis(old.timeout_ms),
            retry: old.retry.clone(),
            request_id,
            retried_from: Some(id),
        };
        self.accept_job(tenant, new, key).await
    }

    /// The input of an old job for a new one.
    async fn still_there(&self, old: &Job) -> Result<Payload, ServiceError> {
        if self.world.touch(&old.input).await {
            return Ok(old.input.clone());
        }
        Err(Rejection::JobNotFound(old.id).into())
    }

    /// The texts of a job's long payloads: its output if it is not longer than `most` bytes, and its
    /// input if asked for.
    pub async fn job_texts(
        &self,
        job: &Job,
        with_input: bool,
        most: u64,
    ) -> Result<JobTexts, ServiceError> {
        let input = match with_input {
            true => Some(self.world.text(&job.input).await?),
            false => None,
        };
        let shown = job.output.as_ref().filter(|output| match output {
            Payload::Here(_) => true,
            Payload::Blob { bytes, .. } => *bytes <= most,
        });
        let output = match shown {
            Some(output) => Some(self.world.text(output).await?),
            None => None,
        };
        Ok(JobTexts { input, output })
    }

    /// Removes an ended job.
    pub async fn delete_job(
        &self,
        tenant: Tenant,
        id: JobId,
        key: Option<Keyed>,
    ) -> Result<bool, ServiceError> {
        let command = Command::DeleteJob { tenant, id };
        let answer = self.world.ask_shard(self.home(id), command, key, None).await?;
        answer.result?;
        Ok(answer.replayed)
    }
}
