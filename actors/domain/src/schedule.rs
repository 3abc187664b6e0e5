//! Where one more instance goes: a pure choice over what nodes offer, what runs on them and what one
//! instance needs. It spreads an agent over zones, then over nodes, then fills the emptiest node.

use std::collections::BTreeMap;

use crate::{
    NodeId,
    agent::Agent,
    cloud::Provider,
    deployment::Failure,
    directory::Directory,
    node::{Node, NodeStatus},
};

/// What a node has for instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The node.
    pub node: NodeId,
    /// Its zone.
    pub zone: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The runtimes that it has; empty is any.
    pub providers: Vec<String>,
    /// Cores that may be promised altogether.
    pub cores: u64,
    /// MiB of memory that may be promised altogether.
    pub memory_mb: u64,
}

impl Offer {
    /// Of a node that no cluster knows yet: itself.
    pub fn alone(node: NodeId, cores: u64, memory_mb: u64) -> Self {
        let (labels, providers) = (BTreeMap::new(), vec![]);
        Self { node, zone: node.to_string(), labels, providers, cores, memory_mb }
    }

    fn of(node: &Node, zone_label: &str) -> Self {
        Self {
            node: node.facts.id,
            zone: node.zone(zone_label),
            labels: node.facts.labels.clone(),
            providers: node.facts.providers.clone(),
            cores: node.facts.cores,
            memory_mb: node.facts.memory_mb,
        }
    }
}

/// The offers of nodes that are active and `usable`.
pub fn offers(
    directory: &Directory,
    usable: impl Fn(NodeId) -> bool,
    alone: impl FnOnce() -> Offer,
) -> Vec<Offer> {
    if directory.nodes.is_empty() {
        return vec![alone()];
    }
    let active = directory.nodes.rows().filter(|(_, node)| node.status == NodeStatus::Active);
    let zone = directory.autopilot().unwrap_or_default().redundancy_zone;
    active.filter(|(id, _)| usable(**id)).map(|(_, node)| Offer::of(node, &zone)).collect()
}

/// What is promised on a node.
#[derive(Clone, Copy, Debug, Default)]
struct Promised {
    cores: u64,
    memory_mb: u64,
    of_agent: usize,
}

/// What one more instance needs, and what runs already.
pub struct Need {
    cores: u64,
    memory_mb: u64,
    provider: Provider,
    selector: BTreeMap<String, String>,
    promised: BTreeMap<NodeId, Promised>,
}

impl Need {
    /// Of one more instance of an agent.
    pub fn of(directory: &Directory, agent: &Agent) -> Self {
        let mut promised: BTreeMap<NodeId, Promised> = BTreeMap::new();
        for (_, row) in directory.instances.rows() {
            let Some(other) = directory.agents.get(&row.agent_id) else { continue };
            let sum = promised.entry(row.node_id).or_default();
            sum.cores += u64::from(other.spec.resources.cpu);
            sum.memory_mb += u64::from(other.spec.resources.memory_mb);
            sum.of_agent += usize::from(row.agent_id == agent.id);
        }
        let cloud = directory.clouds.get(&agent.cloud_id);
        Self {
            cores: u64::from(agent.spec.resources.cpu),
            memory_mb: u64::from(agent.spec.resources.memory_mb),
            provider: cloud.as_ref().map_or(Provider::Process, |cloud| cloud.provider),
            selector: cloud.map(|cloud| cloud.node_selector.clone()).unwrap_or_default(),
            promised,
        }
    }

    fn fits(&self, offer: &Offer) -> Result<(), &'static str> {
        let has = |(key, value): (&String, &String)| offer.labels.get(key) == Some(value);
        if !self.selector.iter().all(has) {
            return Err("labels that fit its node_selector");
        }
        let provider = self.provider.as_str();
        if !offer.providers.is_empty() && offer.providers.iter().all(|one| one != provider) {
            return Err("its runtime");
        }
        let used = self.used(offer.node);
        if used.memory_mb.saturating_add(self.memory_mb) > offer.memory_mb {
            return Err("memory left");
        }
        if used.cores.saturating_add(self.cores) > offer.cores {
            return Err("processors left");
        }
        Ok(())
    }

    /// One more instance has its place there.
    fn promise(&mut self, node: NodeId) {
        let sum = self.promised.entry(node).or_default();
        sum.cores += self.cores;
        sum.memory_mb += self.memory_mb;
        sum.of_agent += 1;
    }

    fn used(&self, node: NodeId) -> Promised {
        self.promised.get(&node).copied().unwrap_or_default()
    }
}

