//! Calls of the last minute, by whoever makes them and by second: in memory alone, at the one node that counts
//! for this subject, so more nodes allow nobody more.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Display,
    hash::Hash,
    sync::Mutex,
    time::Duration,
};

use domain::Timestamp;

use crate::{
    ask::{Ask, Told},
    limiter::{Admission, Standing},
    root::lock,
    world::World,
};

/// Subjects remembered at most; the quietest go first.
const SUBJECTS_MAX: usize = 10_000;
const MINUTE: u64 = 60;
/// How long a refusal is repeated without asking again.
const REFUSED_FOR: Duration = Duration::from_secs(1);
/// How long another node may take to count a call.
const COUNTED_WITHIN: Duration = Duration::from_secs(1);

/// What is counted, and what was refused a moment ago.
pub struct Minutes<S> {
    counted: Mutex<HashMap<S, BTreeMap<u64, u64>>>,
    refused: Mutex<HashMap<S, (Timestamp, Standing)>>,
}

impl<S> Default for Minutes<S> {
    fn default() -> Self {
        Self { counted: Mutex::default(), refused: Mutex::default() }
    }
}

impl<S: Copy + Eq + Hash> Minutes<S> {
    /// Counts a call. Where too many call at once to remember each, the others share the budget of `crowd`.
    pub fn admit(&self, mut subject: S, crowd: S, most: u64, now: Timestamp) -> Admission {
        let now = now.seconds();
        let mut counted = lock(&self.counted);
        if counted.len() >= SUBJECTS_MAX && !counted.contains_key(&subject) {
            let is_quiet = |seconds: &BTreeMap<u64, u64>| {
                seconds.keys().next_back().is_none_or(|last| last + MINUTE <= now)
            };
            let quiet = counted.iter().find(|(_, seconds)| is_quiet(seconds)).map(|(one, _)| *one);
            match quiet {
                Some(quiet) => drop(counted.remove(&quiet)),
                None => subject = crowd,
            }
        }
        let seconds = counted.entry(subject).or_default();
        seconds.retain(|second, _| *second + MINUTE > now);
        let used: u64 = seconds.values().sum();
        let oldest = seconds.keys().next().copied().unwrap_or(now);
        let standing =
            |remaining| Standing { limit: most, remaining, reset: oldest + MINUTE, is_day: false };
        if used >= most {
            return Admission::Refused(standing(0));
        }
        *seconds.entry(now).or_default() += 1;
        Admission::Allowed(standing(most - used - 1))
    }

    /// Where a subject stands as far as this node knows, without counting a call.
    pub fn standing(&self, subject: Option<S>, limit: u64, now: Timestamp) -> Standing {
        let now = now.seconds();
        let counted = lock(&self.counted);
        let seconds = subject.and_then(|subject| counted.get(&subject));
        let sum = |seconds: &BTreeMap<u64, u64>| -> u64 {
            seconds.iter().filter(|(at, _)| **at + MINUTE > now).map(|(_, calls)| *calls).sum()
        };
        let remaining = limit.saturating_sub(seconds.map_or(0, sum));
        Standing { limit, remaining, reset: now + MINUTE, is_day: false }
    }

    /// A refusal of a moment ago.
    fn refused(&self, subject: S, now: Timestamp) -> Option<Standing> {
        let refused = lock(&self.refused);
        let (at, standing) = refused.get(&subject)?;
        (now.since(*at) < REFUSED_FOR).then_some(*standing)
    }

    /// Remembers what came of a question.
    fn note(&self, subject: S, admission: Admission, now: Timestamp) {
        let Admission::Refused(standing) = admission else { return };
        let mut refused = lock(&self.refused);
        if refused.len() >= SUBJECTS_MAX {
            refused.clear();
        }
        refused.insert(subject, (now, standing));
    }
}

impl World {
    /// Counts a call at the one node that counts for this subject of its kind, by asking it; here, if that is
    /// this node or one that is silent. Where limits are off nobody is refused.
    pub(crate) async fn count<S: Copy + Eq + Hash + Display>(
        &self,
        minutes: &Minutes<S>,
        (kind, subject): (&str, S),
        ask: Ask,
        here: impl FnOnce() -> Admission,
    ) -> Admission {
        let admission = match minutes.refused(subject, self.now()) {
            Some(standing) => Admission::Refused(standing),
            None => {
                let admission = self.counted(&format!("{kind} {subject}"), ask).await;
                let admission = admission.unwrap_or_else(here);
                minutes.note(subject, admission, self.now());
                admission
            }
        };
        match admission {
            Admission::Refused(standing) if !self.settings.rates.enabled => {
                Admission::Allowed(standing)
            }
            admission @ (Admission::Allowed(_) | Admission::Refused(_) | Admission::Unknown(_)) => {
                admission
            }
        }
    }

    /// What another node says that counts what has this name; `None` if this one does, or that one is silent.
    async fn counted(&self, name: &str, ask: Ask) -> Option<Admission> {
        let keeper = self.keeper(name.as_bytes())?;
        match self.ask_other(keeper, ask, COUNTED_WITHIN).await {
            Ok(Told::Counted(admission)) => Some(admission),
            Ok(_) | Err(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_minute_of_its_own() {
        let minutes = Minutes::default();
        let at = |seconds: u64| Timestamp::from_millis(1_700_000_000_000 + seconds * 1000);
        let allowed = |who: u8, seconds| {
            matches!(minutes.admit(who, 0, 2, at(seconds)), Admission::Allowed(_))
        };
        assert!(allowed(1, 0) && allowed(1, 10));
        assert!(!allowed(1, 20));
        assert!(allowed(2, 20));
        assert!(allowed(1, 60), "the first second left the window");
        assert!(!allowed(1, 61));
        assert_eq!(minutes.standing(Some(1), 2, at(61)).remaining, 0);
        assert_eq!(minutes.standing(Some(3), 2, at(61)).remaining, 2);
    }
}
