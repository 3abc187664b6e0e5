//! Points in time, in milliseconds since 1970 UTC. This module cannot tell the time: it only writes
//! it down (RFC 3339, UTC, `Z`, three decimals) and reads it.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970-01-01T00:00:00Z.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The latest instant we write down: the end of the year 9999.
    pub const MAX: Self = Self(253_402_300_799_999);

    /// A point in time; later than the year 9999 is taken as its last millisecond.
    pub fn from_millis(millis: u64) -> Self {
        Self(millis.min(Self::MAX.0))
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> u64 {
        self.0
    }

    /// Whole seconds since 1970.
    pub fn seconds(self) -> u64 {
        self.0 / 1000
    }

    /// This much later.
    pub fn plus(self, duration: Duration) -> Self {
        Self::from_millis(
            self.0.saturating_add(duration.as_millis().try_into().unwrap_or(u64::MAX)),
        )
    }

    /// This much earlier.
    pub fn minus(self, duration: Duration) -> Self {
        let millis = duration.as_millis().try_into().unwrap_or(u64::MAX);
        Self::from_millis(self.0.saturating_sub(millis))
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = i64::try_from(self.0).unwrap_or(i64::MAX);
        match jiff::Timestamp::from_millisecond(millis) {
            Ok(instant) => write!(f, "{instant:.3}"),
            Err(_) => f.write_str("9999-12-31T23:59:59.999Z"),
        }
    }
}

/// A text that is not an RFC 3339 instant after 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an RFC 3339 timestamp such as 2026-01-31T12:00:00Z")]
pub struct NotATimestamp;

impl FromStr for Timestamp {
    type Err = NotATimestamp;

    fn from_str(text: &str) -> Result<Self, NotATimestamp> {
        let instant: jiff::Timestamp = match text.parse() {
            Ok(instant) => instant,
            Err(_) if is_last_of_all(text) => return Ok(Self::MAX),
            Err(_) => return Err(NotATimestamp),
        };
        let millis = u64::try_from(instant.as_millisecond()).map_err(|_| NotATimestamp)?;
        Ok(Self::from_millis(millis))
    }
}

/// The last two days that four digits can name are beyond the library's end of time.
fn is_last_of_all(text: &str) -> bool {
    let text = text.strip_suffix('Z').filter(|text| text.starts_with("9999-12-3"));
    text.is_some_and(|text| text.parse::<jiff::civil::DateTime>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_written_with_three_decimals_and_read_back() {
        for (millis, text) in
            [(0, "1970-01-01T00:00:00.000Z"), (1_700_000_000_120, "2023-11-14T22:13:20.120Z")]
        {
            assert_eq!(Timestamp::from_millis(millis).to_string(), text);
            assert_eq!(text.parse(), Ok(Timestamp::from_millis(millis)));
        }
        assert_eq!(Timestamp::MAX.to_string(), "9999-12-31T23:59:59.999Z");
        assert_eq!("9999-12-31T23:59:59.999Z".parse(), Ok(Timestamp::MAX));
        assert_eq!("9999-12-39T23:59:59Z".parse::<Timestamp>(), Err(NotATimestamp));
        assert_eq!("yesterday".parse::<Timestamp>(), Err(NotATimestamp));
    }
}