/// The best nodes for so many instances, as far as there is room; or why there is none for any.
pub fn choose_all(
    offers: &[Offer],
    mut need: Need,
    instances: usize,
) -> Result<Vec<NodeId>, Failure> {
    let mut nodes = vec![choose(offers, &need)?];
    while nodes.len() < instances {
        nodes.iter().next_back().into_iter().for_each(|node| need.promise(*node));
        let Ok(node) = choose(offers, &need) else { break };
        nodes.push(node);
    }
    Ok(nodes)
}

/// The best node, or why there is none.
fn choose(offers: &[Offer], need: &Need) -> Result<NodeId, Failure> {
    let mut in_zone: BTreeMap<&str, usize> = BTreeMap::new();
    for offer in offers {
        *in_zone.entry(&offer.zone).or_default() += need.used(offer.node).of_agent;
    }
    let fitting = offers.iter().filter(|offer| need.fits(offer).is_ok());
    let best = fitting.min_by_key(|offer| {
        let used = need.used(offer.node);
        let zone = in_zone.get(offer.zone.as_str()).copied().unwrap_or(0);
        let share = used.memory_mb.saturating_mul(1000) / offer.memory_mb.max(1);
        (zone, used.of_agent, share, offer.node)
    });
    best.map(|offer| offer.node).ok_or_else(|| no_room(offers, need))
}

fn no_room(offers: &[Offer], need: &Need) -> Failure {
    let lacks = offers.iter().filter_map(|offer| need.fits(offer).err()).next_back();
    let what = lacks.unwrap_or("an answer");
    let message = format!(
        "no node of this cloud has {what} for one more instance; lower resources, stop other agents, or add a node"
    );
    Failure::new("NO_CAPACITY", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(node: u128, zone: &str, memory_mb: u64) -> Offer {
        Offer { zone: zone.to_owned(), ..Offer::alone(NodeId(node), 16, memory_mb) }
    }

    fn need(promised: &[(u128, u64, usize)]) -> Need {
        let promised = promised.iter().map(|(node, memory_mb, of_agent)| {
            (NodeId(*node), Promised { cores: 1, memory_mb: *memory_mb, of_agent: *of_agent })
        });
        Need {
            cores: 1,
            memory_mb: 512,
            provider: Provider::Process,
            selector: BTreeMap::new(),
            promised: promised.collect(),
        }
    }

    fn chosen(offers: &[Offer], need: &Need) -> u128 {
        choose(offers, need).expect("there is room").0
    }

    #[test]
    fn an_agent_spreads_over_zones_then_over_nodes() {
        let offers = [offer(1, "a", 4096), offer(2, "a", 4096), offer(3, "b", 4096)];
        assert_eq!(chosen(&offers, &need(&[(1, 512, 1)])), 3, "another zone");
        assert_eq!(chosen(&offers, &need(&[(1, 512, 1), (3, 512, 1)])), 2, "another node");
    }

    #[test]
    fn many_are_placed_as_one_after_the_other_would_be() {
        let offers = [offer(1, "a", 2048), offer(2, "a", 1024), offer(3, "b", 1024)];
        let placed = |count| {
            let nodes = choose_all(&offers, need(&[]), count).expect("there is room");
            nodes.into_iter().map(|node| node.0).collect::<Vec<_>>()
        };
        assert_eq!(placed(1), [1]);
        assert_eq!(placed(5), [1, 3, 2, 3, 1]);
        assert_eq!(placed(100).len(), 8, "then all of them are full");
        assert!(choose_all(&offers, need(&[(1, 2048, 0), (2, 900, 0), (3, 900, 0)]), 2).is_err());
    }

    #[test]
    fn the_emptiest_node_is_filled_first() {
        let offers = [offer(1, "a", 4096), offer(2, "b", 4096)];
        assert_eq!(chosen(&offers, &need(&[(1, 2048, 0), (2, 1024, 0)])), 2);
        assert_eq!(chosen(&offers, &need(&[(2, 1024, 0)])), 1);
    }

    #[test]
    fn who_has_no_room_or_other_labels_is_left_out() {
        let offers = [offer(1, "a", 600), offer(2, "b", 4096)];
        assert_eq!(chosen(&offers, &need(&[(1, 300, 0), (2, 2048, 5)])), 2);
        let mut wanting = need(&[]);
        wanting.selector.insert("disk".to_owned(), "fast".to_owned());
        let failure = choose(&offers, &wanting).expect_err("no such labels");
        assert_eq!(failure.code, "NO_CAPACITY");
        assert!(failure.message.contains("node_selector"), "{}", failure.message);
        let full = need(&[(1, 300, 0), (2, 3900, 0)]);
        assert!(choose(&offers, &full).expect_err("full").message.contains("memory"));
    }
}
