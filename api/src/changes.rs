//! What changes about the cluster, as a stream. Each look at nodes and groups is compared with the one
//! before: what gossip says, what Raft says and what the operator says come together nowhere else.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use actors::{ports::GroupView, world::World};
use futures::StreamExt as _;
use poem::web::sse::Event;
use poem_openapi::types::{Any, ToJSON as _};
use serde_json::{Value, json};

use crate::{
    body::cluster::ClusterEventBody,
    cluster::{Seen, shard_body},
    sse::Sse,
};

/// Between looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
struct Look {
    nodes: BTreeMap<String, Value>,
    groups: BTreeMap<String, Value>,
}

impl Look {
    fn at(world: &World) -> Self {
        let groups = world.ports.cluster.groups().into_iter().map(group);
        let (groups, seen) = (groups.collect(), Seen::of(world));
        let directory = world.directory().read();
        let nodes = directory.nodes.rows().map(|(id, node)| {
            let mut body = seen.body(&directory, node).to_json().unwrap_or_default();
            // How much runs and leads there changes all the time, and is told by groups.
            ["instances", "leads", "drained"].iter().for_each(|name| forget(&mut body, name));
            (id.to_string(), body)
        });
        Self { nodes: nodes.collect(), groups }
    }

    fn whole(&self) -> Change {
        let (nodes, groups): (Vec<_>, Vec<_>) =
            (self.nodes.values().collect(), self.groups.values().collect());
        let data = json!({ "nodes": nodes, "groups": groups });
        Change { kind: "cluster.seen", node_id: None, group: None, data }
    }

    fn changes_since(&self, before: &Self) -> Vec<Change> {
        let nodes = self.nodes.iter().filter_map(|(id, now)| {
            let was = before.nodes.get(id);
            let kind = match was {
                Some(was) if was == now => return None,
                None => "node.joined",
                Some(_) if now["status"] == "removed" => "node.removed",
                Some(_) => "node.changed",
            };
            Some(Change { kind, node_id: Some(id.clone()), group: None, data: now.clone() })
        });
        let groups = self.groups.iter().flat_map(|(name, now)| {
            let was = before.groups.get(name).unwrap_or(&Value::Null);
            let differs = |fields: &[&str]| fields.iter().any(|field| was[field] != now[field]);
            let kinds = [
                ("leader.changed", differs(&["leader", "term"])),
                ("replicas.changed", differs(&["voters", "learners"])),
            ];
            kinds.into_iter().filter(|(_, changed)| *changed).map(move |(kind, _)| Change {
                kind,
                node_id: now["leader"].as_str().map(str::to_owned),
                group: Some(name.clone()),
                data: now.clone(),
            })
        });
        nodes.chain(groups).collect()
    }
}

fn group(view: GroupView) -> (String, Value) {
    let mut body = shard_body(view).to_json().unwrap_or_default();
    ["last_index", "applied_index", "behind"].iter().for_each(|name| forget(&mut body, name));
    (body["name"].as_str().unwrap_or_default().to_owned(), body)
}

fn forget(body: &mut Value, name: &str) {
    body.as_object_mut().map(|fields| fields.remove(name));
}

/// One difference.
#[derive(Clone, Debug, PartialEq)]
struct Change {
    kind: &'static str,
    node_id: Option<String>,
    group: Option<String>,
    data: Value,
}

impl Change {
    fn body(self, world: &World) -> ClusterEventBody {
        let Self { kind, node_id, group, data } = self;
        let timestamp = world.ports.clock.now().to_string();
        ClusterEventBody { kind: kind.to_owned(), timestamp, node_id, group, data: Any(data) }
    }
}

/// How the cluster is, then what changes, for as long as somebody listens.
pub(crate) fn stream(world: Arc<World>) -> Sse<ClusterEventBody> {
    let looks = futures::stream::unfold(None, move |before: Option<Look>| {
        let world = Arc::clone(&world);
        async move {
            let Some(before) = before else {
                let now = Look::at(&world);
                return Some((vec![now.whole().body(&world)], Some(now)));
            };
            tokio::time::sleep(LOOK_EVERY).await;
            let now = Look::at(&world);
            let changes = now.changes_since(&before);
            let bodies = changes.into_iter().map(|change| change.body(&world)).collect();
            Some((bodies, Some(now)))
        }
    });
    let bodies = looks.flat_map(futures::stream::iter);
    Sse::new(bodies.map(|body: ClusterEventBody| {
        let kind = body.kind.clone();
        Event::message(body.to_json_string()).event_type(kind)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(status: &str, leader: &str) -> Look {
        let node = json!({ "id": "node_1", "status": status });
        let group =
            json!({ "name": "directory", "leader": leader, "term": 1, "voters": ["node_1"] });
        Look {
            nodes: BTreeMap::from([("node_1".to_owned(), node)]),
            groups: BTreeMap::from([("directory".to_owned(), group)]),
        }
    }

    #[test]
    fn only_what_differs_is_told() {
        let before = look("active", "node_1");
        assert_eq!(before.changes_since(&before), vec![]);
        let kinds = |now: &Look, before: &Look| -> Vec<&str> {
            now.changes_since(before).iter().map(|change| change.kind).collect()
        };
        assert_eq!(kinds(&look("draining", "node_1"), &before), ["node.changed"]);
        assert_eq!(kinds(&look("removed", "node_2"), &before), ["node.removed", "leader.changed"]);
        assert_eq!(
            kinds(&before, &Look::default()),
            ["node.joined", "leader.changed", "replicas.changed"]
        );
    }
}
