//! `roost cluster recover`: the majority of the nodes is gone for good, and one that is left begins anew
//! as a cluster of one with everything that it has. The command does nothing until it is told by name
//! which nodes are given up, and nothing at all while one of them answers: two halves of a cluster that
//! both go on would each be right, and never one again.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use actors::ports::Clock as _;
use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use cluster::{
    peer::{
        Class,
        book::AddressBook,
        client::{CallError, PeerClient},
    },
    placement,
    raft::offline::{Alone, Files, Found, proposal},
};
use domain::{
    NodeId,
    directory::{Command, Directory},
    machine::Entry,
    node::{Node, NodeStatus},
};

use crate::{
    adapters::{authority::Authority, system::SystemClock},
    cli::say,
    folder,
    identity::NodeIdentity,
};

/// How long a node may take to show that it is alive.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// What `recover` takes.
#[derive(clap::Args)]
pub struct Recover {
    /// The folder of the node that is left. It must not run.
    #[arg(long, default_value = "roost-data", value_name = "DIR")]
    data: PathBuf,
    /// Folders of other nodes that are left, copied here: of each group the newest replica is taken.
    #[arg(long, value_name = "DIR")]
    from: Vec<PathBuf>,
    /// The nodes that are given up, all of them. Without it, the command tells what it would do.
    #[arg(long, value_name = "NODE", value_delimiter = ',')]
    give_up: Vec<NodeId>,
}

/// A folder with a node's files.
struct Folder {
    identity: NodeIdentity,
    files: Files,
    _lock: std::fs::File,
}

impl Folder {
    fn open(data: &Path) -> anyhow::Result<Self> {
        let shown = data.display();
        let identity = NodeIdentity::read(data)?
            .with_context(|| format!("{shown} belongs to no node; name its folder with --data"))?;
        ensure!(identity.has_log, "the node of {shown} never ran; there is nothing to recover");
        let lock = folder::lock(data)?;
        let files = Files::open(data).with_context(|| format!("the logs of {shown}"))?;
        Ok(Self { identity, files, _lock: lock })
    }
}

/// A group, and the folder whose replica of it is the newest.
struct Choice {
    group: u16,
    folder: usize,
    found: Found,
}

/// Makes the node of a folder a cluster of one.
pub async fn run(arguments: Recover) -> anyhow::Result<ExitCode> {
    let mut folders = vec![Folder::open(&arguments.data)?];
    for other in &arguments.from {
        folders.push(Folder::open(other)?);
    }
    let own = folders[0].identity.clone();
    same_cluster(&folders)?;
    let replicas = read(&folders).await?;
    let directory = newest(&folders, &replicas).directory().await?;
    let groups = choose(&folders, replicas, &directory)?;
    let others = others(&directory, own.node_id)?;
    nobody_answers(&arguments.data, &own, &others).await?;
    describe(&own, &groups, &folders);
    if !agreed(&others, &arguments.give_up)? {
        return Ok(ExitCode::FAILURE);
    }
    let copied = groups.iter().filter(|choice| choice.folder > 0);
    for choice in copied {
        folders[0].files.copy(choice.group, &folders[choice.folder].files).await?;
    }
    let address = own.peer_address.as_str();
    let alone: Vec<Alone<'_>> = groups
        .iter()
        .map(|choice| Alone { group: choice.group, node: own.raft_id, address })
        .collect();
    folders[0].files.stand_alone(&alone, &farewells(&directory, own.node_id, &others)).await?;
    say(&format!("{} is a cluster of one now, with everything that it had.", own.node_id));
    say(&format!("Next: `roost serve --data {}`.", arguments.data.display()));
    say("Then `roost token`, and on every other machine `roost join` with an EMPTY folder.");
    say("Never start a node that was given up again: it would take itself for the cluster.");
    Ok(ExitCode::SUCCESS)
}

fn same_cluster(folders: &[Folder]) -> anyhow::Result<()> {
    let own = &folders[0].identity;
    for other in &folders[1..] {
        let other = &other.identity;
        ensure!(other.node_id != own.node_id, "{} was named twice", own.node_id);
        ensure!(
            other.shards == own.shards,
            "{} and {} are of different clusters: {} and {} shards",
            own.node_id,
            other.node_id,
            own.shards,
            other.shards
        );
    }
    Ok(())
}

/// What every folder has of every group, the directory first.
async fn read(folders: &[Folder]) -> anyhow::Result<Vec<Vec<Found>>> {
    let mut groups = vec![];
    for group in 0..=folders[0].identity.shards {
        let mut replicas = vec![];
        for folder in folders {
            replicas.push(folder.files.group(group).await?);
        }
        groups.push(replicas);
    }
    Ok(groups)
}

/// The files with the newest directory.
fn newest<'f>(folders: &'f [Folder], replicas: &[Vec<Found>]) -> &'f Files {
    let directories = folders.iter().zip(&replicas[0]);
    let newest = directories.max_by_key(|(_, found)| found.last.map(order));
    &newest.unwrap_or((&folders[0], &replicas[0][0])).0.files
}

