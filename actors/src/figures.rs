//! What other nodes said last of their agents. A node asks for it at most every half second and agent, so that
//! reading an agent many times costs the others nothing.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use domain::AgentId;
use tokio::time::Instant;

use crate::{ask::Figures, root::lock};

/// How long what was said counts.
const GOOD_FOR: Duration = Duration::from_millis(500);
/// How long other nodes may take for what an object shows beside its record (`decisions` §4).
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_millis(250);
/// Agents that are remembered at most.
const AGENTS_MAX: usize = 10_000;

/// What the others said, by agent.
#[derive(Default)]
pub struct Elsewhere(Mutex<HashMap<AgentId, Known>>);

/// What they said of one agent.
struct Known {
    /// When they were asked for it.
    at: Instant,
    said: Vec<Figures>,
    /// When somebody began to ask them last.
    asked: Instant,
}

impl Known {
    /// Whether it counts: it is new, or somebody is asking for newer just now.
    fn counts(&self) -> bool {
        let is_asked_for = self.asked.elapsed() < ANSWERED_WITHIN;
        let age = self.at.elapsed();
        age < GOOD_FOR || is_asked_for && age < GOOD_FOR + ANSWERED_WITHIN
    }
}

impl Elsewhere {
    fn known(&self) -> MutexGuard<'_, HashMap<AgentId, Known>> {
        lock(&self.0)
    }

    /// What still counts, and the agents that have to be asked for. While somebody asks for newer, others take what
    /// was said before: many who come at once ask once.
    pub fn split(&self, agents: &[AgentId]) -> (Vec<Figures>, Vec<AgentId>) {
        let (mut known, mut figures, mut unknown) = (self.known(), vec![], vec![]);
        for agent in agents {
            match known.get_mut(agent) {
                Some(known) if known.counts() => figures.extend(known.said.iter().cloned()),
                Some(known) => {
                    known.asked = Instant::now();
                    unknown.push(*agent);
                }
                None => unknown.push(*agent),
            }
        }
        (figures, unknown)
    }

    /// Remembers what the others said of these agents, who were asked at this moment.
    pub fn keep(&self, asked: Instant, agents: &[AgentId], said: &[Figures]) {
        let mut known = self.known();
        if known.len() + agents.len() > AGENTS_MAX {
            known.retain(|_, known| known.at.elapsed() < GOOD_FOR);
        }
        for agent in agents.iter().take(AGENTS_MAX.saturating_sub(known.len())) {
            let of_it = said.iter().filter(|one| one.agent == *agent).cloned().collect();
            known.insert(*agent, Known { at: asked, said: of_it, asked });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::Totals;

    fn figures(agent: AgentId) -> Figures {
        Figures { agent, totals: Totals::default(), uptime: (1, 1), pulses: vec![], waiting: 0 }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_asked_twice_within_half_a_second() {
        let (elsewhere, one, other) = (Elsewhere::default(), AgentId(1), AgentId(2));
        assert_eq!(elsewhere.split(&[one, other]).1, [one, other]);
        elsewhere.keep(Instant::now(), &[one, other], &[figures(one), figures(one)]);
        let (said, unknown) = elsewhere.split(&[one, other]);
        assert_eq!((said.len(), unknown.len()), (2, 0), "nobody else has the other");
        tokio::time::advance(GOOD_FOR).await;
        let (said, unknown) = elsewhere.split(&[one]);
        assert_eq!((said.len(), unknown), (0, vec![one]));
        let (said, unknown) = elsewhere.split(&[one]);
        assert_eq!((said.len(), unknown.len()), (2, 0), "somebody is asking already");
        tokio::time::advance(ANSWERED_WITHIN).await;
        let (said, unknown) = elsewhere.split(&[one]);
        assert_eq!((said.len(), unknown), (0, vec![one]), "and got no answer");
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(elsewhere.split(&[one]).1, [one]);
        assert_eq!(elsewhere.split(&[one]).1, [one], "nobody is told what was true an hour ago");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_is_remembered_than_there_is_room_for() {
        let elsewhere = Elsewhere::default();
        let agents: Vec<AgentId> = (0..2 * AGENTS_MAX as u128).map(AgentId).collect();
        for some in agents.chunks(1000) {
            elsewhere.keep(Instant::now(), some, &[]);
        }
        assert_eq!(elsewhere.known().len(), AGENTS_MAX);
    }
}
