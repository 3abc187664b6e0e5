//! Where things live, as pure functions: a name has a home shard, a shard has its nodes. Every node
//! computes the same from the same directory, so there is nothing to agree on.

use std::collections::{BTreeMap, BTreeSet};

use domain::{
    autopilot::Autopilot,
    directory::Directory,
    node::{Node, NodeStatus},
};
use sha2::{Digest as _, Sha256};

use crate::raft::members::Wanted;

/// Replicas of a shard, where there are so many nodes.
pub const REPLICAS: usize = 3;
/// Voters of the directory at most; every other node listens.
pub const DIRECTORY_VOTERS_MAX: usize = 5;

/// The home shard of something with this name.
pub fn shard_of(name: &[u8], shards: u16) -> u16 {
    let first = hash(&[name]);
    u16::try_from(first % u64::from(shards.max(1))).unwrap_or_default()
}

fn hash(parts: &[&[u8]]) -> u64 {
    let mut digest = Sha256::new();
    parts.iter().for_each(|part| digest.update(part));
    let digest = digest.finalize();
    u64::from_be_bytes(std::array::from_fn(|byte| digest[byte]))
}

/// A node as placement sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Its number.
    pub raft_id: u64,
    /// Its redundancy zone.
    pub zone: String,
    /// Whether it may lead.
    pub may_lead: bool,
}

impl Spot {
    /// The members of a cluster that replicas are placed on, oldest first: those that are not known to
    /// be gone, and so many of the dead that a quorum is never made of too few.
    pub fn all(directory: &Directory) -> Vec<Self> {
        let autopilot = directory.autopilot().unwrap_or_default();
        Self::of(&counted(directory, &autopilot), &autopilot.redundancy_zone)
    }

    fn of(members: &[Node], zone_label: &str) -> Vec<Self> {
        let spot = |node: &Node| Self {
            raft_id: node.facts.raft_id,
            zone: node.zone(zone_label),
            may_lead: node.status == NodeStatus::Active,
        };
        members.iter().map(spot).collect()
    }
}

fn counted(directory: &Directory, autopilot: &Autopilot) -> Vec<Node> {
    let mut counted = directory.members();
    let dead = directory.nodes.rows().filter(|(_, node)| node.status == NodeStatus::Dead);
    let mut dead: Vec<Node> = dead.map(|(_, node)| Node::clone(node)).collect();
    dead.sort_by_key(|node| std::cmp::Reverse(node.since));
    let least = usize::try_from(autopilot.min_quorum).unwrap_or(usize::MAX);
    counted.extend(dead.into_iter().take(least.saturating_sub(counted.len())));
    counted.sort_by_key(|node| node.facts.id);
    counted
}

/// The replicas of the directory: an odd number of voters in as many zones as there are, and
/// everybody else listens. Two nodes both vote.
pub fn directory(spots: &[Spot]) -> Wanted {
    let voters = match spots.len() {
        few @ 0..=2 => few,
        more => more.min(DIRECTORY_VOTERS_MAX) - (1 - more.min(DIRECTORY_VOTERS_MAX) % 2),
    };
    let order: Vec<&Spot> = spots.iter().collect();
    let chosen = spread(&order, voters);
    let rest = spots.iter().map(|spot| spot.raft_id).filter(|id| !chosen.contains(id));
    Wanted { learners: rest.collect(), leaders: able(spots, &chosen), voters: chosen }
}

/// The replicas of every shard, evenly over nodes and zones, with one preferred leader each.
pub fn shards(spots: &[Spot], count: u16) -> Vec<Wanted> {
    let replicas = REPLICAS.min(spots.len());
    let slots = usize::from(count) * replicas;
    let most = slots.div_ceil(spots.len().max(1));
    let mut held: BTreeMap<u64, usize> = BTreeMap::new();
    let mut led: BTreeMap<u64, usize> = BTreeMap::new();
    (0..count)
        .map(|shard| {
            let order = by_liking(spots, shard);
            let (free, full): (Vec<&Spot>, Vec<&Spot>) = order
                .into_iter()
                .partition(|spot| held.get(&spot.raft_id).copied().unwrap_or(0) < most);
            let order: Vec<&Spot> = free.into_iter().chain(full).collect();
            let voters = spread(&order, replicas);
            voters.iter().for_each(|id| *held.entry(*id).or_default() += 1);
            let mut leaders: Vec<u64> = order
                .iter()
                .filter(|spot| spot.may_lead && voters.contains(&spot.raft_id))
                .map(|spot| spot.raft_id)
                .collect();
            leaders.sort_by_key(|id| led.get(id).copied().unwrap_or(0));
            if let Some(first) = leaders.first() {
                *led.entry(*first).or_default() += 1;
            }
            Wanted { voters, learners: BTreeSet::new(), leaders }
        })
        .collect()
}

