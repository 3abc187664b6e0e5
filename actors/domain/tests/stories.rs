//! Stories of the directory and the shards, and laws that hold for all of them.

mod golden;

use std::collections::BTreeMap;

use domain::{
    AgentId, CloudId, DeploymentId, InstanceId, JobId, NodeId, OrgId, Rejection, RequestId,
    Timestamp, UploadId,
    account::{Mode, Tenant},
    agent::{
        Agent, AgentPatch, Desired, Resources, RuntimeSpec, Scaling, Source, Status,
        lifecycle::Redeploy,
    },
    cloud::{Cloud, CloudLimits, Provider},
    deployment::{self, Failure, Image, Spec},
    directory::{Command as C, Directory, Reply},
    idempotency::Keyed,
    instance::{Instance, InstanceStatus},
    job::{Attempt, Job, JobStatus, Outcome, Payload, Retry, RetryOn, Usage},
    machine::{Claim, Entry, Machine, apply},
    shard::{self, Shard},
};
use proptest::prelude::*;

use crate::golden::{hold, read};

const TENANT: Tenant = Tenant { org: OrgId(1), mode: Mode::Live };
const CLOUD: CloudId = CloudId(7);

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1_700_000_000_000 + seconds * 1000)
}

fn entry<T>(command: T, seconds: u64) -> Entry<T> {
    Entry::new(at(seconds), command)
}

fn cloud() -> Cloud {
    Cloud {
        id: CLOUD,
        tenant: TENANT,
        name: "default".to_owned(),
        display_name: "Default".to_owned(),
        region: "local".to_owned(),
        provider: Provider::Process,
        is_default: true,
        limits: CloudLimits::default(),
        node_selector: BTreeMap::new(),
        metadata: BTreeMap::new(),
        created_at: at(0),
        updated_at: at(0),
        revision: 1,
    }
}

fn agent(id: u128, name: &str) -> Agent {
    Agent {
        id: AgentId(id),
        tenant: TENANT,
        cloud_id: CLOUD,
        name: name.to_owned(),
        display_name: name.to_owned(),
        spec: Spec {
            source: Source::Upload { upload_id: UploadId(1), sha256: "ab".to_owned() },
            runtime: RuntimeSpec::default(),
            resources: Resources::default(),
            environment: BTreeMap::new(),
        },
        scaling: Scaling::default(),
        metadata: BTreeMap::new(),
        desired: Desired::Run,
        status: Status::Created,
        reason: None,
        version: None,
        live_deployment: None,
        latest_version: 0,
        deployment: DeploymentId(1),
        waiting: None,
        created_at: at(0),
        updated_at: at(0),
        deployed_at: None,
        revision: 1,
    }
}

fn image() -> Image {
    Image {
        reference: "image".to_owned(),
        runtime: RuntimeSpec::default(),
        command: vec!["run".to_owned()],
        port: None,
        health_path: "/health".to_owned(),
        invoke_path: "/invoke".to_owned(),
        concurrency: 10,
        isolation_minimum: vec![],
        read_only_root: false,
        commit: None,
        digest: None,
    }
}

const A: AgentId = AgentId(1);

fn redeploy(id: u128) -> C {
    let asked = Redeploy { source: None, strategy: deployment::Strategy::Rolling, no_cache: false };
    C::RedeployAgent { tenant: TENANT, id: A, asked: Box::new(asked), deployment: DeploymentId(id) }
}

fn built(id: u128) -> C {
    C::BeginRollout { agent: A, id: DeploymentId(id), image: Some(Box::new(image())) }
}

fn promote(id: u128) -> C {
    C::Promote { agent: A, id: DeploymentId(id) }
}

fn failed(id: u128) -> C {
    C::FailDeployment {
        agent: A,
        id: DeploymentId(id),
        failure: Failure::new("BUILD_FAILED", "no"),
    }
}

/// A directory with one cloud, after these commands, one second apart.
fn after(commands: &[C]) -> Directory {
    let mut directory = Directory::default();
    let first = [C::CreateCloud(Box::new(cloud())), C::CreateAgent(Box::new(agent(1, "mail")))];
    for (second, command) in (0..).zip(first.iter().chain(commands)) {
        let (answer, _) = apply(&mut directory, &entry(command.clone(), second));
        assert!(answer.result.is_ok(), "{command:?}: {:?}", answer.result);
    }
    directory
}

