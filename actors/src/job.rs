//! One actor per unfinished job, where the job's shard is led: it carries the job to its end.
//!
//! Before the first byte leaves for the agent, the attempt is committed; its result counts only in
//! the attempt's own epoch. An attempt that an earlier life of the node had begun is lost, and the
//! job's retry rule says what then.

use std::{sync::Arc, time::Duration};

use domain::{
    JobId, Rejection,
    job::{Attempt, Job, JobError, JobStatus, Outcome, RetryOn},
    machine::Claim,
    shard::{Command, Reply},
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use serde_json::{json, value::RawValue};
use tokio::{sync::watch, task::AbortHandle, time::Instant};

use crate::{
    instance::InstanceMessage,
    invocation::{CallError, Invocation, JOB_OUTPUT_BYTES_MAX},
    ports::ProposeError,
    root::{Thing, Told, detach},
    route::{NoSlot, Slot},
    world::World,
};

/// Between attempts to write an outcome down.
const FINISH_AGAIN: Duration = Duration::from_millis(500);

/// What wakes a job.
pub enum JobMessage {
    /// Something may have changed.
    Look,
    /// The attempt's task has ended.
    Ended,
}

/// The actor of one job.
pub struct JobActor;

/// Which job, in whose name.
pub struct JobArguments {
    /// Everything there is.
    pub world: Arc<World>,
    /// The job.
    pub id: JobId,
    /// The leadership of its shard.
    pub claim: Claim,
}

/// What it remembers between looks.
pub struct Carrier {
    world: Arc<World>,
    id: JobId,
    claim: Claim,
    attempt: Option<AbortHandle>,
    cancel: watch::Sender<Cancel>,
    alarm: Option<AbortHandle>,
}

/// Whether somebody wants the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Cancel {
    #[default]
    No,
    Gracefully,
    ByForce,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        for task in [self.attempt.take(), self.alarm.take()].into_iter().flatten() {
            task.abort();
        }
        let mut handover =
            self.world.watch.handover.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        handover.remove(&self.id);
    }
}

impl Actor for JobActor {
    type Msg = JobMessage;
    type State = Carrier;
    type Arguments = JobArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<JobMessage>,
        JobArguments { world, id, claim }: JobArguments,
    ) -> Result<Carrier, ActorProcessingErr> {
        myself.cast(JobMessage::Look)?;
        let cancel = watch::Sender::new(Cancel::No);
        Ok(Carrier { world, id, claim, attempt: None, cancel, alarm: None })
    }

    async fn handle(
        &self,
        myself: ActorRef<JobMessage>,
        message: JobMessage,
        carrier: &mut Carrier,
    ) -> Result<(), ActorProcessingErr> {
        if matches!(message, JobMessage::Ended) {
            carrier.attempt = None;
        }
        carrier.look(&myself).await
    }
}

impl Carrier {
    async fn look(&mut self, myself: &ActorRef<JobMessage>) -> Result<(), ActorProcessingErr> {
        let job = self.world.ports.ledger.shard(self.claim.shard).read().jobs.get(&self.id);
        let Some(job) = job else {
            myself.stop(None);
            return Ok(());
        };
        if job.cancel_requested_at.is_some() {
            let wish = if job.cancel_by_force { Cancel::ByForce } else { Cancel::Gracefully };
            self.cancel.send_if_modified(|now| std::mem::replace(now, wish) != wish);
        }
        if self.attempt.is_some() {
            return Ok(());
        }
        match job.status {
            JobStatus::Pending => self.next_attempt(&job, myself),
            JobStatus::Running => self.resume(&job, myself).await?,
            JobStatus::Completed | JobStatus::Failed | JobStatus::Canceled => myself.stop(None),
        }
        Ok(())
    }

    fn next_attempt(&mut self, job: &Arc<Job>, myself: &ActorRef<JobMessage>) {
        let pause = job.next_attempt_at.map_or(Duration::ZERO, |at| at.since(self.world.now()));
        if pause.is_zero() {
            self.begin(Arc::clone(job), None, myself);
            return;
        }
        let me = myself.clone();
        let alarm = detach(async move {
            tokio::time::sleep(pause).await;
            let _ = me.cast(JobMessage::Look);
        });
        if let Some(old) = self.alarm.replace(alarm) {
            old.abort();
        }
    }