/// Of every group the newest replica; all of them must be somewhere.
fn choose(
    folders: &[Folder],
    replicas: Vec<Vec<Found>>,
    directory: &Directory,
) -> anyhow::Result<Vec<Choice>> {
    let (mut chosen, mut missing) = (vec![], vec![]);
    let shards = placement::shards(&placement::Spot::all(directory), folders[0].identity.shards);
    // One that was taken out of a group does not hear of it: the plan tells.
    let is_current = |group: u16, raft_id: u64| {
        group
            .checked_sub(1)
            .is_none_or(|shard| shards[usize::from(shard)].voters.contains(&raft_id))
    };
    for (group, found) in (0_u16..).zip(replicas) {
        let all = found.into_iter().enumerate();
        let usable = all.filter(|(folder, found)| {
            let raft_id = folders[*folder].identity.raft_id;
            is_current(group, raft_id) && found.has(raft_id)
        });
        match usable.max_by_key(|(folder, found)| (found.last.map(order), Reverse(*folder))) {
            Some((folder, found)) => chosen.push(Choice { group, folder, found }),
            None => missing.push(name(group)),
        }
    }
    ensure!(
        missing.is_empty(),
        "there is no replica of {}; name the folder of another node that is left with --from",
        missing.join(", ")
    );
    Ok(chosen)
}

fn order(id: cluster::raft::types::LogId) -> (u64, u64) {
    (id.committed_leader_id().term, id.index)
}

fn name(group: u16) -> String {
    let shard = group.checked_sub(1);
    shard.map_or_else(|| "the directory".to_owned(), |shard| format!("shard {shard}"))
}

/// All other nodes that belong to the cluster.
fn others(directory: &Directory, own: NodeId) -> anyhow::Result<BTreeMap<NodeId, Node>> {
    let row = directory.nodes.get(&own).context("the directory does not know this node")?;
    ensure!(
        row.status != NodeStatus::Removed,
        "{own} was taken out of its cluster; what it has is old. Recover on another node"
    );
    let others = directory
        .nodes
        .rows()
        .filter(|(id, node)| **id != own && node.status != NodeStatus::Removed);
    let others: BTreeMap<_, _> = others.map(|(id, node)| (*id, Node::clone(node))).collect();
    ensure!(!others.is_empty(), "{own} is its cluster's only node; `roost serve` is all it needs");
    Ok(others)
}

/// A node that answers is a part of the cluster that goes on without us.
async fn nobody_answers(
    data: &Path,
    own: &NodeIdentity,
    others: &BTreeMap<NodeId, Node>,
) -> anyhow::Result<()> {
    let keys = data.join("keys");
    let authority = Authority::open(&keys)?;
    let book = Arc::new(AddressBook::default());
    let tls = authority.peer_identity(&keys, own.raft_id)?.client()?;
    for node in others.values() {
        book.put(node.facts.raft_id, &node.facts.peer_address);
    }
    let client = PeerClient::new(tls, own.raft_id, book);
    let asked = others.iter().map(async |(id, node)| {
        let number = node.facts.raft_id;
        let answer = client.call(number, Class::Beats, "/read/0", Bytes::new(), ANSWER_WITHIN);
        match answer.await {
            Err(CallError::Unreached(_)) => None,
            Ok(_) | Err(_) => Some(format!("{id} at {}", node.facts.peer_address)),
        }
    });
    let answering: Vec<String> =
        futures::future::join_all(asked).await.into_iter().flatten().collect();
    if answering.is_empty() {
        return Ok(());
    }
    bail!(
        "{} answers. If a majority is left, the cluster needs no recovery: `roost cluster remove` takes \
         dead nodes out. If not, stop what is left on every machine but one first",
        answering.join(" and ")
    )
}

fn describe(own: &NodeIdentity, groups: &[Choice], folders: &[Folder]) {
    say(&format!("{} would go on alone with:", own.node_id));
    for choice in groups {
        let name = name(choice.group);
        let (term, index) = choice.found.last.map(order).unwrap_or_default();
        let voters = choice.found.voters().len();
        let whose = match choice.folder {
            0 => String::new(),
            other => format!(", from {}", folders[other].identity.node_id),
        };
        say(&format!("  {name:<13} entry {index} of term {term}, one of {voters} voters{whose}"));
    }
}

/// Whether the operator named exactly the nodes that are given up.
fn agreed(others: &BTreeMap<NodeId, Node>, named: &[NodeId]) -> anyhow::Result<bool> {
    let mut unknown = named.iter().filter(|id| !others.contains_key(id));
    if let Some(unknown) = unknown.next() {
        bail!("{unknown} is not another node of this cluster");
    }
    let all: Vec<String> = others.keys().map(ToString::to_string).collect();
    if others.keys().all(|id| named.contains(id)) {
        return Ok(true);
    }
    for (id, node) in others {
        say(&format!("  given up   {id} at {}", node.facts.peer_address));
    }
    say("What a node that is given up had acknowledged and this one never heard of is lost.");
    say("Nothing was changed. If these nodes are gone for good, run the same command with");
    say(&format!("  --give-up {}", all.join(",")));
    Ok(false)
}

/// The others are taken out, in the log itself.
fn farewells(directory: &Directory, own: NodeId, others: &BTreeMap<NodeId, Node>) -> Vec<Bytes> {
    let set = |id, to| {
        let command = Command::SetNodeStatus { id, to };
        proposal(&Entry::new(SystemClock.now(), command))
    };
    let is_active = directory.nodes.get(&own).is_some_and(|row| row.status == NodeStatus::Active);
    let back = (!is_active).then(|| set(own, NodeStatus::Active));
    let gone = others
        .keys()
        .flat_map(|id| [NodeStatus::Dead, NodeStatus::Removed].map(|status| set(*id, status)));
    back.into_iter().chain(gone).collect()
}