/// What the agent shows: status, version, and the states of its deployments.
fn shown(directory: &Directory) -> String {
    let agent = directory.agents.get(&A).expect("it exists");
    let deployments: Vec<_> =
        directory.deployments_of(A).map(|d| format!("{}:{}", d.id.0, d.status.as_str())).collect();
    let version = agent.version.map_or("-".to_owned(), |number| number.to_string());
    format!("{} v{version} [{}]", agent.status.as_str(), deployments.join(" "))
}

#[track_caller]
fn check(commands: &[C], expected: &str) {
    assert_eq!(shown(&after(commands)), expected);
}

#[track_caller]
fn refused(commands: &[C], command: C, expected: &str) {
    let mut directory = after(commands);
    let before = shown(&directory);
    let (answer, events) = apply(&mut directory, &entry(command, 100));
    let reason = answer.result.err().map(|reason| reason.to_string());
    assert_eq!(reason.as_deref(), Some(expected));
    assert!(events.is_empty());
    assert_eq!(shown(&directory), before, "refused means untouched");
}

#[test]
fn a_first_deployment_walks_through_the_states() {
    check(&[], "created v- [1:queued]");
    let begin = C::BeginBuild { agent: A, id: DeploymentId(1) };
    check(std::slice::from_ref(&begin), "building v- [1:building]");
    check(&[begin.clone(), built(1)], "deploying v- [1:deploying]");
    check(&[begin.clone(), built(1), promote(1)], "running v1 [1:live]");
    check(&[begin, failed(1)], "failed v- [1:failed]");
}

#[test]
fn a_running_agent_stays_running_while_it_is_redeployed() {
    let up = [built(1), promote(1)];
    let with = |more: &[C]| [&up[..], more].concat();
    check(&with(&[redeploy(2)]), "running v1 [1:live 2:queued]");
    check(&with(&[redeploy(2), built(2), promote(2)]), "running v2 [1:superseded 2:live]");
    check(&with(&[redeploy(2), failed(2)]), "running v1 [1:live 2:failed]");
    check(&with(&[redeploy(2), redeploy(3)]), "running v1 [1:live 2:superseded 3:queued]");
}

#[test]
fn a_deployment_that_is_starting_makes_the_next_one_wait() {
    let up = [built(1), promote(1), redeploy(2), built(2)];
    let with = |more: &[C]| [&up[..], more].concat();
    check(&with(&[redeploy(3)]), "running v1 [1:live 2:deploying 3:queued]");
    let waiting = after(&with(&[redeploy(3), redeploy(4)]));
    assert_eq!(shown(&waiting), "running v1 [1:live 2:deploying 3:superseded 4:queued]");
    assert_eq!(waiting.agents.get(&A).and_then(|agent| agent.waiting), Some(DeploymentId(4)));
    let next = after(&with(&[redeploy(3), failed(2)]));
    let agent = next.agents.get(&A).expect("it exists");
    assert_eq!((agent.deployment, agent.waiting), (DeploymentId(3), None), "its turn has come");
    check(
        &with(&[redeploy(3), promote(2), built(3), promote(3)]),
        "running v3 [1:superseded 2:superseded 3:live]",
    );
}

#[test]
fn a_failed_version_number_is_used_again() {
    let directory = after(&[built(1), promote(1), redeploy(2), failed(2), redeploy(3)]);
    let third = directory.deployment(A, DeploymentId(3)).expect("it exists");
    assert_eq!(third.version, 2);
}

#[test]
fn stop_is_said_when_the_last_instance_is_gone() {
    let stop = C::StopAgent { tenant: TENANT, id: A };
    let up = [built(1), promote(1), stop.clone()];
    check(&up, "running v1 [1:live]");
    let directory = after(&up);
    assert!(
        !directory.agents.get(&A).expect("it exists").is_serving(),
        "new calls are refused at once"
    );
    let with = |more: &[C]| [&up[..], more].concat();
    check(&with(&[C::ReportStopped { agent: A }]), "stopped v1 [1:live]");
    let start = C::StartAgent { tenant: TENANT, id: A, deployment: DeploymentId(2) };
    let started = with(&[C::ReportStopped { agent: A }, start]);
    check(&started, "deploying v1 [1:live 2:queued]");
    check(&[&started[..], &[built(2), promote(2)]].concat(), "running v1 [1:superseded 2:live]");
    check(&[stop], "stopped v- [1:canceled]");
}

