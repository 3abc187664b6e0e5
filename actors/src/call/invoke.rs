//! Synchronous calls and streams, with and without an idempotency key.

use std::sync::Arc;

use domain::{
    Timestamp,
    account::Tenant,
    agent::Agent,
    idempotency::Keyed,
    job::{JobError, Usage},
    shard::{CallOutcome, Command, Reply},
};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{Answered, Service, ServiceError};
use crate::{
    invocation::{self, CallError, Invocation, Output},
    wire::StreamEvent,
};

/// The end of a synchronous call.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The result.
    pub output: Value,
    /// What it used.
    pub usage: Usage,
    /// The instance that answered.
    pub instance_id: Option<domain::InstanceId>,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        let Output { output, usage, instance_id, .. } = output;
        Self { output, usage, instance_id: Some(instance_id) }
    }
}

/// Events of a stream, as they come.
pub type Invoked = mpsc::Receiver<Result<StreamEvent, CallError>>;

impl Service {
    /// The agent, if it takes calls. The hot path: it reads this node's copy.
    pub fn serving(&self, tenant: Tenant, id: domain::AgentId) -> Result<Arc<Agent>, ServiceError> {
        let agent = self.world.directory().read().agent(tenant, id)?;
        if agent.is_serving() { Ok(agent) } else { Err(invocation::refusal(&agent).into()) }
    }

    /// Calls an agent and waits for its answer.
    pub async fn invoke(
        &self,
        tenant: Tenant,
        call: Invocation,
        key: Option<Keyed>,
    ) -> Result<Answered<Finished>, ServiceError> {
        let Some(key) = key else {
            self.serving(tenant, call.agent_id)?;
            let _flight = self.world.fly(tenant).await?;
            let output = self.world.invoke(&call).await?;
            return Ok(Answered { value: output.into(), replayed: false });
        };
        // Few calls have a key: what that takes is not every call's to carry.
        Box::pin(self.invoke_once(tenant, call, key)).await
    }

    /// A keyed call: its beginning and its end are committed in the key's shard, so that an equal
    /// call never reaches the agent a second time. It goes on even if the client hangs up: its
    /// outcome is what a repetition gets.
    async fn invoke_once(
        &self,
        tenant: Tenant,
        call: Invocation,
        key: Keyed,
    ) -> Result<Answered<Finished>, ServiceError> {
        let flight = match self.world.fly(tenant).await {
            Ok(flight) => Some(flight),
            // A repetition is answered without another call.
            Err(reason) => {
                let shard = self.world.ports.ledger.home(&key.hash);
                match self.was_seen(shard, Some(&key)).await? {
                    true => None,
                    false => return Err(reason.into()),
                }
            }
        };
        let service = self.clone();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        crate::root::detach(async move {
            let _flight = flight;
            let _ = sender.send(service.carry_through(tenant, call, key).await);
        });
        let unknown = |_| ServiceError::Ledger(crate::ports::ProposeError::Unknown);
        receiver.await.map_err(unknown)?
    }

    async fn carry_through(
        &self,
        tenant: Tenant,
        call: Invocation,
        key: Keyed,
    ) -> Result<Answered<Finished>, ServiceError> {
        let world = &self.world;
        let shard = world.ports.ledger.home(&key.hash);
        let deadline = world.now().plus(call.timeout);
        let begin = Command::BeginCall { key: key.clone(), deadline, boot: world.boot.clone() };
        let answer = world.ask_shard(shard, begin, None, None).await?;
        if let Reply::Call(outcome) = answer.result? {
            return self.kept(*outcome).await;
        }
        if let Err(refused) = self.serving(tenant, call.agent_id) {
            world.ask_shard(shard, Command::WithdrawCall { key }, None, None).await?;
            return Err(refused);
        }
        let result = world.invoke(&call).await;
        self.end_call(shard, key, &result).await?;
        Ok(Answered { value: result?.into(), replayed: false })
    }

    async fn end_call(
        &self,
        shard: u16,
        key: Keyed,
        result: &Result<Output, CallError>,
    ) -> Result<(), ServiceError> {
        let command = match result {
            Ok(output) => Command::EndCall {
                key,
                outcome: CallOutcome::Completed {
                    output: self.world.keep(output.output.to_string()).await?,
                    usage: output.usage,
                    instance_id: Some(output.instance_id),
                },
            },
            // It never reached the agent: a repetition may try again.
            Err(CallError::NoSlot(_)) => Command::WithdrawCall { key },
            Err(error) => Command::EndCall { key, outcome: CallOutcome::Failed(explained(error)) },
        };
        self.world.ask_shard(shard, command, None, None).await?.result?;
        Ok(())
    }

    /// The answer of an earlier, equal call.
    async fn kept(&self, outcome: CallOutcome) -> Result<Answered<Finished>, ServiceError> {
        match outcome {
            CallOutcome::Completed { output, usage, instance_id } => {
                let text = self.world.text(&output).await?;
                let output = serde_json::from_str(&text).unwrap_or(Value::String(text));
                Ok(Answered { value: Finished { output, usage, instance_id }, replayed: true })
            }
            CallOutcome::Failed(error) => Err(ServiceError::Kept(error)),
        }
    }

    /// Calls an agent and gives its events as they come.
    pub async fn stream(&self, tenant: Tenant, call: Invocation) -> Result<Invoked, ServiceError> {
        self.serving(tenant, call.agent_id)?;
        let flight = self.world.fly(tenant).await?;
        Ok(self.world.stream(call, flight).await?)
    }
}

/// A failed call, as it is kept for its repetition.
pub(super) fn explained(error: &CallError) -> JobError {
    let (code, details) = error.explained();
    JobError { code: code.to_owned(), message: error.to_string(), details: details.to_string() }
}

/// What is kept of a call whose node went away: nobody knows whether it took effect.
pub(crate) fn outcome_unknown() -> CallOutcome {
    CallOutcome::Failed(JobError {
        code: "AGENT_ERROR".to_owned(),
        message: "the node that ran the call was restarted; whether it took effect is unknown"
            .to_owned(),
        details: json!({ "reason": "outcome_unknown" }).to_string(),
    })
}

/// Whether a running key's call has had all its time.
pub(crate) fn is_overdue(row: &domain::idempotency::KeyRow, now: Timestamp) -> bool {
    const GRACE: std::time::Duration = std::time::Duration::from_secs(60);
    row.boot.is_none() || row.deadline.is_some_and(|deadline| now > deadline.plus(GRACE))
}
