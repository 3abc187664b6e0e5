//! Attempts of jobs, on the node of the instance that runs them. A call and its result are held here
//! until an owner of the job has committed it: an owner that falls takes nothing with it, and the
//! next one asks for what is here.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use domain::{
    InstanceId, JobId,
    job::{Job, JobError, Outcome, RetryOn},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};
use tokio::{sync::watch, time::Instant};

use crate::{
    ask::Told,
    instance::InstanceMessage,
    invocation::{CallError, Invocation, JOB_OUTPUT_BYTES_MAX, Output},
    root::detach,
    route::Slot,
    world::World,
};

/// How long the result of an attempt is held for an owner that does not come.
const HELD_FOR: Duration = Duration::from_secs(24 * 3600);

/// What an attempt came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ran {
    /// It ended so.
    Ended(Outcome),
    /// The instance was gone before the call could reach it.
    Unreached,
}

/// Where an attempt is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Held {
    /// This node knows nothing of it.
    Unknown,
    /// It is under way.
    Running,
    /// It is over.
    Over(Ran),
}

/// Whether somebody wants the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Cancel {
    #[default]
    No,
    Gracefully,
    ByForce,
}

struct Running {
    cancel: watch::Sender<Cancel>,
    end: watch::Receiver<Option<Ran>>,
    over_at: Option<Instant>,
}

/// All attempts of this node.
#[derive(Default)]
pub struct Attempts(Mutex<HashMap<(JobId, u64), Running>>);

impl Attempts {
    fn all(&self) -> MutexGuard<'_, HashMap<(JobId, u64), Running>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an attempt is; waits for its end for this long.
    pub async fn wait(&self, job: JobId, epoch: u64, within: Duration) -> Held {
        let end = self.all().get(&(job, epoch)).map(|running| running.end.clone());
        let Some(mut end) = end else { return Held::Unknown };
        let over = tokio::time::timeout(within, end.wait_for(Option::is_some)).await;
        match over {
            Ok(Ok(ran)) => ran.clone().map_or(Held::Running, Held::Over),
            // The task fell: nobody will ever say how it ended.
            Ok(Err(_)) => Held::Unknown,
            Err(_) => Held::Running,
        }
    }

    /// Somebody wants its end.
    pub fn cancel(&self, job: JobId, epoch: u64, by_force: bool) {
        let wish = if by_force { Cancel::ByForce } else { Cancel::Gracefully };
        if let Some(running) = self.all().get(&(job, epoch)) {
            running
                .cancel
                .send_if_modified(|now| wish > *now && std::mem::replace(now, wish) != wish);
        }
    }

    /// Its end is committed, or nobody can want it any more.
    pub fn forget(&self, job: JobId, epoch: u64) {
        self.all().remove(&(job, epoch));
    }

    fn insert(&self, job: JobId, epoch: u64, running: Running) -> bool {
        let mut all = self.all();
        all.retain(|_, one| one.over_at.is_none_or(|at| at.elapsed() < HELD_FOR));
        match all.entry((job, epoch)) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(running);
                true
            }
        }
    }

    fn over(&self, job: JobId, epoch: u64) {
        if let Some(running) = self.all().get_mut(&(job, epoch)) {
            running.over_at = Some(Instant::now());
        }
    }
}

impl World {
    /// Begins an attempt that another node owns, in an instance of this one.
    pub fn begin_attempt(self: &Arc<Self>, job: Job, instance: InstanceId) -> Told {
        match self.routes.take_of(job.agent_id, instance) {
            Ok(slot) => {
                self.run_attempt(Arc::new(job), slot);
                Told::Done
            }
            Err(told) => told,
        }
    }

    /// Begins an attempt with a slot of this node. Beginning it twice begins it once.
    pub fn run_attempt(self: &Arc<Self>, job: Arc<Job>, slot: Slot) {
        let (cancel, wishes) = watch::channel(Cancel::No);
        let (ended, end) = watch::channel(None);
        let (id, epoch) = (job.id, job.epoch);
        if !self.attempts.insert(id, epoch, Running { cancel, end, over_at: None }) {
            return;
        }
        let world = Arc::clone(self);
        detach(async move {
            let mut run = Run { world: Arc::clone(&world), cancel: wishes };
            let ran = run.run(&job, &slot).await;
            drop(slot);
            let _ = ended.send(Some(ran));
            world.attempts.over(id, epoch);
        });
    }
}

/// One attempt, from the first byte to its outcome.
struct Run {
    world: Arc<World>,
    cancel: watch::Receiver<Cancel>,
}

impl Run {
    async fn run(&mut self, job: &Job, slot: &Slot) -> Ran {
        let timeout = Duration::from_millis(job.timeout_ms);
        let input = match self.world.input(job).await {
            Ok(input) => input,
            Err(outcome) => return Ran::Ended(outcome),
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
                Err(CallError::Unreached) => {
                    self.world.give_up(slot);
                    Ran::Unreached
                }
                ended => Ran::Ended(outcome(&self.world, ended).await),
            },
            () = wanted(&mut self.cancel, Cancel::Gracefully) => {}
        }
        Ran::Ended(self.let_go(slot, &call, answer).await)
    }

    /// Canceled is said only when the agent has let go of the call or its instance is dead.
    async fn let_go(
        &mut self,
        slot: &Slot,
        call: &Invocation,
        mut answer: std::pin::Pin<&mut impl Future<Output = Result<Output, CallError>>>,
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
                    slot.endpoint.tell(InstanceMessage::Kill);
                    let _ = answer.await;
                    return Outcome::Canceled;
                }
                () = &mut give_up => break,
            }
        }
        // It does not let go: no new calls, the wanted ones may end, then the instance is ended.
        slot.endpoint.give_up_on_one();
        slot.endpoint.tell(InstanceMessage::LetGo);
        tokio::select! {
            _ = &mut answer => return Outcome::Canceled,
            () = wanted(&mut self.cancel, Cancel::ByForce) => {}
        }
        slot.endpoint.tell(InstanceMessage::Kill);
        let _ = answer.await;
        Outcome::Canceled
    }
}

/// Waits until the end is wanted at least this much.
async fn wanted(cancel: &mut watch::Receiver<Cancel>, least: Cancel) {
    if cancel.wait_for(|now| *now >= least).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// A failed outcome.
pub fn failed(code: &str, message: String, details: &Value, kind: Option<RetryOn>) -> Outcome {
    let error = JobError { code: code.to_owned(), message, details: details.to_string() };
    Outcome::Failed { error, kind }
}

/// An output is durable before the log names it.
async fn outcome(world: &World, answer: Result<Output, CallError>) -> Outcome {
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
fn explained(error: &CallError) -> (&'static str, Value, RetryOn) {
    let (code, details) = error.explained();
    match error {
        CallError::Timeout(_) => ("JOB_TIMEOUT", details, RetryOn::Timeout),
        CallError::NoSlot(_) | CallError::Unreached | CallError::Busy => {
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
        let path = format!("{}/cancel", slot.endpoint.invoke_path);
        let request = http::Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(bytes::Bytes::from(body.to_string()));
        let Ok(request) = request else { return false };
        let sent = self.send_to(&slot.endpoint, request);
        let sent = tokio::time::timeout(self.settings.cancel_wait, sent).await;
        matches!(sent, Ok(Ok(response)) if response.status().is_success())
    }
}