#[test]
fn operations_that_do_not_fit_are_refused() {
    let start = C::StartAgent { tenant: TENANT, id: A, deployment: DeploymentId(2) };
    refused(&[], start.clone(), "the state is created; this needs stopped");
    refused(&[failed(1)], start, "the state is failed; this needs stopped");
    let stop = C::StopAgent { tenant: TENANT, id: A };
    refused(
        &[failed(1)],
        stop,
        "the state is failed; this needs created or building or deploying or running",
    );
    let back = C::RollbackAgent { tenant: TENANT, id: A, version: 1, deployment: DeploymentId(2) };
    refused(&[], back.clone(), "a deployment is in progress; wait for it or cancel it");
    refused(&[failed(1)], back, "the agent has no version 1; list them under /versions");
    let twin = C::CreateAgent(Box::new(agent(2, "MAIL")));
    refused(&[], twin, "an agent named `MAIL` already exists in this cloud; choose another name");
    let stranger = Tenant { org: OrgId(2), mode: Mode::Live };
    let theft = C::DeleteAgent { tenant: stranger, id: A };
    refused(&[], theft, &format!("the agent {A} does not exist"));
    let cancel = C::CancelDeployment { tenant: TENANT, agent: A, id: DeploymentId(9) };
    refused(&[], cancel, &format!("the deployment {} does not exist", DeploymentId(9)));
}

fn notes(from: u32, upto: u32) -> C {
    let metadata = (from..upto).map(|note| (format!("note-{note}"), Some("text".to_owned())));
    let patch = AgentPatch { metadata: metadata.collect(), ..AgentPatch::default() };
    C::UpdateAgent {
        tenant: TENANT,
        id: A,
        patch: Box::new(patch),
        if_match: None,
        deployment: DeploymentId(9),
    }
}

#[test]
fn changes_that_know_nothing_of_each_other_stay_within_the_limit_together() {
    let expected = "would have more than 50 members with those that it has";
    refused(&[notes(0, 30)], notes(30, 51), expected);
    let directory = after(&[notes(0, 30), notes(20, 50)]);
    assert_eq!(directory.agents.get(&A).map(|agent| agent.metadata.len()), Some(50));
}

#[test]
fn a_deposed_owner_is_refused() {
    let mut directory = after(&[]);
    let claim = |term| Some(Claim { shard: 3, term });
    let act = |directory: &mut Directory, term, command| {
        let entry = Entry { claim: claim(term), ..entry(command, 50) };
        apply(directory, &entry).0.result.map(drop).map_err(|reason| reason.to_string())
    };
    assert_eq!(act(&mut directory, 5, C::Take), Ok(()));
    assert_eq!(act(&mut directory, 4, built(1)), Err("another node has taken over".to_owned()));
    assert_eq!(shown(&directory), "created v- [1:queued]");
    assert_eq!(act(&mut directory, 5, built(1)), Ok(()));
    assert_eq!(shown(&directory), "deploying v- [1:deploying]");
}

#[test]
fn a_keyed_command_is_carried_out_once() {
    let mut directory = after(&[built(1), promote(1)]);
    let key = |fingerprint| Some(Keyed { hash: [1; 32], fingerprint: [fingerprint; 32] });
    let redeploy = Entry { key: key(1), ..entry(redeploy(2), 60) };
    let (first, _) = apply(&mut directory, &redeploy);
    let (again, events) = apply(&mut directory, &Entry { at: at(61), ..redeploy.clone() });
    assert!(!first.replayed && again.replayed && events.is_empty());
    assert_eq!(format!("{:?}", first.result), format!("{:?}", again.result));
    let (other, _) = apply(&mut directory, &Entry { key: key(2), ..redeploy.clone() });
    assert!(other.result.is_err_and(|reason| reason.to_string().contains("another body")));
    let later = at(61).plus(domain::idempotency::KEPT_FOR);
    apply(&mut directory, &Entry { at: later, ..entry(C::Sweep, 0) });
    let (fresh, _) = apply(&mut directory, &Entry { at: later, ..redeploy });
    assert!(!fresh.replayed, "forgotten after a day");
}

