//! From the replicas that a group has to the replicas that it should have, one step at a time. The
//! group's own leader takes the steps: learners first, voters once they have caught up, nobody
//! leaves before a replacement is in, and never do those vote alone of whom a majority does not answer.

use std::collections::{BTreeMap, BTreeSet};

use domain::planted::{self, Bug};

/// How far behind a replica may be to be handed the leadership.
pub const LEADS_WITHIN: u64 = 100;

/// What a group's replicas should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Those who vote.
    pub voters: BTreeSet<u64>,
    /// Those who only listen.
    pub learners: BTreeSet<u64>,
    /// Who should lead, if it matters; several in order of preference.
    pub leaders: Vec<u64>,
}

/// What they are, as the leader sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// The leader.
    pub me: u64,
    /// Those who vote.
    pub voters: BTreeSet<u64>,
    /// Those who only listen.
    pub learners: BTreeSet<u64>,
    /// A change of these is not committed yet.
    pub in_flux: bool,
    /// A change of voters that was begun and not ended, such as by a leader that died in between: who is
    /// to vote then. Until it is ended, a majority of the old and one of the new voters must agree.
    pub half_way: Option<BTreeSet<u64>>,
    /// How many entries each replica lacks; those that do not answer are missing.
    pub behind: BTreeMap<u64, u64>,
    /// How many it may lack to count as caught up.
    pub trailing: u64,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Somebody starts to listen.
    AddLearner(u64),
    /// These vote from now on; whoever does not any more listens.
    SetVoters(BTreeSet<u64>),
    /// Somebody who listens stops.
    Drop(BTreeSet<u64>),
    /// Somebody else leads.
    Transfer(u64),
}

/// The next step, if there is one.
pub fn next_step(present: &Present, wanted: &Wanted) -> Option<Step> {
    if present.in_flux {
        return None;
    }
    if let Some(voters) = &present.half_way {
        if planted::has(Bug::ChangeHalfWay) {
            return None;
        }
        return match voters.contains(&present.me) {
            true => Some(Step::SetVoters(voters.clone())),
            false => heir(present, voters, wanted).map(Step::Transfer),
        };
    }
    if wanted.voters.is_empty() {
        return None;
    }
    let all: BTreeSet<u64> = wanted.voters.union(&wanted.learners).copied().collect();
    let here: BTreeSet<u64> = present.voters.union(&present.learners).copied().collect();
    if let Some(missing) = all.difference(&here).next() {
        return Some(Step::AddLearner(*missing));
    }
    let voters = next_voters(present, wanted);
    let leaving = !voters.contains(&present.me);
    if leaving && !planted::has(Bug::LeaderLeavesFirst) {
        // Somebody who votes already must be there to take over.
        let all: BTreeSet<u64> = voters.union(&present.voters).copied().collect();
        let grown = (all != present.voters).then_some(Step::SetVoters(all));
        return grown.or_else(|| heir(present, &voters, wanted).map(Step::Transfer));
    }
    if voters != present.voters {
        return present.can_agree(&voters).then_some(Step::SetVoters(voters));
    }
    let idle: BTreeSet<u64> = present.learners.difference(&all).copied().collect();
    if !idle.is_empty() {
        return Some(Step::Drop(idle));
    }
    let preferred = wanted.leaders.iter().find(|id| present.can_lead(**id))?;
    let better = *preferred != present.me;
    better.then_some(Step::Transfer(*preferred))
}

/// Wanted ones vote once they have caught up; the others go when all wanted ones vote.
fn next_voters(present: &Present, wanted: &Wanted) -> BTreeSet<u64> {
    let fit = |id: &u64| present.voters.contains(id) || present.has_caught_up(*id);
    let ready: BTreeSet<u64> = wanted.voters.iter().copied().filter(fit).collect();
    if ready == wanted.voters {
        return ready;
    }
    ready.union(&present.voters).copied().collect()
}

fn heir(present: &Present, voters: &BTreeSet<u64>, wanted: &Wanted) -> Option<u64> {
    let can = |id: &&u64| **id != present.me && voters.contains(id) && present.can_lead(**id);
    wanted.leaders.iter().find(can).or_else(|| voters.iter().find(can)).copied()
}

impl Present {
    fn has_caught_up(&self, id: u64) -> bool {
        self.behind.get(&id).is_some_and(|behind| *behind <= self.trailing)
    }

    /// Whether a majority of these answers.
    fn can_agree(&self, voters: &BTreeSet<u64>) -> bool {
        let answer = |id: &&u64| **id == self.me || self.behind.contains_key(id);
        voters.iter().filter(answer).count() * 2 > voters.len()
    }

