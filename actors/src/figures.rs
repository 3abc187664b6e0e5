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
/// Agents that are remembered at most.
const AGENTS_MAX: usize = 10_000;

/// What the others said, and when they were asked.
#[derive(Default)]
pub struct Elsewhere(Mutex<HashMap<AgentId, (Instant, Vec<Figures>)>>);

impl Elsewhere {
    fn known(&self) -> MutexGuard<'_, HashMap<AgentId, (Instant, Vec<Figures>)>> {
        lock(&self.0)
    }

    /// What still counts, and the agents that have to be asked for.
    pub fn split(&self, agents: &[AgentId]) -> (Vec<Figures>, Vec<AgentId>) {
        let (known, mut figures, mut unknown) = (self.known(), vec![], vec![]);
        for agent in agents {
            match known.get(agent).filter(|(asked, _)| asked.elapsed() < GOOD_FOR) {
                Some((_, said)) => figures.extend(said.iter().cloned()),
                None => unknown.push(*agent),
            }
        }
        (figures, unknown)
    }

    /// Remembers what the others said of these agents, who were asked at this moment.
    pub fn keep(&self, asked: Instant, agents: &[AgentId], said: &[Figures]) {
        let mut known = self.known();
        if known.len() + agents.len() > AGENTS_MAX {
            known.retain(|_, (asked, _)| asked.elapsed() < GOOD_FOR);
        }
        for agent in agents.iter().take(AGENTS_MAX.saturating_sub(known.len())) {
            let of_it = said.iter().filter(|one| one.agent == *agent).cloned().collect();
            known.insert(*agent, (asked, of_it));
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