fn job(id: u128) -> Job {
    Job {
        id: JobId(id),
        tenant: TENANT,
        agent_id: A,
        agent_version: None,
        status: JobStatus::Pending,
        input: Payload::Here("1".to_owned()),
        headers: BTreeMap::new(),
        metadata: BTreeMap::new(),
        timeout_ms: 1000,
        retry: Retry { max_attempts: 2, initial_ms: 500, ..Retry::default() },
        attempt: 0,
        epoch: 0,
        boot: None,
        instance_id: None,
        node_id: None,
        created_at: at(0),
        started_at: None,
        completed_at: None,
        next_attempt_at: None,
        cancel_requested_at: None,
        cancel_by_force: false,
        output: None,
        error: None,
        usage: Usage::default(),
        request_id: RequestId(1),
        retried_from: None,
    }
}

fn start(id: u128) -> shard::Command {
    let attempt = Attempt {
        instance_id: Some(InstanceId(1)),
        node_id: NodeId(1),
        boot: "b".to_owned(),
        version: Some(1),
    };
    shard::Command::StartJob { id: JobId(id), attempt }
}

fn finish(id: u128, epoch: u64, ok: bool) -> shard::Command {
    let error = domain::job::JobError {
        code: "AGENT_ERROR".to_owned(),
        message: "no".to_owned(),
        details: "{}".to_owned(),
    };
    let outcome = match ok {
        true => {
            Outcome::Completed { output: Payload::Here("2".to_owned()), usage: Usage::default() }
        }
        false => Outcome::Failed { error, kind: Some(RetryOn::AgentError) },
    };
    shard::Command::FinishJob { id: JobId(id), epoch, outcome }
}

fn played(commands: &[shard::Command]) -> (Shard, Vec<String>) {
    let mut state = Shard::default();
    let said = (0..)
        .zip(commands)
        .map(|(second, command)| {
            match apply(&mut state, &entry(command.clone(), second)).0.result {
                Ok(shard::Reply::Job(job)) => {
                    format!("{} {}/{}", job.status.as_str(), job.attempt, job.epoch)
                }
                Ok(other) => format!("{other:?}"),
                Err(reason) => reason.to_string(),
            }
        })
        .collect();
    (state, said)
}

#[test]
fn a_job_runs_its_attempts_and_a_late_result_is_refused() {
    let accept = shard::Command::AcceptJob { job: Box::new(job(1)), first: None };
    let (state, said) = played(&[
        accept,
        start(1),
        finish(1, 1, false),
        start(1),
        finish(1, 1, true),
        finish(1, 2, true),
        finish(1, 2, false),
    ]);
    assert_eq!(
        said,
        [
            "pending 0/0",
            "running 1/1",
            "pending 1/1",
            "running 2/2",
            "running 2/2",
            "completed 2/2",
            "completed 2/2"
        ]
    );
    assert!(state.jobs.is_empty());
    let job = state.any_job(JobId(1)).expect("kept");
    assert_eq!(
        (job.output.clone(), job.error.is_none()),
        (Some(Payload::Here("2".to_owned())), true)
    );
    assert_eq!(job.next_attempt_at, None);
}

#[test]
fn a_waiting_job_is_canceled_at_once_and_a_running_one_is_only_asked() {
    let accept = || shard::Command::AcceptJob { job: Box::new(job(1)), first: None };
    let cancel = || shard::Command::CancelJob { tenant: TENANT, id: JobId(1), by_force: false };
    let (_, said) = played(&[accept(), cancel(), cancel()]);
    assert_eq!(said, ["pending 0/0", "canceled 0/0", "the job has already finished"]);
    let (state, said) = played(&[accept(), start(1), cancel(), finish(1, 1, false)]);
    assert_eq!(said, ["pending 0/0", "running 1/1", "running 1/1", "failed 1/1"]);
    assert!(state.any_job(JobId(1)).is_some_and(|job| job.cancel_requested_at.is_some()));
}

