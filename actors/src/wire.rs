//! What passes between the platform and an agent's process (`decisions` §5, §21): the body of a
//! call, and the three forms of an answer — JSON, server-sent events, or plain chunks of text.

use std::collections::BTreeMap;

use domain::{AgentId, JobId, RequestId, Timestamp, job::Usage};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

/// What the agent is told beside the input.
#[derive(Clone, Debug, Serialize)]
pub struct Context {
    /// The request, as in our answer's `meta`.
    pub request_id: RequestId,
    /// The job, if this is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    /// 1, 2, …
    pub attempt: u32,
    /// Fences late results of lost owners.
    pub epoch: u64,
    /// When the platform gives up.
    pub deadline: String,
    /// The agent.
    pub agent_id: AgentId,
    /// Its version.
    pub version: u64,
    /// Live or test.
    pub livemode: bool,
    /// The client's own notes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// The body of `POST {invoke}`.
pub fn request_body(input: &RawValue, context: &Context) -> Vec<u8> {
    #[derive(Serialize)]
    struct Body<'b> {
        input: &'b RawValue,
        context: &'b Context,
    }
    serde_json::to_vec(&Body { input, context }).expect("a context has only plain fields")
}

/// An agent's answer, read.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The result.
    pub output: Value,
    /// Tokens the agent says it used.
    pub tokens: u64,
}

/// Reads a JSON answer: `{output, usage?}`, or anything else taken whole.
pub fn read_json(bytes: &[u8]) -> Result<Answer, serde_json::Error> {
    let mut value: Value = serde_json::from_slice(bytes)?;
    if value.get("output").is_none() {
        return Ok(Answer { output: value, tokens: 0 });
    }
    let tokens = value.get("usage").map_or(0, tokens);
    Ok(Answer { output: value["output"].take(), tokens })
}

/// Tokens of a usage object, by any of their usual names.
fn tokens(usage: &Value) -> u64 {
    ["tokens_used", "tokens", "total_tokens"]
        .iter()
        .find_map(|name| usage.get(name).and_then(Value::as_u64))
        .unwrap_or_default()
}

/// One event of a stream, in our own words.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    /// The next piece of text.
    Chunk(String),
    /// Something of the agent's own.
    Custom {
        /// What it is called.
        name: String,
        /// What it carries.
        data: Value,
    },
    /// The end, with tokens used.
    Done(u64),
    /// The agent says that it failed.
    Failed {
        /// Its code.
        code: String,
        /// Its words.
        message: String,
    },
}

/// The most bytes of one event.
pub const EVENT_BYTES_MAX: usize = 1024 * 1024;

/// Reads server-sent events from bytes as they come (HTML standard, section 9.2).
#[derive(Default)]
pub struct EventReader {
    buffer: Vec<u8>,
    scanned: usize,
    data: Vec<u8>,
}

/// An event that is too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the agent's stream is longer than {EVENT_BYTES_MAX} bytes")]
pub struct EventTooLarge;

impl EventReader {
    /// Takes bytes; gives the data of the events that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, EventTooLarge> {
        self.buffer.extend_from_slice(bytes);
        let mut events = vec![];
        let mut from = 0;
        while let Some(length) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n')
        {
            let end = self.scanned + length;
            let line =
                self.buffer[from..end].strip_suffix(b"\r").unwrap_or(&self.buffer[from..end]);
            if line.is_empty() {
                if !self.data.is_empty() {
                    let data = std::mem::take(&mut self.data);
                    events.push(String::from_utf8_lossy(&data).into_owned());
                }
            } else if let Some(value) = line.strip_prefix(b"data:") {
                if !self.data.is_empty() {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            }
            from = end + 1;
            self.scanned = from;
        }
        self.buffer.drain(..from);
        self.scanned = self.buffer.len();
        if self.buffer.len() + self.data.len() > EVENT_BYTES_MAX {
            return Err(EventTooLarge);
        }
        Ok(events)
    }
}

/// What one event of the agent means.
pub fn read_event(data: &str) -> StreamEvent {
    #[derive(Deserialize)]
    struct Event {
        #[serde(rename = "type")]
        kind: Option<String>,
        content: Option<String>,
        usage: Option<Value>,
        code: Option<String>,
        message: Option<String>,
        name: Option<String>,
        data: Option<Value>,
    }
    let Ok(event) = serde_json::from_str::<Event>(data) else {
        return StreamEvent::Chunk(data.to_owned());
    };
    match event.kind.as_deref() {
        Some("chunk") => StreamEvent::Chunk(event.content.unwrap_or_default()),
        Some("done") => StreamEvent::Done(event.usage.as_ref().map_or(0, tokens)),
        Some("error") => StreamEvent::Failed {
            code: event.code.unwrap_or_else(|| "AGENT_ERROR".to_owned()),
            message: event.message.unwrap_or_else(|| "the agent reported an error".to_owned()),
        },
        Some("custom") => StreamEvent::Custom {
            name: event.name.unwrap_or_default(),
            data: event.data.unwrap_or_default(),
        },
        // The platform makes its own start.
        Some("start") => StreamEvent::Chunk(String::new()),
        _ => StreamEvent::Chunk(data.to_owned()),
    }
}

/// Text of an output for a stream: a string as it is, anything else as JSON.
pub fn as_text(output: &Value) -> String {
    output.as_str().map_or_else(|| output.to_string(), str::to_owned)
}

/// What an invocation used.
pub fn usage(tokens: u64, elapsed: std::time::Duration) -> Usage {
    Usage {
        tokens_used: tokens,
        compute_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
    }
}

/// A deadline, written down.
pub fn deadline(now: Timestamp, timeout: std::time::Duration) -> String {
    now.plus(timeout).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_however_the_bytes_are_cut() {
        let text = b"data: {\"type\":\"chunk\",\"content\":\"a\"}\r\n\r\n: beat\n\ndata: one\ndata: two\n\nid: 7\ndata:x\n\n";
        let whole = EventReader::default().push(text).expect("small");
        assert_eq!(whole, ["{\"type\":\"chunk\",\"content\":\"a\"}", "one\ntwo", "x"]);
        let mut reader = EventReader::default();
        let cut: Vec<_> =
            text.iter().flat_map(|byte| reader.push(&[*byte]).expect("small")).collect();
        assert_eq!(cut, whole);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut reader = EventReader::default();
        assert_eq!(reader.push(&vec![b'x'; EVENT_BYTES_MAX + 1]), Err(EventTooLarge));
    }

    #[test]
    fn any_json_is_an_output() {
        let read = |text: &str| read_json(text.as_bytes()).expect("json");
        assert_eq!(read(r#"{"output":1,"usage":{"tokens":9}}"#).tokens, 9);
        assert_eq!(read(r#"{"answer":1}"#).output, serde_json::json!({"answer": 1}));
        assert_eq!(read("null").output, Value::Null);
        assert!(read_json(b"<html>").is_err());
    }
}
