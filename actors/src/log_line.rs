//! From what a process writes to a line with a level.
//!
//! JSON objects are read: `level`/`severity`, `msg`/`message`, `time`/`timestamp`, `request_id` and
//! `job_id` have their places, the rest become fields. Any other line is `info` on standard output
//! and `error` on standard error. A line above [`LINE_BYTES_MAX`] is split.

use domain::{InstanceId, Timestamp};
use serde_json::{Map, Value};

use crate::ports::{Channel, LogLine};

/// Longest line (`decisions` §14).
pub const LINE_BYTES_MAX: usize = 16 * 1024;

/// Who wrote a line.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// The instance.
    pub instance_id: InstanceId,
    /// Its version.
    pub version: u64,
}

/// Reads one line of a process.
pub fn read(text: &str, channel: Channel, writer: Writer, now: Timestamp) -> LogLine {
    let level = if channel == Channel::Stderr { "error" } else { "info" };
    let mut line = plain(now, channel, level, text.to_owned());
    line.instance_id = Some(writer.instance_id);
    line.version = Some(writer.version);
    if let Some(object) = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten() {
        structured(&mut line, object);
    }
    line
}

/// A line of our own.
pub fn plain(at: Timestamp, channel: Channel, level: &str, message: String) -> LogLine {
    LogLine {
        sequence: 0,
        at,
        level: level.to_owned(),
        message,
        channel,
        instance_id: None,
        version: None,
        deployment_id: None,
        request_id: None,
        job_id: None,
        fields: String::new(),
    }
}

fn structured(line: &mut LogLine, mut object: Map<String, Value>) {
    if let Some(level) =
        take_text(&mut object, &["level", "severity", "lvl"]).as_deref().and_then(known_level)
    {
        level.clone_into(&mut line.level);
    }
    if let Some(message) = take_text(&mut object, &["message", "msg"]) {
        line.message = message;
    }
    let time = take_text(&mut object, &["timestamp", "time", "ts"]);
    if let Some(at) = time.and_then(|text| text.parse().ok()) {
        line.at = at;
    }
    line.request_id = take_text(&mut object, &["request_id"]);
    line.job_id = take_text(&mut object, &["job_id"]);
    if !object.is_empty() {
        line.fields = Value::Object(object).to_string();
    }
}

fn take_text(object: &mut Map<String, Value>, names: &[&str]) -> Option<String> {
    let name = names.iter().find(|name| object.get(**name).is_some_and(Value::is_string))?;
    match object.remove(*name) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    }
}

fn known_level(word: &str) -> Option<&'static str> {
    match word.to_ascii_lowercase().as_str() {
        "trace" | "debug" => Some("debug"),
        "info" | "notice" => Some("info"),
        "warn" | "warning" => Some("warn"),
        "error" | "err" | "fatal" | "critical" | "panic" => Some("error"),
        _ => None,
    }
}

/// Splits text that is too long for one line, at characters.
pub fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut end = rest.len().min(LINE_BYTES_MAX);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        let (line, after) = rest.split_at(end);
        rest = after;
        Some(line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str, channel: Channel) -> LogLine {
        let writer = Writer { instance_id: InstanceId(1), version: 2 };
        read(text, channel, writer, Timestamp::from_millis(5))
    }

    #[test]
    fn plain_lines_take_their_level_from_the_channel() {
        assert_eq!(line("hello", Channel::Stdout).level, "info");
        assert_eq!(line("oops", Channel::Stderr).level, "error");
        assert_eq!(line("{not json", Channel::Stdout).message, "{not json");
    }

    #[test]
    fn json_lines_are_read() {
        let text = r#"{"level":"WARNING","msg":"slow","time":"2026-01-01T00:00:00Z","ms":7,"request_id":"req_1"}"#;
        let line = line(text, Channel::Stdout);
        assert_eq!((line.level.as_str(), line.message.as_str()), ("warn", "slow"));
        assert_eq!(line.at.to_string(), "2026-01-01T00:00:00.000Z");
        assert_eq!(line.request_id.as_deref(), Some("req_1"));
        assert_eq!(line.fields, r#"{"ms":7}"#);
    }

    #[test]
    fn long_lines_are_split_between_characters() {
        let text = "ä".repeat(LINE_BYTES_MAX);
        let parts: Vec<_> = split(&text).collect();
        assert_eq!(parts.len(), 2);
        assert_eq!(parts.concat(), text);
    }
}