fn any_command() -> impl Strategy<Value = C> {
    let id = 1_u128..6;
    prop_oneof![
        id.clone().prop_map(redeploy),
        id.clone().prop_map(built),
        id.clone().prop_map(promote),
        id.clone().prop_map(failed),
        id.clone().prop_map(|id| C::BeginBuild { agent: A, id: DeploymentId(id) }),
        id.clone().prop_map(|id| C::StartAgent {
            tenant: TENANT,
            id: A,
            deployment: DeploymentId(id)
        }),
        id.clone().prop_map(|id| C::CancelDeployment {
            tenant: TENANT,
            agent: A,
            id: DeploymentId(id)
        }),
        (1_u64..4, id.clone()).prop_map(|(version, id)| C::RollbackAgent {
            tenant: TENANT,
            id: A,
            version,
            deployment: DeploymentId(id)
        }),
        (0_u8..3, id.clone()).prop_map(|(cpu, id)| {
            let resources = Resources { cpu: u32::from(cpu) + 1, ..Resources::default() };
            let patch = AgentPatch { resources: Some(resources), ..AgentPatch::default() };
            C::UpdateAgent {
                tenant: TENANT,
                id: A,
                patch: Box::new(patch),
                if_match: None,
                deployment: DeploymentId(id),
            }
        }),
        Just(C::StopAgent { tenant: TENANT, id: A }),
        Just(C::ReportStopped { agent: A }),
        Just(C::DeleteAgent { tenant: TENANT, id: A }),
        Just(C::ForgetAgent { agent: A }),
        Just(C::CreateAgent(Box::new(agent(1, "mail")))),
        id.prop_map(|id| C::PlaceInstances(vec![Instance {
            id: InstanceId(id),
            agent_id: A,
            version: 1,
            deployment_id: DeploymentId(id),
            node_id: NodeId(1),
            status: InstanceStatus::Starting,
            started_at: at(1),
            ready_at: None,
            isolation: vec![],
        }])),
    ]
}

/// All rows of a machine, as they would be on disk.
fn rows<M: Machine>(machine: &mut M) -> BTreeMap<(u8, Vec<u8>), Vec<u8>> {
    let mut changes = vec![];
    let mut all = BTreeMap::new();
    for table in machine.tables() {
        table.take_changes(&mut changes);
        table.written();
    }
    for change in changes {
        let key = (change.table, change.key);
        match change.row {
            Some(row) => all.insert(key, row.bytes()),
            None => all.remove(&key),
        };
    }
    all
}

/// A machine made of rows, as after a restart or an installed snapshot.
fn restored(saved: &BTreeMap<(u8, Vec<u8>), Vec<u8>>) -> Directory {
    let mut directory = Directory::default();
    for table in directory.tables() {
        let number = table.number();
        for ((_, key), row) in saved.iter().filter(|((of, _), _)| *of == number) {
            table.load(key, row).expect("our own row");
        }
    }
    directory.reindex();
    directory
}

fn with_cloud() -> Directory {
    let mut directory = Directory::default();
    let (answer, _) = apply(&mut directory, &entry(C::CreateCloud(Box::new(cloud())), 0));
    assert!(answer.result.is_ok());
    directory
}

#[test]
fn the_name_of_a_cloud_is_taken_until_it_goes_also_after_a_restart() {
    let mut directory = with_cloud();
    let named = |name: &str, id: u128, mode: Mode| {
        let tenant = Tenant { mode, ..TENANT };
        let cloud = Cloud { id: CloudId(id), tenant, name: name.to_owned(), ..cloud() };
        entry(C::CreateCloud(Box::new(cloud)), 1)
    };
    for restart in [false, true] {
        if restart {
            directory = restored(&rows(&mut directory));
        }
        let (answer, _) =
            apply(&mut directory, &named(&cloud().name.to_uppercase(), 7, TENANT.mode));
        assert!(matches!(answer.result, Err(Rejection::CloudNameTaken(_))), "{:?}", answer.result);
        let other = if TENANT.mode == Mode::Live { Mode::Test } else { Mode::Live };
        let free = CloudId(8 + u128::from(restart));
        let (answer, _) =
            apply(&mut directory, &named(&format!("new-{restart}"), free.0, TENANT.mode));
        assert!(answer.result.is_ok(), "{:?}", answer.result);
        let (answer, _) = apply(&mut directory, &named(&format!("NEW-{restart}"), 20, other));
        assert!(answer.result.is_ok(), "the other mode has names of its own: {:?}", answer.result);
        let gone = C::DeleteCloud { tenant: Tenant { mode: other, ..TENANT }, id: CloudId(20) };
        assert!(apply(&mut directory, &entry(gone, 2)).0.result.is_ok());
        let gone = C::DeleteCloud { tenant: TENANT, id: CLOUD };
        assert!(apply(&mut directory, &entry(gone, 2)).0.result.is_ok());
        let (answer, _) = apply(&mut directory, &named(&cloud().name, CLOUD.0, TENANT.mode));
        assert!(answer.result.is_ok(), "its name is free again: {:?}", answer.result);
    }
}