    /// A transfer to one that is not there leaves the group without a leader for a while.
    fn can_lead(&self, id: u64) -> bool {
        let is_near = || self.behind.get(&id).is_some_and(|behind| *behind <= LEADS_WITHIN);
        self.voters.contains(&id) && (id == self.me || is_near())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(ids: &[u64]) -> BTreeSet<u64> {
        ids.iter().copied().collect()
    }

    fn wanted(voters: &[u64], learners: &[u64]) -> Wanted {
        Wanted { voters: set(voters), learners: set(learners), leaders: vec![] }
    }

    /// A group that does as it is told, at once.
    fn obey(present: &mut Present, step: &Step) {
        match step {
            Step::AddLearner(id) => {
                present.learners.insert(*id);
                present.behind.insert(*id, 0);
            }
            Step::SetVoters(voters) => {
                let out: Vec<u64> = present.voters.difference(voters).copied().collect();
                present.learners.extend(out);
                present.learners.retain(|id| !voters.contains(id));
                present.voters.clone_from(voters);
                present.half_way = None;
            }
            Step::Drop(ids) => present.learners.retain(|id| !ids.contains(id)),
            Step::Transfer(id) => present.me = *id,
        }
    }

    fn alone() -> Present {
        let behind = BTreeMap::from([(1, 0)]);
        Present { me: 1, voters: set(&[1]), behind, trailing: 1000, ..Present::default() }
    }

    #[test]
    fn a_cluster_grows_learners_first() {
        let mut present = alone();
        let mut said = vec![];
        while let Some(step) = next_step(&present, &wanted(&[1, 2, 3], &[4])) {
            obey(&mut present, &step);
            said.push(step);
        }
        let steps = [
            Step::AddLearner(2),
            Step::AddLearner(3),
            Step::AddLearner(4),
            Step::SetVoters(set(&[1, 2, 3])),
        ];
        assert_eq!(said, steps);
    }

    #[test]
    fn one_that_has_not_caught_up_does_not_vote() {
        let mut present = alone();
        present.learners = set(&[2, 3]);
        present.behind.extend([(2, 5000), (3, 10)]);
        let step = next_step(&present, &wanted(&[1, 2, 3], &[]));
        assert_eq!(step, Some(Step::SetVoters(set(&[1, 3]))));
        present.voters = set(&[1, 3]);
        present.learners = set(&[2]);
        assert_eq!(next_step(&present, &wanted(&[1, 2, 3], &[])), None, "it waits");
    }

    #[test]
    fn nobody_leaves_before_a_replacement_is_in() {
        let mut present = alone();
        present.voters = set(&[1, 2, 3]);
        present.behind.extend([(2, 0)]);
        let now = wanted(&[1, 2, 4], &[]);
        assert_eq!(next_step(&present, &now), Some(Step::AddLearner(4)));
        present.learners = set(&[4]);
        assert_eq!(next_step(&present, &now), None, "4 has not caught up, so 3 stays");
        present.behind.insert(4, 0);
        assert_eq!(next_step(&present, &now), Some(Step::SetVoters(set(&[1, 2, 4]))));
    }

    #[test]
    fn nobody_leaves_who_is_needed_for_a_majority() {
        let mut present = alone();
        present.voters = set(&[1, 2, 3]);
        present.behind.extend([(2, 0)]);
        assert_eq!(next_step(&present, &wanted(&[1, 3], &[])), None, "3 does not answer");
        present.behind.extend([(3, 0)]);
        let step = next_step(&present, &wanted(&[1, 3], &[]));
        assert_eq!(step, Some(Step::SetVoters(set(&[1, 3]))));
    }

    #[test]
    fn a_leader_that_leaves_hands_over_first() {
        let mut present = alone();
        present.voters = set(&[1, 2, 3]);
        present.behind.extend([(2, 0), (3, 0)]);
        let mut said = vec![];
        while let Some(step) = next_step(&present, &wanted(&[2, 3], &[])) {
            obey(&mut present, &step);
            said.push(step);
        }
        let steps = [Step::Transfer(2), Step::SetVoters(set(&[2, 3])), Step::Drop(set(&[1]))];
        assert_eq!(said, steps);
    }

    #[test]
    fn a_change_that_another_leader_began_is_ended() {
        let mut present = alone();
        present.voters = set(&[1, 2, 3, 4]);
        present.half_way = Some(set(&[2, 3, 4]));
        present.behind.extend([(3, 0)]);
        let mut said = vec![];
        while let Some(step) = next_step(&present, &wanted(&[2, 3, 4], &[])) {
            obey(&mut present, &step);
            said.push(step);
        }
        let steps = [Step::Transfer(3), Step::SetVoters(set(&[2, 3, 4])), Step::Drop(set(&[1]))];
        assert_eq!(said, steps);
    }

    proptest! {
        /// Whatever is wanted is reached, and a majority of the old voters is never thrown away
        /// for replicas that have not caught up.
        #[test]
        fn what_is_wanted_is_reached(
            voters in prop::collection::btree_set(1_u64..9, 1..6),
            learners in prop::collection::btree_set(1_u64..9, 0..4),
            goal in prop::collection::btree_set(1_u64..9, 1..6),
            begun in prop::collection::btree_set(1_u64..9, 0..6),
        ) {
            let me = *voters.first().expect("one at least");
            let learners: BTreeSet<u64> = learners.difference(&voters).copied().collect();
            let behind = voters.union(&learners).map(|id| (*id, 0)).collect();
            let begun: BTreeSet<u64> = begun.intersection(&voters).copied().collect();
            let half_way = (!begun.is_empty()).then_some(begun);
            let in_flux = false;
            let mut present =
                Present { me, voters, learners, in_flux, half_way, behind, trailing: 0 };
            let wanted = Wanted { voters: goal, ..Wanted::default() };
            for _ in 0..40 {
                let Some(step) = next_step(&present, &wanted) else { break };
                if let Step::SetVoters(next) = &step {
                    let fit = |id: &u64| present.voters.contains(id) || present.has_caught_up(*id);
                    prop_assert!(next.iter().all(fit), "only those who have caught up vote");
                    prop_assert!(next.contains(&present.me), "a leader stays a voter");
                }
                obey(&mut present, &step);
            }
            prop_assert_eq!(&present.voters, &wanted.voters);
            prop_assert!(present.learners.is_empty());
        }
    }
}
