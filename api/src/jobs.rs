//! `/v1/jobs`: look, wait, list, call off, repeat, remove.

use std::time::Duration;

use actors::{
    call::{JobFilter, JobsWanted},
    invocation::OUTPUT_BYTES_MAX,
};
use domain::{
    JobId, Rejection,
    job::{Job, JobStatus},
    table::Order,
};
use poem::Request;
use poem_openapi::{
    ApiResponse, OpenApi,
    param::{Path, Query},
    payload::Json,
};

use crate::{
    Handle,
    body::job::{CancelMode, CancelRequest, JobBody},
    caller::Caller,
    check::MaybeChecked,
    cursor::{self, Cursor},
    envelope::{Current, Page, RawJson, Success},
    error::{ApiError, Problem, path_id},
    query,
    repeat::{Gone, keyed, replayed},
};

pub(crate) struct JobsApi(pub(crate) Handle);

/// A job.
#[derive(ApiResponse)]
pub(crate) enum JobAnswer {
    /// The job as it is now; `Retry-After` while it has not ended.
    #[oai(status = 200)]
    Ok(
        Json<Success<JobBody>>,
        #[oai(header = "Retry-After")] Option<u64>,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

type Result<T> = std::result::Result<T, ApiError>;

fn job_id(text: &str) -> std::result::Result<JobId, Problem> {
    path_id("job", text)
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Jobs")]
impl JobsApi {
    /// List jobs
    #[oai(path = "/jobs", method = "get", operation_id = "listJobs")]
    #[expect(clippy::too_many_arguments, reason = "one argument per documented parameter")]
    async fn list(
        &self,
        caller: Caller,
        request: &Request,
        /// Items of a page.
        #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
        /// `created_at`, or `-created_at` (default) for the newest first.
        sort: Query<Option<String>>,
        /// Only these states.
        status: Query<Option<String>>,
        /// Only of these agents.
        agent_id: Query<Option<String>>,
        /// Only made after this time.
        created_after: Query<Option<String>>,
        /// Only made before this time.
        created_before: Query<Option<String>>,
    ) -> Result<Json<Success<Page<JobBody>>>> {
        let order = match sort.0.as_deref() {
            None | Some("-created_at") => Order::Descending,
            Some("created_at") => Order::Ascending,
            Some(_) => {
                return Err(Problem::field("sort", "must be created_at or -created_at").into());
            }
        };
        let filter = JobFilter {
            agents: self.agents(&caller, agent_id.0.as_deref())?,
            statuses: query::words("status", status.0.as_deref(), &STATUSES)?,
            created_after: query::time("created_after", created_after.0)?,
            created_before: query::time("created_before", created_before.0)?,
            metadata: query::metadata(request),
        };
        let bound = cursor::filter(&[&filter, &order, &caller.tenant()]);
        let key = &self.0.settings.signing_key;
        let from = cursor::read(key, cursor.0.as_deref(), &bound)?;
        let from = from.and_then(|from| from.id.parse().ok());
        let limit = limit.0.unwrap_or(query::LIMIT) as usize;
        let tenant = caller.tenant();
        let wanted = JobsWanted { tenant, filter, from, order, limit: limit + 1 };
        let mut jobs = self.0.service.jobs(wanted).await?;
        let has_more = jobs.len() > limit;
        jobs.truncate(limit);
        let last = jobs.last().filter(|_| has_more).map(|job| job.id.to_string());
        let next_cursor =
            last.map(|id| cursor::write(key, Cursor { key: String::new(), id }, &bound));
        let mut items = vec![];
        for job in &jobs {
            items.push(JobBody::of(job, &self.0.service.job_texts(job, false, 0).await?));
        }
        Ok(Json(Success::of(Page { items, has_more, next_cursor })))
    }

    /// Get a job
    ///
    /// With `wait`, once it has ended, or after that many
    /// seconds.
    #[oai(path = "/jobs/:id", method = "get", operation_id = "getJob")]
    async fn get(
        &self,
        caller: Caller,
        /// The job.
        id: Path<String>,
        /// Seconds to wait for its end, 0 to 60.
        #[oai(validator(minimum(value = "0"), maximum(value = "60")))]
        wait: Query<Option<f64>>,
        /// `input` shows the input too.
        include: Query<Option<String>>,
    ) -> Result<JobAnswer> {
        let with_input = match include.0.as_deref() {
            None => false,
            Some("input") => true,
            Some(_) => return Err(Problem::field("include", "must be input").into()),
        };
        let wait = wait.0.filter(|seconds| *seconds > 0.0).map(Duration::from_secs_f64);
        let id = job_id(&id)?;
        self.touches(&caller, id).await?;
        let job = self.0.service.job(caller.tenant(), id, wait).await?;
        self.answer(&job, with_input, false).await
    }

    /// Get a job's output
    ///
    /// The JSON that the agent answered with, without the
    /// envelope, however long it is.
    #[oai(path = "/jobs/:id/output", method = "get", operation_id = "getJobOutput")]
    async fn output(
        &self,
        caller: Caller,
        /// The job.
        id: Path<String>,
    ) -> Result<RawJson> {
        let id = job_id(&id)?;
        self.touches(&caller, id).await?;
        let job = self.0.service.job(caller.tenant(), id, None).await?;
        let texts = self.0.service.job_texts(&job, false, u64::MAX).await?;
        let state = || Rejection::InvalidState {
            current: job.status.as_str().to_owned(),
            allowed: vec!["completed".to_owned()],
        };
        Ok(RawJson(texts.output.ok_or_else(state)?))
    }

    /// Call a job off
    ///
    /// A running job is `canceled` only once its agent has let go of it or
    /// its instance has ended; until then it has `cancel_requested_at`.
    #[oai(path = "/jobs/:id/cancel", method = "post", operation_id = "cancelJob")]
    async fn cancel(
        &self,
        caller: Caller,
        request: &Request,
        /// The job.
        id: Path<String>,
        body: MaybeChecked<CancelRequest>,
    ) -> Result<JobAnswer> {
        let tenant = caller.tenant();
        let key = keyed(request, tenant, Some(&body.0.json))?;
        self.touches(&caller, job_id(&id)?).await?;
        let by_force = body.0.body.mode == Some(CancelMode::Force);
        let canceled = self.0.service.cancel_job(tenant, job_id(&id)?, by_force, key).await?;
        self.answer(&canceled.value, false, canceled.replayed).await
    }

    /// Repeat an ended job
    ///
    /// Makes a new job with the same input and options.
    #[oai(path = "/jobs/:id/retry", method = "post", operation_id = "retryJob")]
    async fn retry(
        &self,
        caller: Caller,
        request: &Request,
        /// The job.
        id: Path<String>,
    ) -> Result<JobAnswer> {
        let tenant = caller.tenant();
        let key = keyed(request, tenant, None)?;
        self.touches(&caller, job_id(&id)?).await?;
        let request_id = Current::get().request_id;
        let made = self.0.service.retry_job(tenant, job_id(&id)?, request_id, key).await?;
        self.answer(&made.value, false, made.replayed).await
    }

    /// Remove an ended job
    #[oai(path = "/jobs/:id", method = "delete", operation_id = "deleteJob")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The job.
        id: Path<String>,
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), job_id(&id)?);
        let key = keyed(request, tenant, None)?;
        self.touches(&caller, id).await?;
        let replayed = self.0.service.delete_job(tenant, id, key).await?;
        Ok(Gone::of(id, replayed))
    }
}