proptest! {
    /// Two replicas that apply the same log are the same, and say the same.
    #[test]
    fn replicas_agree(log in prop::collection::vec(any_command(), 0..40)) {
        let (mut one, mut other) = (with_cloud(), with_cloud());
        for (second, command) in (0..).zip(&log) {
            let entry = entry(command.clone(), second);
            let said = |directory: &mut Directory| format!("{:?}", apply(directory, &entry));
            prop_assert_eq!(said(&mut one), said(&mut other));
        }
        prop_assert_eq!(rows(&mut one), rows(&mut other));
    }

    /// A node that restarts from its tables in the middle of the log ends where the others end.
    #[test]
    fn a_snapshot_changes_nothing(log in prop::collection::vec(any_command(), 0..40), cut in 0usize..40) {
        let (mut steady, mut restarted) = (with_cloud(), with_cloud());
        let mut saved = rows(&mut restarted);
        for (place, command) in log.iter().enumerate() {
            if place == cut {
                restarted = restored(&saved);
            }
            let entry = entry(command.clone(), place as u64);
            let said = format!("{:?}", apply(&mut steady, &entry));
            prop_assert_eq!(said, format!("{:?}", apply(&mut restarted, &entry)));
            let changed = rows_changed(&mut restarted);
            for (key, row) in changed {
                match row {
                    Some(row) => saved.insert(key, row),
                    None => saved.remove(&key),
                };
            }
        }
        prop_assert_eq!(shown_or_gone(&steady), shown_or_gone(&restored(&saved)));
    }

    /// Refused means untouched, and whatever happens an agent makes sense.
    #[test]
    fn an_agent_always_makes_sense(log in prop::collection::vec(any_command(), 0..60)) {
        let mut directory = with_cloud();
        for (second, command) in (0..).zip(&log) {
            let before = directory.agents.get(&A);
            let (answer, events) = apply(&mut directory, &entry(command.clone(), second));
            if answer.result.is_err() {
                prop_assert!(events.is_empty());
                prop_assert_eq!(before, directory.agents.get(&A));
            }
            let Some(agent) = directory.agents.get(&A) else { continue };
            if agent.status == Status::Running {
                let live = agent.live_deployment.and_then(|id| directory.deployment(A, id));
                prop_assert!(live.is_some(), "a running agent has a live deployment");
                prop_assert!(agent.version.and_then(|number| directory.version(A, number)).is_some());
            }
            let active = directory.deployments_of(A).filter(|d| d.status.is_active());
            let ids: Vec<_> = active.map(|d| d.id).collect();
            let known = [Some(agent.deployment), agent.waiting];
            prop_assert!(ids.iter().all(|id| known.contains(&Some(*id))), "{ids:?} of {known:?}");
            if agent.desired != Desired::Run {
                prop_assert!(ids.is_empty(), "nothing is deployed to an agent that shall not run");
            }
            let failing = agent.status == Status::Failed || agent.status == Status::Stopped;
            prop_assert!(!failing || agent.reason.is_some(), "it says why");
        }
    }
}

type Changed = Vec<((u8, Vec<u8>), Option<Vec<u8>>)>;

fn rows_changed(directory: &mut Directory) -> Changed {
    let mut changes = vec![];
    for table in directory.tables() {
        table.take_changes(&mut changes);
        table.written();
    }
    changes.into_iter().map(|c| ((c.table, c.key), c.row.map(|row| row.bytes()))).collect()
}

fn shown_or_gone(directory: &Directory) -> String {
    if directory.agents.contains(&A) { shown(directory) } else { "gone".to_owned() }
}

