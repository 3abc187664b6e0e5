//! Query parameters of lists: what typed parameters can't say.

use std::collections::BTreeMap;

use domain::Timestamp;
use poem::Request;

use crate::error::Problem;

/// Items of a page, unless `limit` says otherwise.
pub(crate) const LIMIT: u32 = 20;

/// The first value of a parameter.
pub(crate) fn value(request: &Request, name: &str) -> Option<String> {
    let query = request.uri().query().unwrap_or_default();
    pairs(query).find(|(given, _)| given == name).map(|(_, value)| value)
}

/// `metadata[key]=value` parameters.
pub(crate) fn metadata(request: &Request) -> BTreeMap<String, String> {
    let query = request.uri().query().unwrap_or_default();
    pairs(query)
        .filter_map(|(name, value)| {
            let key = name.strip_prefix("metadata[")?.strip_suffix(']')?;
            Some((key.to_owned(), value))
        })
        .collect()
}

/// Decoded pairs of a query.
fn pairs(query: &str) -> impl Iterator<Item = (String, String)> + '_ {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    })
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let hex = |byte: Option<u8>| byte.and_then(|b| char::from(b).to_digit(16));
                let mut ahead = rest.clone();
                match (hex(ahead.next()), hex(ahead.next())) {
                    (Some(high), Some(low)) => {
                        bytes.push(u8::try_from(high * 16 + low).unwrap_or(b'?'));
                        rest = ahead;
                    }
                    _ => bytes.push(b'%'),
                }
            }
            other => bytes.push(other),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A point in time of a parameter.
pub(crate) fn time(name: &str, value: Option<String>) -> Result<Option<Timestamp>, Problem> {
    let Some(text) = value else { return Ok(None) };
    let seconds =
        text.parse::<u64>().ok().map(|secs| Timestamp::from_millis(secs.saturating_mul(1000)));
    match seconds.or_else(|| text.parse().ok()) {
        Some(at) => Ok(Some(at)),
        None => {
            Err(Problem::field(name, "must be an RFC 3339 timestamp such as 2026-01-31T12:00:00Z"))
        }
    }
}

/// A comma list of words, each of which must be known.
pub(crate) fn words<T>(
    name: &str,
    value: Option<&str>,
    known: &[(&str, T)],
) -> Result<Vec<T>, Problem>
where
    T: Copy,
{
    let Some(text) = value else { return Ok(vec![]) };
    text.split(',')
        .map(|word| {
            let word = word.trim();
            known.iter().find(|(name, _)| *name == word).map(|(_, value)| *value).ok_or_else(|| {
                let words: Vec<_> = known.iter().map(|(name, _)| *name).collect();
                Problem::field(name, format!("must be one or more of {}", words.join(", ")))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let all: Vec<_> = pairs("metadata%5Bteam%5D=a+b&x=%C3%A4&bad=%zz&&y").collect();
        let text = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            all,
            [text("metadata[team]", "a b"), text("x", "ä"), text("bad", "%zz"), text("y", "")]
        );
    }
}
