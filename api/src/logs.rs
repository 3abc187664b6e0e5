//! `GET /v1/agents/{id}/logs`: what an agent wrote, or writes.

use std::{collections::BTreeMap, time::Duration};

use actors::{
    call::Service,
    ports::{Channel, LogLine, LogQuery},
};
use domain::{AgentId, NodeId};
use futures::StreamExt as _;
use http::header;
use poem::{Request, web::sse::Event};
use poem_openapi::{
    ApiResponse, OpenApi, ResponseContent,
    param::{Path, Query},
    payload::Json,
    types::ToJSON as _,
};
use tokio::sync::broadcast::error::RecvError;

use crate::{
    Handle,
    agents::agent_id,
    body::log::{LogLineBody, LogPage},
    caller::Caller,
    envelope::Success,
    error::{ApiError, Problem},
    query,
    sse::Sse,
};

/// Between questions for new lines of other nodes, while somebody follows.
const OTHERS_ASKED_EVERY: Duration = Duration::from_millis(250);
/// Lines, unless `tail` says otherwise.
const TAIL: u32 = 100;
/// Lines that a resumed stream reads back at once; it goes on from there.
const RESUMED_LINES_MAX: usize = 5000;
/// Levels from the quietest on.
const LEVELS: [(&str, &str); 4] =
    [("debug", "debug"), ("info", "info"), ("warn", "warn"), ("error", "error")];
const CHANNELS: [(&str, Channel); 4] = [
    ("stdout", Channel::Stdout),
    ("stderr", Channel::Stderr),
    ("build", Channel::Build),
    ("system", Channel::System),
];

pub(crate) struct LogsApi(pub(crate) Handle);

/// Lines, whole or as they come.
#[derive(ResponseContent)]
pub(crate) enum LogContent {
    /// A page, oldest first.
    Json(Json<Success<LogPage>>),
    /// With `follow=true`: one event per line; `event: end` when the agent is deleted.
    Sse(Sse<LogLineBody>),
}

/// The answer to a look at logs.
#[derive(ApiResponse)]
pub(crate) enum LogAnswer {
    /// The lines.
    #[oai(status = 200)]
    Ok(LogContent),
}

/// A cursor of lines: the id of the last one.
pub(crate) fn after(cursor: Option<&str>) -> Result<Option<u64>, Problem> {
    let Some(text) = cursor else { return Ok(None) };
    text.parse().map(Some).map_err(|_| {
        let message = "this cursor is not valid here; use the next_cursor of a page of this log";
        Problem::new(http::StatusCode::BAD_REQUEST, "INVALID_CURSOR", message)
    })
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Agents")]
impl LogsApi {
    /// Retrieve or stream an agent's logs
    ///
    /// The last lines, oldest first; with `since` or `cursor` the first lines
    /// from there. With `follow=true` a stream that goes on with new lines; `Last-Event-ID` resumes it.
    #[oai(path = "/agents/:id/logs", method = "get", operation_id = "getAgentLogs")]
    #[expect(clippy::too_many_arguments, reason = "one argument per documented parameter")]
    async fn logs(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        /// Only lines after this time.
        since: Query<Option<String>>,
        /// Only lines before this time.
        until: Query<Option<String>>,
        /// At most this many lines, 0 to 5000; default 100.
        #[oai(validator(minimum(value = "0"), maximum(value = "5000")))]
        tail: Query<Option<u32>>,
        /// Go on with new lines.
        follow: Query<Option<bool>>,
        /// Only these levels: `debug`, `info`, `warn`, `error`.
        level: Query<Option<String>>,
        /// Only this level and louder ones.
        min_level: Query<Option<String>>,
        /// Only lines with this text.
        q: Query<Option<String>>,
        /// Only of this request.
        request_id: Query<Option<String>>,
        /// Only of this job.
        job_id: Query<Option<String>>,
        /// Only of this instance.
        instance_id: Query<Option<String>>,
        /// Only from `stdout`, `stderr`, `build` or `system`.
        stream: Query<Option<String>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
    ) -> Result<LogAnswer, ApiError> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let after = after(cursor.0.as_deref())?;
        let instance_id = instance_id.0.map(|text| {
            text.parse().map_err(|_| Problem::field("instance_id", "must be the id of an instance"))
        });
        let mut query = LogQuery {
            since: query::time("since", since.0)?,
            until: query::time("until", until.0)?,
            after,
            levels: levels(level.0.as_deref(), min_level.0.as_deref())?,
            channels: query::words("stream", stream.0.as_deref(), &CHANNELS)?,
            instance_id: instance_id.transpose()?,
            deployment_id: None,
            text: q.0,
            request_id: request_id.0,
            job_id: job_id.0,
            limit: tail.0.unwrap_or(TAIL) as usize,
            from_start: false,
        };
        query.from_start = query.since.is_some() || after.is_some();
        self.0.service.directory().await?.read().agent(tenant, id)?;
        let service = self.0.service.clone();
        if follow.0 == Some(true) {
            let resumed = request.headers().get("last-event-id");
            let resumed = resumed.and_then(|value| value.to_str().ok()?.parse().ok());
            return Ok(LogAnswer::Ok(LogContent::Sse(followed(service, id, query, resumed).await)));
        }
        if accepts_only_stream(request) {
            let why = "must be true with Accept: text/event-stream";
            return Err(Problem::field("follow", why).into());
        }
        let (lines, has_more) = self.0.service.logs(id, query).await;
        let items: Vec<_> = lines.iter().map(|(node, line)| LogLineBody::of(line, *node)).collect();
        let next_cursor = items.last().map(|line| line.id.clone());
        let page = LogPage { items, has_more, next_cursor };
        Ok(LogAnswer::Ok(LogContent::Json(Json(Success::of(page)))))
    }
}