const STATUSES: [(&str, JobStatus); 5] = [
    ("pending", JobStatus::Pending),
    ("running", JobStatus::Running),
    ("completed", JobStatus::Completed),
    ("failed", JobStatus::Failed),
    ("canceled", JobStatus::Canceled),
];

fn named_agents(text: Option<&str>) -> std::result::Result<Vec<domain::AgentId>, Problem> {
    let ids = text.into_iter().flat_map(|text| text.split(','));
    ids.map(|id| {
        id.parse().map_err(|_| Problem::field("agent_id", "must be one or more ids of agents"))
    })
    .collect()
}

impl JobsApi {
    /// The agents whose jobs are wanted: of a key for certain agents never others.
    fn agents(
        &self,
        caller: &Caller,
        text: Option<&str>,
    ) -> std::result::Result<Vec<domain::AgentId>, Problem> {
        let (named, own) = (named_agents(text)?, caller.identity().agent_ids());
        match (named.is_empty(), own.is_empty()) {
            (_, true) => Ok(named),
            (true, false) => Ok(own.to_vec()),
            (false, false) => match named.iter().find(|id| !own.contains(id)) {
                Some(id) => Err(Rejection::AgentNotFound(*id).into()),
                None => Ok(named),
            },
        }
    }

    /// A key for certain agents sees no other's jobs: they are not there.
    async fn touches(&self, caller: &Caller, id: JobId) -> Result<()> {
        if caller.identity().agent_ids().is_empty() {
            return Ok(());
        }
        let job = self.0.service.job(caller.tenant(), id, None).await?;
        match caller.identity().may_touch(job.agent_id) {
            true => Ok(()),
            false => Err(Rejection::JobNotFound(id).into()),
        }
    }

    async fn answer(&self, job: &Job, with_input: bool, is_replay: bool) -> Result<JobAnswer> {
        let retry_after = (!job.status.is_final()).then_some(1);
        let texts = self.0.service.job_texts(job, with_input, OUTPUT_BYTES_MAX as u64).await?;
        let body = Json(Success::of(JobBody::of(job, &texts)));
        Ok(JobAnswer::Ok(body, retry_after, replayed(is_replay)))
    }
}