/// Rendezvous hashing: a node that comes or goes moves little else.
fn by_liking(spots: &[Spot], shard: u16) -> Vec<&Spot> {
    let mut order: Vec<&Spot> = spots.iter().collect();
    order.sort_by_key(|spot| {
        std::cmp::Reverse(hash(&[&shard.to_be_bytes(), &spot.raft_id.to_be_bytes()]))
    });
    order
}

/// The first so many, one of each zone before a second of any.
fn spread(order: &[&Spot], count: usize) -> BTreeSet<u64> {
    let mut chosen = BTreeSet::new();
    let mut zones: BTreeMap<&str, usize> = BTreeMap::new();
    while chosen.len() < count {
        let left = order.iter().filter(|spot| !chosen.contains(&spot.raft_id));
        let next = left.min_by_key(|spot| zones.get(spot.zone.as_str()).copied().unwrap_or(0));
        let Some(next) = next else { break };
        *zones.entry(&next.zone).or_default() += 1;
        chosen.insert(next.raft_id);
    }
    chosen
}

/// Who may lead, only if somebody of the group may not: otherwise it does not matter.
fn able(spots: &[Spot], voters: &BTreeSet<u64>) -> Vec<u64> {
    let of_group = || spots.iter().filter(|spot| voters.contains(&spot.raft_id));
    if of_group().all(|spot| spot.may_lead) {
        return vec![];
    }
    of_group().filter(|spot| spot.may_lead).map(|spot| spot.raft_id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spots(zones: &[&str]) -> Vec<Spot> {
        let spot = |(raft_id, zone): (u64, &&str)| Spot {
            raft_id,
            zone: (*zone).to_owned(),
            may_lead: true,
        };
        (1..).zip(zones).map(spot).collect()
    }

    #[test]
    fn names_spread_evenly_and_stay_where_they_are() {
        let mut homes = [0_u32; 8];
        for name in 0..8000_u32 {
            homes[usize::from(shard_of(&name.to_be_bytes(), 8))] += 1;
        }
        assert!(homes.iter().all(|count| (850..1150).contains(count)), "{homes:?}");
        assert_eq!(shard_of(b"agent_1", 8), shard_of(b"agent_1", 8));
        assert_eq!(shard_of(b"agent_1", 1), 0);
    }

    #[test]
    fn the_directory_has_an_odd_number_of_voters_above_two() {
        let voters = |nodes: usize| {
            let zones: Vec<String> = (0..nodes).map(|n| n.to_string()).collect();
            let zones: Vec<&str> = zones.iter().map(String::as_str).collect();
            let wanted = directory(&spots(&zones));
            assert_eq!(wanted.voters.len() + wanted.learners.len(), nodes);
            wanted.voters.len()
        };
        assert_eq!([1, 2, 3, 4, 5, 6, 50].map(voters), [1, 2, 3, 3, 5, 5, 5]);
    }

    #[test]
    fn replicas_are_in_different_zones_where_there_are_so_many() {
        let spots = spots(&["a", "a", "a", "b", "b", "c"]);
        let zone = |id: u64| spots.iter().find(|spot| spot.raft_id == id).map(|spot| &spot.zone);
        for wanted in shards(&spots, 32).into_iter().chain([directory(&spots)]) {
            let zones: BTreeSet<_> = wanted.voters.iter().map(|id| zone(*id)).collect();
            assert_eq!(zones.len(), 3, "{wanted:?}");
        }
    }

    #[test]
    fn a_node_that_drains_leads_nothing() {
        let mut spots = spots(&["a", "b", "c"]);
        spots[1].may_lead = false;
        for wanted in shards(&spots, 8).into_iter().chain([directory(&spots)]) {
            assert!(wanted.voters.contains(&2) && !wanted.leaders.contains(&2), "{wanted:?}");
            assert_eq!(wanted.leaders.len(), 2);
        }
    }

    proptest! {
        /// Load is even, and one node more or less moves little.
        #[test]
        fn load_is_even(nodes in 3_usize..12, count in 1_u16..64) {
            let zones: Vec<String> = (0..nodes).map(|n| n.to_string()).collect();
            let zones: Vec<&str> = zones.iter().map(String::as_str).collect();
            let spots = spots(&zones);
            let plan = shards(&spots, count);
            let mut held: BTreeMap<u64, usize> = BTreeMap::new();
            let mut led: BTreeMap<u64, usize> = BTreeMap::new();
            for wanted in &plan {
                prop_assert_eq!(wanted.voters.len(), 3);
                wanted.voters.iter().for_each(|id| *held.entry(*id).or_default() += 1);
                *led.entry(wanted.leaders[0]).or_default() += 1;
            }
            let most = (usize::from(count) * 3).div_ceil(nodes);
            prop_assert!(held.values().all(|held| *held <= most + 2), "{:?}", held);
            let fair = usize::from(count).div_ceil(nodes);
            prop_assert!(led.values().all(|led| *led <= fair + 2), "{:?}", led);
        }
    }
}
