//! One actor per unfinished job, where the job's shard is led: it carries the job to its end.
//!
//! Before the first byte leaves for the agent, the attempt is committed with the node that will run
//! it; its result counts only in the attempt's own epoch. That node holds call and result
//! ([`crate::attempt`]), so an owner that takes over asks there first. Only when the node is gone, or
//! knows nothing of the attempt, is the attempt lost, and the job's retry rule says what then.

use std::{sync::Arc, time::Duration};

use domain::{
    JobId, Rejection,
    job::{Attempt, Job, JobStatus, Outcome, RetryOn},
    machine::Claim,
    planted::{self, Bug},
    shard::{Command, Reply},
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use serde_json::json;
use tokio::{task::AbortHandle, time::Instant};

use crate::{
    ask::{self, Ask, Told},
    attempt::{Held, Ran, failed},
    ports::{PeerError, ProposeError},
    root::{Thing, Told as Telling, detach},
    route::{NoSlot, Slot},
    world::World,
};

/// Between attempts to write an outcome down.
const FINISH_AGAIN: Duration = Duration::from_millis(500);
/// How long one question for the end of an attempt waits.
const AWAITED: Duration = Duration::from_secs(20);

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
    /// The strongest wish for its end that was passed on, and of which epoch.
    canceling: Option<(u64, bool)>,
    alarm: Option<AbortHandle>,
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
        Ok(Carrier { world, id, claim, attempt: None, canceling: None, alarm: None })
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
        self.pass_cancel_on(&job);
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

    /// Whoever runs the attempt is told that it is not wanted any more.
    fn pass_cancel_on(&mut self, job: &Job) {
        let wish = (job.epoch, job.cancel_by_force);
        let wanted = job.cancel_requested_at.is_some() && job.status == JobStatus::Running;
        if !wanted || self.canceling == Some(wish) {
            return;
        }
        let Some(node) = job.node_id else { return };
        self.canceling = Some(wish);
        let (world, claim, id) = (Arc::clone(&self.world), self.claim, self.id);
        let ask = Ask::CancelAttempt { claim, job: id, epoch: wish.0, by_force: wish.1 };
        detach(async move {
            while let Err(error) = world.ask_node(node, ask.clone(), ask::ANSWER_WITHIN).await {
                tracing::info!(job_id = %id, %node, %error, "a cancellation is not passed on yet");
                tokio::time::sleep(FINISH_AGAIN).await;
                if world.has_left(node) || !world.is_current(claim) {
                    return;
                }
            }
        });
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

    /// A running job without a task: its slot was handed over, or another owner began the attempt.
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
        self.begin(Arc::clone(job), slot, myself);
        Ok(())
    }

    fn begin(&mut self, job: Arc<Job>, slot: Option<Slot>, myself: &ActorRef<JobMessage>) {
        let carry = Carry { world: Arc::clone(&self.world), claim: self.claim };
        let ended = Telling::when_dropped(myself.clone(), || JobMessage::Ended);
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

/// Between askings of a node whose instance has just been taken by a call from elsewhere. Another instance is
/// written down before it is asked, so that is not done at every turn.
const BUSY_PAUSES: [Duration; 4] = [
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(80),
    Duration::from_millis(160),
];

/// One attempt, from a slot to a committed outcome.
struct Carry {
    world: Arc<World>,
    claim: Claim,
}

impl Carry {
    async fn attempt(self, job: Arc<Job>, slot: Option<Slot>) -> Result<(), ActorProcessingErr> {
        let begins_again = planted::has(Bug::DoubleTakeOver) && slot.is_none();
        let is_new = job.status == JobStatus::Pending || begins_again;
        let (mut job, mut slot) = match (is_new, slot) {
            (true, _) => match self.slot(&job).await {
                Ok(slot) => {
                    let Some(job) = self.start(&job, &slot).await? else { return Ok(()) };
                    (job, Some(slot))
                }
                Err(outcome) => {
                    let Some(job) = self.start_without_slot(&job).await? else { return Ok(()) };
                    return self.finish(&job, outcome).await;
                }
            },
            (false, slot) => (job, slot),
        };
        loop {
            let ran = match slot.take() {
                Some(slot) => self.run(&job, slot).await,
                None => self.end_of(&job).await,
            };
            match ran {
                Ran::Ended(outcome) => return self.finish(&job, outcome).await,
                // The agent saw nothing of it: the same attempt goes to another instance, which is
                // written down first, so that whoever owns the job next knows where to ask.
                Ran::Unreached => match self.slot(&job).await {
                    Ok(next) => {
                        let Some(moved) = self.start(&job, &next).await? else { return Ok(()) };
                        job = moved;
                        slot = Some(next);
                    }
                    Err(outcome) => return self.finish(&job, outcome).await,
                },
            }
        }
    }

    /// Commits the outcome; whoever held the result may forget it.
    async fn finish(&self, job: &Job, outcome: Outcome) -> Result<(), ActorProcessingErr> {
        finish(&self.world, self.claim, job.id, job.epoch, outcome).await?;
        if let Some(node) = job.node_id {
            let ask = Ask::ForgetAttempt { job: job.id, epoch: job.epoch };
            let _ = self.world.ask_node(node, ask, ask::ANSWER_WITHIN).await;
        }
        Ok(())
    }

    /// Has the node of the instance run the attempt, and waits for its end.
    async fn run(&self, job: &Arc<Job>, slot: Slot) -> Ran {
        let Some(node) = slot.endpoint.node() else {
            self.world.run_attempt(Arc::clone(job), slot);
            return self.end_of(job).await;
        };
        let ask = Ask::BeginAttempt {
            claim: self.claim,
            job: Box::new(Job::clone(job)),
            instance: slot.endpoint.id,
        };
        let mut pauses = BUSY_PAUSES.iter();
        let told = loop {
            let told = self.world.ask_node(node, ask.clone(), ask::ANSWER_WITHIN).await;
            match (&told, pauses.next()) {
                (Ok(Told::Busy), Some(pause)) => tokio::time::sleep(*pause).await,
                (_, _) => break told,
            }
        };
        match told {
            Ok(Told::Done) => self.end_of(job).await,
            Ok(Told::Busy) => {
                slot.endpoint.mark_busy();
                Ran::Unreached
            }
            Ok(_) | Err(PeerError::Unreached(_) | PeerError::Refused(_)) => {
                self.world.give_up(&slot);
                Ran::Unreached
            }
            // It may have begun.
            Err(PeerError::Broken(_)) => self.end_of(job).await,
        }
    }

    /// How an attempt ends that runs somewhere. Its node is asked for as long as it may come back;
    /// only when the node is gone, or has started again, is the attempt lost.
    async fn end_of(&self, job: &Job) -> Ran {
        let Some(node) = job.node_id else { return Ran::Ended(lost()) };
        let (mut silent, grace) = (None, self.world.settings.replacement_grace);
        loop {
            let ask = Ask::AwaitAttempt { job: job.id, epoch: job.epoch, within: AWAITED };
            let told = self.world.ask_node(node, ask, AWAITED + ask::ANSWER_WITHIN).await;
            match told {
                Ok(Told::Attempt(Held::Over(ran))) => return ran,
                Ok(Told::Attempt(Held::Running)) => silent = None,
                Ok(_) => return Ran::Ended(lost()),
                Err(_) => {
                    let since = *silent.get_or_insert_with(Instant::now);
                    let is_alive = self.world.ports.peers.is_alive(node);
                    if self.world.has_left(node) || !is_alive && since.elapsed() >= grace {
                        return Ran::Ended(lost());
                    }
                    tokio::time::sleep(FINISH_AGAIN).await;
                }
            }
        }
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
        let command = match job.status {
            JobStatus::Pending => Command::StartJob { id: job.id, attempt },
            JobStatus::Running | JobStatus::Completed | JobStatus::Failed | JobStatus::Canceled => {
                Command::RedirectJob { id: job.id, epoch: job.epoch, attempt }
            }
        };
        let answer =
            self.world.ask_shard(self.claim.shard, command, None, Some(self.claim)).await?;
        match answer.result {
            Ok(Reply::Job(job)) if job.status == JobStatus::Running => Ok(Some(Arc::from(job))),
            Ok(_) | Err(Rejection::NotOwner) => Ok(None),
            Err(reason) => Err(reason.into()),
        }
    }
}

/// What is written down before the first byte leaves.
pub fn attempt(world: &World, slot: Option<&Slot>) -> Attempt {
    Attempt {
        instance_id: slot.map(|slot| slot.endpoint.id),
        node_id: slot.and_then(|slot| slot.endpoint.node()).unwrap_or(world.node_id),
        boot: world.boot.clone(),
        version: slot.map(|slot| slot.endpoint.version),
    }
}

/// The node that ran it is gone, and with it what became of the attempt.
fn lost() -> Outcome {
    let message = "the node that ran the attempt was lost; whether it took effect is unknown";
    let details = json!({ "reason": "outcome_unknown" });
    failed("NODE_LOST", message.to_owned(), &details, Some(RetryOn::Unavailable))
}