#[test]
fn a_reply_is_the_record_as_of_its_commit() {
    let mut directory = after(&[built(1), promote(1)]);
    let stop = C::StopAgent { tenant: TENANT, id: A };
    match apply(&mut directory, &entry(stop, 9)).0.result {
        Ok(Reply::Agent(view)) => assert_eq!(view.agent.desired, Desired::Stop),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_was_ever_written_is_still_readable() {
    use domain::codec::encode;
    let key = Some(Keyed { hash: [1; 32], fingerprint: [2; 32] });
    let claim = Some(Claim { shard: 3, term: 5 });
    let accept = shard::Command::AcceptJob { job: Box::new(job(1)), first: None };
    let directory = read::<Entry<C>>;
    let shard = read::<Entry<shard::Command>>;
    let create = entry(C::CreateAgent(Box::new(agent(1, "mail"))), 1);
    hold(
        "release-0.1.txt",
        &[
            ("entry create agent", encode(&create), directory),
            ("entry redeploy, keyed", encode(&Entry { key, ..entry(redeploy(2), 2) }), directory),
            ("entry rollout, claimed", encode(&Entry { claim, ..entry(built(2), 3) }), directory),
            ("entry accept job", encode(&entry(accept, 4)), shard),
            ("entry finish job", encode(&entry(finish(1, 1, false), 5)), shard),
            ("row agent", encode(&agent(1, "mail")), read::<Agent>),
            ("row cloud", encode(&cloud()), read::<Cloud>),
            ("row job", encode(&job(1)), read::<Job>),
        ],
    );
}

#[test]
fn a_finished_job_ages_into_a_memory_and_then_is_nothing() {
    let days = |days: u64| days * 24 * 3600;
    let blob = |name: &str| Payload::Blob { sha256: name.to_owned(), bytes: 70_000 };
    let long = Job { input: blob("in"), ..job(1) };
    let accept = shard::Command::AcceptJob { job: Box::new(long), first: None };
    let (mut state, _) = played(&[accept, start(1)]);
    assert_eq!(state.needed_blobs().into_iter().collect::<Vec<_>>(), ["in"]);
    let outcome = Outcome::Completed { output: blob("out"), usage: Usage::default() };
    let finish = shard::Command::FinishJob { id: JobId(1), epoch: 1, outcome };
    apply(&mut state, &entry(finish, 10));
    assert_eq!(state.needed_blobs().len(), 2);
    let mut sweep = |second| {
        apply(&mut state, &entry(shard::Command::Sweep, second));
        let job = state.job(TENANT, JobId(1));
        let job = job.map(|job| job.output.is_some()).map_err(|reason| reason.to_string());
        (job, state.needed_blobs().len())
    };
    assert_eq!(sweep(days(7)), (Ok(true), 2), "seven days have not passed since its end");
    assert_eq!(sweep(days(7) + 10), (Ok(false), 1), "its output goes first");
    assert_eq!(sweep(days(30)), (Ok(false), 1));
    let (forgotten, blobs) = sweep(days(30) + 10);
    assert!(forgotten.is_err_and(|told| told.contains("was kept until 2023-12-14")), "30 days");
    assert_eq!(blobs, 0);
    let foreign = Tenant { org: OrgId(2), mode: Mode::Live };
    let (gone, _) = sweep(days(60) + 10);
    assert_eq!(gone, Err(format!("the job {} does not exist", JobId(1))));
    assert_eq!(state.job(foreign, JobId(1)).err(), Some(domain::Rejection::JobNotFound(JobId(1))));
    assert!(!state.has_expired(at(days(100))), "nothing is left to look at");
}

#[test]
fn the_blob_of_a_kept_answer_is_needed_until_its_key_is_forgotten() {
    let key = Keyed { hash: [7; 32], fingerprint: [1; 32] };
    let begin =
        shard::Command::BeginCall { key: key.clone(), deadline: at(60), boot: "b".to_owned() };
    let output = Payload::Blob { sha256: "answer".to_owned(), bytes: 70_000 };
    let outcome =
        shard::CallOutcome::Completed { output, usage: Usage::default(), instance_id: None };
    let (mut state, _) = played(&[begin, shard::Command::EndCall { key, outcome }]);
    assert_eq!(state.needed_blobs().into_iter().collect::<Vec<_>>(), ["answer"]);
    apply(&mut state, &entry(shard::Command::Sweep, 3600));
    assert_eq!(state.needed_blobs().len(), 1, "its repetition may still come");
    let later = at(10).plus(domain::idempotency::KEPT_FOR);
    apply(&mut state, &Entry { at: later, ..entry(shard::Command::Sweep, 0) });
    assert!(state.needed_blobs().is_empty());
}
