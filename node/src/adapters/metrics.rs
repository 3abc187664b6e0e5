//! What Prometheus scrapes: every name with its unit and labels stands here. Gauges are read when they
//! are asked for, so nothing is kept up to date for nobody; counters are counted where things happen.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use actors::{
    ports::{ClusterView as _, GroupView, Ledger as _},
    world::World,
};
use api::Traffic;
use cluster::{RaftLedger, raft::log::LogFigures, raft::state::StateFigures};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{family::Family, gauge::Gauge, info::Info},
    registry::Registry,
};

use super::{system, view::NodeView};

/// The type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Gauges<L> = Family<L, Gauge>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfGroup {
    group: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReplica {
    group: String,
    node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStatus {
    status: String,
}

/// Everything that is measured on one node.
pub struct Metrics {
    /// What clients ask.
    pub traffic: Arc<Traffic>,
    /// The log's file.
    pub log: LogFigures,
    /// The tables' file.
    pub state: StateFigures,
    /// When the process began.
    pub began: std::time::Instant,
}

/// A gauge without labels.
fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let gauge: Gauge = Gauge::default();
    gauge.set(signed(value));
    registry.register(name, help, gauge);
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Metrics {
    /// All of it as text.
    pub fn text(&self, world: &World, ledger: &RaftLedger, view: &NodeView) -> String {
        let mut registry = Registry::with_prefix("roost");
        let info = Info::new(vec![
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("node_id", world.node_id.to_string()),
        ]);
        registry.register("build", "The release and the node", info);
        self.process(&mut registry);
        self.requests(&mut registry, world);
        self.disk(&mut registry);
        members(&mut registry, world, view);
        groups(&mut registry, &view.groups());
        work(&mut registry, world, ledger);
        let mut text = String::new();
        // Writing into a text can't fail.
        let _ = encode(&mut text, &registry);
        text
    }

    fn process(&self, registry: &mut Registry) {
        let own = system::process();
        let up = self.began.elapsed().as_secs();
        gauge(registry, "uptime_seconds", "Since the process began", up);
        gauge(registry, "resident_memory_bytes", "Memory of the process", own.resident_bytes);
        gauge(registry, "cpu_milliseconds", "CPU time of the process so far", own.cpu_ms);
        gauge(registry, "open_files", "Open files of the process", own.open_files);
    }

    fn requests(&self, registry: &mut Registry, world: &World) {
        let Traffic { open, answered, seconds } = &*self.traffic;
        registry.register("http_requests", "Requests answered, by status class", answered.clone());
        registry.register("http_request_seconds", "Until the answer's head", seconds.clone());
        gauge(registry, "http_requests_open", "Requests being served", open.load(Relaxed) as u64);
        let calls = world.routes.in_flight() as u64;
        gauge(registry, "invocations_in_flight", "Calls of agents on this node", calls);
    }

    fn disk(&self, registry: &mut Registry) {
        let (log, state) = (&self.log, &self.state);
        registry.register("log_commit_seconds", "Commits of the log", log.seconds.clone());
        registry.register("log_entries", "Entries appended to the log", log.entries.clone());
        registry.register("tables_commit_seconds", "Commits of tables", state.seconds.clone());
    }
}

fn members(registry: &mut Registry, world: &World, view: &NodeView) {
    let by_status: Gauges<OfStatus> = Family::default();
    let agents: Gauges<OfStatus> = Family::default();
    {
        let directory = world.directory().read();
        for (_, node) in directory.nodes.rows() {
            let status = node.status.as_str().to_owned();
            by_status.get_or_create(&OfStatus { status }).inc();
        }
        for (_, agent) in directory.agents.rows() {
            let status = agent.status.as_str().to_owned();
            agents.get_or_create(&OfStatus { status }).inc();
        }
    }
    registry.register("nodes", "Nodes by what is wanted of them", by_status);
    registry.register("agents", "Agents by status", agents);
    let alive = view.alive().len() as u64;
    gauge(registry, "nodes_alive", "Members that answer, as this node sees it", alive);
    let contact = view.contact();
    let knows = u64::from(contact.knows_leaders);
    gauge(registry, "knows_leaders", "1 while all groups here hear of their leader", knows);
    let instances = world.watch.instances.handles().len() as u64;
    gauge(registry, "instances", "Instances on this node", instances);
}

fn groups(registry: &mut Registry, views: &[GroupView]) {
    let [led, leads, term, last, applied]: [Gauges<OfGroup>; 5] = Default::default();
    let behind: Gauges<OfReplica> = Family::default();
    for view in views {
        let group = view.name();
        let of = OfGroup { group: group.clone() };
        led.get_or_create(&of).set(i64::from(view.leader.is_some()));
        leads.get_or_create(&of).set(i64::from(!view.behind.is_empty()));
        term.get_or_create(&of).set(signed(view.term));
        if let (Some(at), Some(done)) = (view.last_index, view.applied_index) {
            last.get_or_create(&of).set(signed(at));
            applied.get_or_create(&of).set(signed(done));
        }
        for (node, lacks) in &view.behind {
            let of = OfReplica { group: group.clone(), node: node.to_string() };
            behind.get_or_create(&of).set(signed(*lacks));
        }
    }
    registry.register("group_has_leader", "1 while the group is led", led);
    registry.register("group_leads_here", "1 where this node leads the group", leads);
    registry.register("group_term", "The group's term", term);
    registry.register("group_last_index", "The last entry here", last);
    registry.register("group_applied_index", "The last applied entry here", applied);
    registry.register("group_replica_lag_entries", "Entries that a replica lacks", behind);
}

fn work(registry: &mut Registry, world: &World, ledger: &RaftLedger) {
    let (mut jobs, mut deliveries, mut waiting) = (0, 0, 0);
    for shard in ledger.leading().borrow().keys() {
        let state = world.ports.ledger.shard(*shard).read();
        jobs += state.jobs.len() as u64;
        deliveries += state.deliveries.len() as u64;
        waiting += state.outbox.rows.len() as u64;
    }
    gauge(registry, "jobs_unfinished", "Jobs of shards led here", jobs);
    gauge(registry, "deliveries_unfinished", "Webhook deliveries of shards led here", deliveries);
    gauge(registry, "events_untold", "Events of shards led here that are not yet told", waiting);
}
