//! Log lines on the wire.

use actors::ports::{Channel, LogLine};
use poem_openapi::{Object, types::Any};
use serde_json::{Value, json};

/// One line.
#[derive(Clone, Debug, Object)]
pub struct LogLineBody {
    /// Its place in the agent's log; give it as `cursor` to go on after it.
    pub id: String,
    /// When it was written.
    pub timestamp: String,
    /// `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// The text.
    pub message: String,
    /// `stdout`, `stderr`, `build` or `system`.
    pub stream: String,
    /// The instance that wrote it.
    pub instance_id: Option<String>,
    /// The node of that instance.
    pub node_id: Option<String>,
    /// The version that wrote it.
    pub version: Option<String>,
    /// The deployment whose build wrote it.
    pub deployment_id: Option<String>,
    /// The request it speaks of.
    pub request_id: Option<String>,
    /// The job it speaks of.
    pub job_id: Option<String>,
    /// Further fields of a JSON line.
    pub fields: Any<Value>,
}

/// The word for a channel.
pub fn word(channel: Channel) -> &'static str {
    match channel {
        Channel::Stdout => "stdout",
        Channel::Stderr => "stderr",
        Channel::Build => "build",
        Channel::System => "system",
    }
}

impl LogLineBody {
    /// A line that was written on `node`.
    pub fn of(line: &LogLine, node: domain::NodeId) -> Self {
        Self {
            id: line.sequence.to_string(),
            timestamp: line.at.to_string(),
            level: line.level.clone(),
            message: line.message.clone(),
            stream: word(line.channel).to_owned(),
            instance_id: line.instance_id.map(|id| id.to_string()),
            node_id: Some(node.to_string()),
            version: line.version.map(|number| number.to_string()),
            deployment_id: line.deployment_id.map(|id| id.to_string()),
            request_id: line.request_id.clone(),
            job_id: line.job_id.clone(),
            fields: Any(serde_json::from_str(&line.fields).unwrap_or_else(|_| json!({}))),
        }
    }
}

/// Lines, oldest first.
#[derive(Clone, Debug, Object)]
pub struct LogPage {
    /// The lines.
    pub items: Vec<LogLineBody>,
    /// Whether there are more.
    pub has_more: bool,
    /// The last line's id.
    pub next_cursor: Option<String>,
}