fn accepts_only_stream(request: &Request) -> bool {
    let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    accept == Some("text/event-stream")
}

fn levels(exact: Option<&str>, least: Option<&str>) -> Result<Vec<String>, Problem> {
    let mut levels = query::words("level", exact, &LEVELS)?;
    if let Some(least) = least {
        let Some(place) = LEVELS.iter().position(|(name, _)| *name == least) else {
            return Err(Problem::field("min_level", "must be debug, info, warn or error"));
        };
        let louder: Vec<&str> = LEVELS[place..].iter().map(|(name, _)| *name).collect();
        levels = match levels.is_empty() {
            true => louder,
            false => levels.into_iter().filter(|level| louder.contains(level)).collect(),
        };
    }
    Ok(levels.into_iter().map(str::to_owned).collect())
}

/// Lines that are there, then lines as they come, each once.
async fn followed(
    service: Service,
    agent: AgentId,
    mut query: LogQuery,
    resumed: Option<u64>,
) -> Sse<LogLineBody> {
    let node = service.world.node_id;
    // Listening begins before reading, so that no line falls between the two.
    let receiver = service.world.ports.logs.follow(agent);
    if resumed.is_some() {
        query.after = resumed;
        query.from_start = true;
        query.limit = RESUMED_LINES_MAX;
    }
    let (lines, behind) = service.logs(agent, query.clone()).await;
    let last = lines.last().map(|(_, line)| line.sequence).or(resumed).unwrap_or_default();
    // What was shown of each node counts for that node alone: clocks differ.
    let mut marks: BTreeMap<NodeId, u64> = BTreeMap::new();
    for (node, line) in &lines {
        marks.insert(*node, line.sequence);
    }
    let behind = behind && query.from_start;
    let follow = Follow {
        last: marks.get(&node).copied().or(resumed).unwrap_or(if lines.is_empty() {
            0
        } else {
            last
        }),
        from: last,
        service,
        agent,
        query,
        receiver,
        marks,
        behind,
        ready: lines.into(),
    };
    let lines = futures::stream::unfold(follow, |mut follow| async move {
        let line = follow.next().await?;
        Some((line, follow))
    });
    let lines = lines.map(|(node, line)| {
        let line = LogLineBody::of(&line, node);
        Event::message(line.to_json_string()).id(line.id)
    });
    let end = futures::stream::once(async { Event::message("{}").event_type("end") });
    Sse::new(lines.chain(end))
}

struct Follow {
    service: Service,
    agent: AgentId,
    query: LogQuery,
    receiver: tokio::sync::broadcast::Receiver<LogLine>,
    /// The last line of this node that was seen.
    last: u64,
    /// From where the log of a node is read that has shown nothing yet.
    from: u64,
    /// The last line seen of each other node.
    marks: BTreeMap<NodeId, u64>,
    behind: bool,
    ready: std::collections::VecDeque<(NodeId, LogLine)>,
}

impl Follow {
    async fn next(&mut self) -> Option<(NodeId, LogLine)> {
        let here = self.service.world.node_id;
        loop {
            if let Some((node, line)) = self.ready.pop_front() {
                if node == here {
                    self.last = self.last.max(line.sequence);
                }
                return Some((node, line));
            }
            if self.behind {
                self.catch_up().await;
                continue;
            }
            let is_alone = self.service.world.others().is_empty();
            let heard = tokio::select! {
                heard = self.receiver.recv() => heard,
                () = tokio::time::sleep(OTHERS_ASKED_EVERY), if !is_alone => {
                    let (agent, from) = (self.agent, self.from);
                    let query = self.query.clone();
                    let lines = self.service.others_logs(agent, &query, from, &mut self.marks);
                    self.ready.extend(lines.await);
                    continue;
                }
            };
            match heard {
                Ok(line) if line.sequence > self.last && self.query.takes(&line) => {
                    self.ready.push_back((here, line));
                }
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => self.catch_up().await,
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// A reader that was too slow reads what it missed.
    async fn catch_up(&mut self) {
        let missed = LogQuery {
            after: Some(self.last),
            from_start: true,
            limit: RESUMED_LINES_MAX,
            ..self.query.clone()
        };
        let here = self.service.world.node_id;
        let (lines, behind) = self.service.world.ports.logs.read(self.agent, missed).await;
        self.behind = behind;
        self.ready.extend(lines.into_iter().map(|line| (here, line)));
    }
}