    /// A running job without a task: its slot was handed over, or its attempt is lost.
    async fn resume(
        &mut self,
        job: &Arc<Job>,
        myself: &ActorRef<JobMessage>,
    ) -> Result<(), ActorProcessingErr> {
        let slot = {
            let handover = &self.world.watch.handover;
            let mut handover = handover.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            handover.remove(&self.id)
        };
        if let Some(slot) = slot {
            self.begin(Arc::clone(job), Some(slot), myself);
            return Ok(());
        }
        let message =
            "the node that ran the attempt was restarted; whether it took effect is unknown";
        let error = JobError {
            code: "NODE_LOST".to_owned(),
            message: message.to_owned(),
            details: json!({ "reason": "outcome_unknown" }).to_string(),
        };
        let outcome = Outcome::Failed { error, kind: Some(RetryOn::Unavailable) };
        finish(&self.world, self.claim, self.id, job.epoch, outcome).await?;
        myself.cast(JobMessage::Look)?;
        Ok(())
    }

    fn begin(&mut self, job: Arc<Job>, slot: Option<Slot>, myself: &ActorRef<JobMessage>) {
        let carry = Carry {
            world: Arc::clone(&self.world),
            claim: self.claim,
            cancel: self.cancel.subscribe(),
        };
        let ended = Told::when_dropped(myself.clone(), || JobMessage::Ended);
        self.attempt = Some(detach(async move {
            let _ended = ended;
            if let Err(error) = carry.attempt(job, slot).await {
                tracing::warn!(%error, "a job's attempt could not be written down");
                // The log was not reachable; the next look finds the job as it was.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }));
    }
}

/// Writes an outcome down, however long that takes: a result that was paid for is not thrown away.
async fn finish(
    world: &World,
    claim: Claim,
    id: JobId,
    epoch: u64,
    outcome: Outcome,
) -> Result<(), ActorProcessingErr> {
    loop {
        let command = Command::FinishJob { id, epoch, outcome: outcome.clone() };
        match world.ask_shard(claim.shard, command, None, Some(claim)).await {
            Ok(answer) => {
                answer.result?;
                return Ok(());
            }
            Err(error @ ProposeError::Rejected(_)) => return Err(error.into()),
            Err(ProposeError::Unavailable | ProposeError::Unknown) => {
                tokio::time::sleep(FINISH_AGAIN).await;
            }
        }
    }
}

/// One attempt, from a slot to a committed outcome.
struct Carry {
    world: Arc<World>,
    claim: Claim,
    cancel: watch::Receiver<Cancel>,
}

impl Carry {
    async fn attempt(
        mut self,
        job: Arc<Job>,
        slot: Option<Slot>,
    ) -> Result<(), ActorProcessingErr> {
        let (job, slot) = match slot {
            Some(slot) => (job, slot),
            None => match self.slot(&job).await {
                Ok(slot) => {
                    let Some(job) = self.start(&job, &slot).await? else { return Ok(()) };
                    (job, slot)
                }
                Err(outcome) => {
                    let Some(job) = self.start_without_slot(&job).await? else { return Ok(()) };
                    return finish(&self.world, self.claim, job.id, job.epoch, outcome).await;
                }
            },
        };
        let mut slot = slot;
        let outcome = loop {
            match self.run(&job, &slot).await {
                Some(outcome) => break outcome,
                // The agent saw nothing of it: the same attempt goes to another instance.
                None => self.world.give_up(&slot),
            }
            slot = match self.slot(&job).await {
                Ok(slot) => slot,
                Err(outcome) => break outcome,
            };
        };
        finish(&self.world, self.claim, job.id, job.epoch, outcome).await
    }

    /// Waits for a free instance: as long as it takes while the agent is coming up.
    async fn slot(&self, job: &Job) -> Result<Slot, Outcome> {
        loop {
            let changed = self.world.watch.subscribe(Thing::Agent(job.agent_id));
            let deadline = Instant::now() + Duration::from_millis(job.timeout_ms);
            match self.world.slot(job.agent_id, deadline).await {
                Ok(slot) => return Ok(slot),
                Err(NoSlot::Overloaded) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(NoSlot::Timeout) => {}
                Err(NoSlot::Unavailable) if self.is_coming_up(job) => {
                    let _ = tokio::time::timeout(Duration::from_secs(1), changed.notified()).await;
                }
                Err(reason @ NoSlot::Unavailable) => return Err(self.unavailable(job, reason)),
            }
        }
    }

    fn is_coming_up(&self, job: &Job) -> bool {
        let directory = self.world.directory().read();
        let agent = directory.agent(job.tenant, job.agent_id);
        agent.is_ok_and(|agent| directory.is_deploying(&agent))
    }

    fn unavailable(&self, job: &Job, reason: NoSlot) -> Outcome {
        let gone = self.world.directory().read().agent(job.tenant, job.agent_id).is_err();
        if gone {
            return Outcome::Canceled;
        }
        failed("AGENT_UNAVAILABLE", reason.to_string(), &json!({}), Some(RetryOn::Unavailable))
    }

    async fn start(&self, job: &Job, slot: &Slot) -> Result<Option<Arc<Job>>, ActorProcessingErr> {
        let attempt = attempt(&self.world, Some(slot));
        self.commit_start(job, attempt).await
    }

    async fn start_without_slot(&self, job: &Job) -> Result<Option<Arc<Job>>, ActorProcessingErr> {
        self.commit_start(job, attempt(&self.world, None)).await
    }

    /// `None` if the job was canceled meanwhile.
    async fn commit_start(
        &self,
        job: &Job,
        attempt: Attempt,
    ) -> Result<Option<Arc<Job>>, ActorProcessingErr> {
        let command = Command::StartJob { id: job.id, attempt };
        let answer =
            self.world.ask_shard(self.claim.shard, command, None, Some(self.claim)).await?;
        match answer.result {
            Ok(Reply::Job(job)) if job.status == JobStatus::Running => Ok(Some(Arc::from(job))),
            Ok(_) | Err(Rejection::NotOwner) => Ok(None),
            Err(reason) => Err(reason.into()),
        }
    }

    /// `None` if the instance was gone before the call could reach it.
    async fn run(&mut self, job: &Job, slot: &Slot) -> Option<Outcome> {
        let timeout = Duration::from_millis(job.timeout_ms);
        let input = match self.world.input(job).await {
            Ok(input) => input,
            Err(outcome) => return Some(outcome),
        };
        let call = Invocation {
            agent_id: job.agent_id,
            livemode: job.tenant.mode.is_live(),
            input,
            headers: job.headers.clone(),
            metadata: job.metadata.clone(),
            timeout,
            request_id: job.request_id,
            job_id: Some(job.id),
            attempt: job.attempt,
            epoch: job.epoch,
            output_max: JOB_OUTPUT_BYTES_MAX,
        };
        let world = Arc::clone(&self.world);
        let answer = world.invoke_in(slot, &call, Instant::now() + timeout);
        tokio::pin!(answer);
        tokio::select! {
            answer = &mut answer => return match answer {
                Err(CallError::Unreached) => None,
                ended => Some(outcome(&self.world, ended).await),
            },
            () = wanted(&mut self.cancel, Cancel::Gracefully) => {}
        }
        Some(self.let_go(slot, &call, answer).await)
    }

    /// Canceled is said only when the agent has let go of the call or its instance is dead.
    async fn let_go(
        &mut self,
        slot: &Slot,
        call: &Invocation,
        mut answer: std::pin::Pin<
            &mut impl Future<Output = Result<crate::invocation::Output, CallError>>,
        >,
    ) -> Outcome {
        let world = Arc::clone(&self.world);
        let give_up = tokio::time::sleep(world.settings.cancel_wait);
        let confirmed = world.cancel_call(slot, call);
        tokio::pin!(give_up, confirmed);
        let mut asked = false;
        loop {
            tokio::select! {
                _ = &mut answer => return Outcome::Canceled,
                yes = &mut confirmed, if !asked => {
                    asked = true;
                    if yes {
                        return Outcome::Canceled;
                    }
                }
                () = wanted(&mut self.cancel, Cancel::ByForce) => {
                    let _ = slot.endpoint.actor.cast(InstanceMessage::Kill);
                    let _ = answer.await;
                    return Outcome::Canceled;
                }
                () = &mut give_up => break,
            }
        }
        // It does not let go: no new calls, the wanted ones may end, then the instance is ended.
        slot.endpoint.give_up_on_one();
        let _ = slot.endpoint.actor.cast(InstanceMessage::LetGo);
        tokio::select! {
            _ = &mut answer => return Outcome::Canceled,
            () = wanted(&mut self.cancel, Cancel::ByForce) => {}
        }
        let _ = slot.endpoint.actor.cast(InstanceMessage::Kill);
        let _ = answer.await;
        Outcome::Canceled
    }
}

/// Waits until the end is wanted at least this much.
async fn wanted(cancel: &mut watch::Receiver<Cancel>, least: Cancel) {
    let enough = |now: &Cancel| match least {
        Cancel::No => true,
        Cancel::Gracefully => *now != Cancel::No,
        Cancel::ByForce => *now == Cancel::ByForce,
    };
    if cancel.wait_for(enough).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What is written down before the first byte leaves.
pub fn attempt(world: &World, slot: Option<&Slot>) -> Attempt {
    Attempt {
        instance_id: slot.map(|slot| slot.endpoint.id),
        node_id: world.node_id,
        boot: world.boot.clone(),
        version: slot.map(|slot| slot.endpoint.version),
    }
}

fn failed(
    code: &str,
    message: String,
    details: &serde_json::Value,
    kind: Option<RetryOn>,
) -> Outcome {
    let error = JobError { code: code.to_owned(), message, details: details.to_string() };
    Outcome::Failed { error, kind }
}

/// An output is durable before the log names it.
async fn outcome(world: &World, answer: Result<crate::invocation::Output, CallError>) -> Outcome {
    match answer {
        Ok(output) => match world.keep(output.output.to_string()).await {
            Ok(kept) => Outcome::Completed { output: kept, usage: output.usage },
            Err(error) => {
                let message = format!("the output could not be stored: {error}");
                failed("INTERNAL_ERROR", message, &json!({}), None)
            }
        },
        Err(error) => {
            let (code, details, kind) = explained(&error);
            failed(code, error.to_string(), &details, Some(kind))
        }
    }
}

/// Which retry rule a failed call falls under, and its code in the words of jobs.
fn explained(error: &CallError) -> (&'static str, serde_json::Value, RetryOn) {
    let (code, details) = error.explained();
    match error {
        CallError::Timeout(_) => ("JOB_TIMEOUT", details, RetryOn::Timeout),
        CallError::NoSlot(_) | CallError::Unreached => {
            ("AGENT_UNAVAILABLE", details, RetryOn::Unavailable)
        }
        CallError::Broken(_) => {
            ("AGENT_ERROR", json!({ "reason": "instance_exited" }), RetryOn::AgentError)
        }
        CallError::Agent { .. }
        | CallError::Reported { .. }
        | CallError::BadResponse(_)
        | CallError::TooLarge(_) => (code, details, RetryOn::AgentError),
    }
}

impl World {
    /// A job's input.
    async fn input(&self, job: &Job) -> Result<Box<RawValue>, Outcome> {
        let wrong = |message: String| failed("INTERNAL_ERROR", message, &json!({}), None);
        let text = self.text(&job.input).await;
        let text = text.map_err(|error| wrong(format!("the input is lost: {error}")))?;
        RawValue::from_string(text)
            .map_err(|error| wrong(format!("the stored input is not JSON: {error}")))
    }

    /// Tells the agent that a call is not wanted any more; says whether it confirmed.
    async fn cancel_call(&self, slot: &Slot, call: &Invocation) -> bool {
        let body = json!({ "request_id": call.request_id, "job_id": call.job_id });
        let uri = format!("http://{}{}/cancel", slot.endpoint.address, slot.endpoint.invoke_path);
        let request = http::Request::post(uri)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(http_body_util::Full::new(bytes::Bytes::from(body.to_string())));
        let Ok(request) = request else { return false };
        let sent = tokio::time::timeout(self.settings.cancel_wait, self.client.send(request)).await;
        matches!(sent, Ok(Ok(response)) if response.status().is_success())
    }
}
