//! What actors need from the world, in their words. Each port has two implementations: the real one
//! and the one of the tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use domain::{
    Rejection, Timestamp,
    directory::{self, Directory},
    event::{DirectoryEvent, ShardEvent},
    machine::{Answer, Claim, Entry},
    shard::{self, Shard},
};
use futures::future::BoxFuture;
use tokio::sync::watch;

use crate::replica::Replica;

/// Why a proposal has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProposeError {
    /// The machine said no.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// Nothing was appended; a retry is safe and may help.
    #[error("the cluster has no leader right now")]
    Unavailable,
    /// It may or may not come to pass; a retry is safe with an idempotency key.
    #[error("the cluster did not confirm the change in time")]
    Unknown,
}

/// The replicated log and the state it makes.
pub trait Ledger: Send + Sync + 'static {
    /// This node's copy of the directory.
    fn directory(&self) -> &Replica<Directory>;
    /// This node's copy of one shard.
    fn shard(&self, shard: u16) -> &Replica<Shard>;
    /// How many shards there are.
    fn shards(&self) -> u16;
    /// The home shard of something with this name.
    fn home(&self, name: &[u8]) -> u16;
    /// Agrees on a change of the directory; on return it is durable and applied here.
    fn change_directory(
        &self,
        entry: Entry<directory::Command>,
    ) -> BoxFuture<'_, Result<Answer<directory::Reply>, ProposeError>>;
    /// Agrees on a change of one shard. With a claim in the entry it fails unless this node still
    /// leads the shard in that term.
    fn change_shard(
        &self,
        shard: u16,
        entry: Entry<shard::Command>,
    ) -> BoxFuture<'_, Result<Answer<shard::Reply>, ProposeError>>;
    /// Waits until [`Ledger::directory`] holds every change acknowledged before this call.
    fn refresh_directory(&self) -> BoxFuture<'_, Result<(), ProposeError>>;
    /// Waits until [`Ledger::shard`] holds every change acknowledged before this call.
    fn refresh_shard(&self, shard: u16) -> BoxFuture<'_, Result<(), ProposeError>>;
    /// Whether this node has a copy of a shard.
    fn has_shard(&self, shard: u16) -> bool;
    /// The shards that this node leads now, with their terms.
    fn leading(&self) -> watch::Receiver<BTreeMap<u16, u64>>;
    /// Whether a claim is this node's, and a majority has said so so lately that nobody else can have another.
    /// What is seen outside of the cluster is done only then.
    fn holds(&self, claim: Claim) -> bool;
    /// Whether this node leads the directory.
    fn leads_directory(&self) -> bool;
}

/// Why another node gave no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PeerError {
    /// Nothing was sent.
    #[error("the node can't be reached: {0}")]
    Unreached(String),
    /// Something may have been sent; its effect is unknown.
    #[error("the connection to the node broke: {0}")]
    Broken(String),
    /// It answered that it does not do this.
    #[error("the node refused: {0}")]
    Refused(String),
}

/// The body of a request to another node.
pub type PeerBody = http_body_util::combinators::BoxBody<bytes::Bytes, std::io::Error>;
/// A request that is passed on to another node.
pub type PeerRequest = http::Request<PeerBody>;
/// The beginning of its answer.
pub type PeerResponse = http::Response<hyper::body::Incoming>;

/// The other nodes of the cluster.
pub trait Peers: Send + Sync + 'static {
    /// Whether a node answers, as far as this one knows.
    fn is_alive(&self, node: domain::NodeId) -> bool;
    /// A question with a whole answer.
    fn ask(
        &self,
        node: domain::NodeId,
        question: bytes::Bytes,
        within: std::time::Duration,
    ) -> BoxFuture<'_, Result<bytes::Bytes, PeerError>>;
    /// A request whose answer is passed on as it comes.
    fn pass(
        &self,
        node: domain::NodeId,
        request: PeerRequest,
    ) -> BoxFuture<'_, Result<PeerResponse, PeerError>>;
}

/// A Raft group as one node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// `None` is the directory.
    pub shard: Option<u16>,
    /// Who leads it.
    pub leader: Option<domain::NodeId>,
    /// In which term.
    pub term: u64,
    /// Those who vote.
    pub voters: Vec<domain::NodeId>,
    /// Those who listen.
    pub learners: Vec<domain::NodeId>,
    /// The last entry here; `None` where this node has no replica.
    pub last_index: Option<u64>,
    /// The last entry that was applied here.
    pub applied_index: Option<u64>,
    /// Where this node leads: how many entries each replica lacks.
    pub behind: BTreeMap<domain::NodeId, u64>,
    /// Where this node leads: how long ago each replica answered.
    pub contact: BTreeMap<domain::NodeId, std::time::Duration>,
}

impl GroupView {
    /// `directory`, or the shard's number.
    pub fn name(&self) -> String {
        self.shard.map_or_else(|| "directory".to_owned(), |shard| shard.to_string())
    }

    /// How many voters must agree.
    pub fn quorum(&self) -> usize {
        self.voters.len() / 2 + 1
    }

    fn tolerance(&self, alive: &BTreeSet<domain::NodeId>) -> usize {
        let alive = self.voters.iter().filter(|id| alive.contains(id)).count();
        alive.saturating_sub(self.quorum())
    }
}

/// How many nodes, whichever they are, may be lost at once before some group can't go on.
pub fn failure_tolerance(groups: &[GroupView], alive: &BTreeSet<domain::NodeId>) -> usize {
    groups.iter().map(|group| group.tolerance(alive)).min().unwrap_or(0)
}

/// A request to somebody outside.
#[derive(Clone, Debug)]
pub struct OutboundRequest {
    /// Where to: `https`.
    pub url: String,
    /// Beside `Content-Type: application/json`.
    pub headers: BTreeMap<&'static str, String>,
    /// JSON.
    pub body: String,
}

/// What somebody outside answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundAnswer {
    /// The status.
    pub status: u16,
    /// The beginning of the body, as text.
    pub body: String,
    /// How long the receiver asks to wait.
    pub retry_after: Option<std::time::Duration>,
}

/// Why somebody outside did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutboundError {
    /// Its address is one that nothing is sent to.
    #[error(
        "the address {0} is not reachable from here: private, local and reserved addresses are refused"
    )]
    Forbidden(String),
    /// Its name has no address.
    #[error("the host name could not be resolved")]
    Unresolved,
    /// No connection, or it broke.
    #[error("the connection failed: {0}")]
    Connection(String),
    /// It took too long.
    #[error("there was no answer within {} s", .0.as_secs())]
    Timeout(std::time::Duration),
}

/// Calls to others: only to public addresses, without redirects, bounded in time and size.
pub trait Outbound: Send + Sync + 'static {
    /// Sends a request.
    fn post(
        &self,
        request: OutboundRequest,
    ) -> BoxFuture<'_, Result<OutboundAnswer, OutboundError>>;
}

/// A new join token, shown once.
#[derive(Clone, Debug)]
pub struct NewToken {
    /// The token.
    pub token: String,
    /// The peer address of a node that takes it.
    pub address: String,
    /// Until when it is good.
    pub expires_at: Timestamp,
}

/// A backup of the whole cluster, kept by the node that made it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SnapshotRecord {
    /// Its id.
    pub id: domain::SnapshotId,
    /// Who keeps it.
    pub node_id: domain::NodeId,
    /// How far it is.
    pub status: SnapshotStatus,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// Its size, once it is ready.
    pub bytes: u64,
    /// SHA-256 of the file, once it is ready.
    pub sha256: Option<String>,
    /// The release that made it.
    pub version: String,
    /// Uploads and long payloads in it.
    pub blobs: u64,
    /// Built images in it.
    pub images: u64,
    /// What should be in it and was on no node that answered.
    pub missing: Vec<String>,
    /// Why it failed.
    pub error: Option<String>,
}

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotStatus {
    /// It is being made.
    Creating,
    /// It is whole and on disk.
    Ready,
    /// It could not be made.
    Failed,
}

impl SnapshotStatus {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Failed => "failed",
        }
    }
}

/// Backups of the cluster. Every node keeps those that it made; any node answers for all.
pub trait Snapshots: Send + Sync + 'static {
    /// Begins one here; `None` while another one is being made here.
    fn begin(&self) -> BoxFuture<'_, Option<SnapshotRecord>>;
    /// Those of all nodes that answer, the newest first.
    fn list(&self) -> BoxFuture<'_, Vec<SnapshotRecord>>;
    /// The file of one that is ready; `None` if its node does not have it any more.
    fn read(&self, record: SnapshotRecord) -> BoxFuture<'_, std::io::Result<Option<ByteStream>>>;
    /// Removes one; whether it was there.
    fn remove(&self, record: SnapshotRecord) -> BoxFuture<'_, std::io::Result<bool>>;
}

/// How near this node is to the leaders of the groups that it has replicas of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contact {
    /// Whether all of these groups have a leader that was heard of lately.
    pub knows_leaders: bool,
    /// Since when one of them was not heard of; `None` if one never was since this node started.
    pub last: Option<std::time::Duration>,
}

/// The cluster as this node sees it.
pub trait ClusterView: Send + Sync + 'static {
    /// The members that answer.
    fn alive(&self) -> BTreeSet<domain::NodeId>;
    /// The members that say that they are caught up and serve.
    fn ready(&self) -> BTreeSet<domain::NodeId>;
    /// The directory, then every shard. Not to be asked while the directory is held.
    fn groups(&self) -> Vec<GroupView>;
    /// How old what this node has may be.
    fn contact(&self) -> Contact;
    /// Makes a token for one join.
    fn mint_token(&self) -> BoxFuture<'_, Result<NewToken, ProposeError>>;
}

/// Hears what was applied, in order, right after it was applied. Must not block.
pub trait Observer: Send + Sync + 'static {
    /// Events of the directory.
    fn directory(&self, events: &[DirectoryEvent]);
    /// Events of one shard.
    fn shard(&self, shard: u16, events: &[ShardEvent]);
}

/// Tells the time. The only place that asks the machine for it.
pub trait Clock: Send + Sync + 'static {
    /// Now, by the wall clock.
    fn now(&self) -> Timestamp;
}

/// Throws dice. The only place that asks the machine for randomness.
pub trait Entropy: Send + Sync + 'static {
    /// 128 unpredictable bits.
    fn dice(&self) -> u128;
    /// The same for a name: nobody can tell it beforehand, and everybody may know it afterwards.
    fn id(&self) -> u128 {
        self.dice()
    }
}

/// A stream of bytes, such as a request's body.
pub type ByteStream = futures::stream::BoxStream<'static, std::io::Result<bytes::Bytes>>;

/// Why a blob could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// More bytes than allowed.
    #[error("more than {0} bytes")]
    TooLarge(u64),
    /// The sender broke off.
    #[error("the upload broke off")]
    Broken(#[source] std::io::Error),
    /// The disk said no.
    #[error("the blob could not be stored")]
    Disk(#[source] std::io::Error),
    /// It would be on this node alone.
    #[error("no other node took a copy of the bytes; retry in a moment")]
    NoCopy,
}

/// Bulk, kept by content outside of the log: uploads and large payloads.
pub trait Blobs: Send + Sync + 'static {
    /// Keeps at most `max` bytes; durable on return.
    fn receive(
        &self,
        bytes: ByteStream,
        max: u64,
    ) -> BoxFuture<'_, Result<domain::upload::Received, BlobError>>;
    /// The bytes under this SHA-256, if they are here.
    fn read(&self, sha256: &str) -> BoxFuture<'_, std::io::Result<Option<bytes::Bytes>>>;
    /// Says that a blob will be needed by something new; whether it is still here.
    fn touch(&self, sha256: &str) -> BoxFuture<'_, bool>;
    /// Gives copies of what is here and needed to the nodes that should have them; how many copies are still
    /// missing, because a node did not take one.
    fn keep_copies(&self, needed: BTreeSet<String>) -> BoxFuture<'_, u64>;
    /// Removes blobs that were neither kept nor touched within `grace` and that `needed` does not
    /// name; how many.
    fn sweep(&self, needed: BTreeSet<String>, grace: std::time::Duration) -> BoxFuture<'_, u64>;
}

/// A secret in plain, for the one who needs it. It shows itself to nobody.
#[derive(Clone, Default)]
pub struct Opened(pub zeroize::Zeroizing<String>);

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("********")
    }
}

/// What a build is made from.
#[derive(Clone, Debug)]
pub struct BuildRequest {
    /// The agent.
    pub agent_id: domain::AgentId,
    /// The deployment; names the result.
    pub deployment_id: domain::DeploymentId,
    /// What runs the result.
    pub provider: domain::cloud::Provider,
    /// What to build.
    pub spec: domain::deployment::Spec,
    /// The password of the source's registry, if it has one.
    pub registry_password: Option<Opened>,
    /// Whether caches are left aside.
    pub no_cache: bool,
}

/// Everything an instance is started with.
#[derive(Clone, Debug)]
pub struct StartRequest {
    /// The agent.
    pub agent_id: domain::AgentId,
    /// The instance; names the process.
    pub instance_id: domain::InstanceId,
    /// The version.
    pub version: u64,
    /// What runs it.
    pub provider: domain::cloud::Provider,
    /// What to run.
    pub image: domain::deployment::Image,
    /// What it may use.
    pub resources: domain::agent::Resources,
    /// Its variables, opened.
    pub environment: BTreeMap<String, String>,
    /// Whether it was started by an earlier life of this node and is only to be found again.
    pub adopt: bool,
}

/// Where a line of output comes from.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// The process's standard output.
    Stdout,
    /// The process's standard error.
    Stderr,
    /// A build.
    Build,
    /// The platform itself.
    System,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Its code, if it ended by itself.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether it was ended for its use of memory.
    pub out_of_memory: bool,
}

/// A started instance.
pub struct Started {
    /// Where it listens, or will.
    pub address: std::net::SocketAddr,
    /// The layers of isolation that hold for it.
    pub isolation: Vec<String>,
    /// What it writes, line by line.
    pub output: tokio::sync::mpsc::Receiver<(Channel, String)>,
    /// Resolves when it has ended and nothing of it is left.
    pub exit: BoxFuture<'static, Exit>,
    /// Ends it.
    pub process: Arc<dyn Process>,
}

/// A running process or container.
pub trait Process: Send + Sync + 'static {
    /// Asks it to end.
    fn terminate(&self);
    /// Ends it and all it started, at once.
    fn kill(&self);
    /// Whether it is this process, and no stranger's, that listens where it was told to.
    fn listens(&self) -> bool;
    /// Memory in bytes and CPU time in milliseconds so far, where known.
    fn usage(&self) -> Option<(u64, u64)>;
}

/// Takes lines of a build's log.
pub type LineSink = Arc<dyn Fn(Channel, String) + Send + Sync>;

/// Builds and runs agents on this node.
pub trait Runtime: Send + Sync + 'static {
    /// Why agents of this provider can't run here now, with or without graphics processors.
    fn lack(
        &self,
        provider: domain::cloud::Provider,
        gpu: bool,
    ) -> Option<domain::deployment::Failure>;
    /// Whether its instances outlive a crash of the node.
    fn adopts(&self, provider: domain::cloud::Provider) -> bool;
    /// Makes an image. Dropping the future calls the build off.
    fn build(
        &self,
        request: BuildRequest,
        log: LineSink,
    ) -> BoxFuture<'_, Result<domain::deployment::Image, domain::deployment::Failure>>;
    /// Starts an instance.
    fn start(
        &self,
        request: StartRequest,
    ) -> BoxFuture<'_, Result<Started, domain::deployment::Failure>>;
    /// Makes sure that an image is on this node, from another one if need be; whether it is.
    fn hold(
        &self,
        provider: domain::cloud::Provider,
        image: domain::deployment::Image,
    ) -> BoxFuture<'_, bool>;
    /// Removes images of a gone agent that none of `kept` names.
    fn forget_images(&self, agent: domain::AgentId, kept: Vec<String>) -> BoxFuture<'_, ()>;
}

/// One line of a log.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LogLine {
    /// Its place in the agent's log: grows with every line.
    pub sequence: u64,
    /// When it was written.
    pub at: Timestamp,
    /// `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// The text, or the message of a JSON line.
    pub message: String,
    /// Where it comes from.
    pub channel: Channel,
    /// The instance, if one wrote it.
    pub instance_id: Option<domain::InstanceId>,
    /// The version.
    pub version: Option<u64>,
    /// The deployment whose build wrote it.
    pub deployment_id: Option<domain::DeploymentId>,
    /// The request it speaks of.
    pub request_id: Option<String>,
    /// The job it speaks of.
    pub job_id: Option<String>,
    /// Further fields of a JSON line, as JSON text.
    pub fields: String,
}

/// Which lines are wanted.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct LogQuery {
    /// Only after this time.
    pub since: Option<Timestamp>,
    /// Only before this time.
    pub until: Option<Timestamp>,
    /// Only after this line.
    pub after: Option<u64>,
    /// Only these levels; empty is all.
    pub levels: Vec<String>,
    /// Only from these channels; empty is all.
    pub channels: Vec<Channel>,
    /// Only of this instance.
    pub instance_id: Option<domain::InstanceId>,
    /// Only of this deployment's build.
    pub deployment_id: Option<domain::DeploymentId>,
    /// Only with this text in the message.
    pub text: Option<String>,
    /// Only of this request.
    pub request_id: Option<String>,
    /// Only of this job.
    pub job_id: Option<String>,
    /// At most so many.
    pub limit: usize,
    /// The first that fit instead of the last.
    pub from_start: bool,
}

impl LogQuery {
    /// Whether a line is wanted.
    pub fn takes(&self, line: &LogLine) -> bool {
        let fits =
            |wanted: &Option<String>, has: &Option<String>| wanted.is_none() || wanted == has;
        self.since.is_none_or(|since| line.at > since)
            && self.until.is_none_or(|until| line.at < until)
            && self.after.is_none_or(|after| line.sequence > after)
            && (self.levels.is_empty() || self.levels.contains(&line.level))
            && (self.channels.is_empty() || self.channels.contains(&line.channel))
            && self.instance_id.is_none_or(|id| line.instance_id == Some(id))
            && self.deployment_id.is_none_or(|id| line.deployment_id == Some(id))
            && self.text.as_ref().is_none_or(|text| line.message.contains(text))
            && fits(&self.request_id, &line.request_id)
            && fits(&self.job_id, &line.job_id)
    }
}

/// Keeps what agents write.
pub trait Logs: Send + Sync + 'static {
    /// Appends a line and gives it its place.
    fn append(&self, agent: domain::AgentId, line: LogLine);
    /// The lines that fit, oldest first, and whether more would fit.
    fn read(&self, agent: domain::AgentId, query: LogQuery) -> BoxFuture<'_, (Vec<LogLine>, bool)>;
    /// The lines that fit of what this node keeps of these others' logs, by node and oldest first, and whether more
    /// would fit.
    fn read_copies(
        &self,
        nodes: Vec<domain::NodeId>,
        agent: domain::AgentId,
        query: LogQuery,
    ) -> BoxFuture<'_, (Vec<(domain::NodeId, LogLine)>, bool)>;
    /// Hears lines as they come. A reader that lags loses the oldest and reads them back.
    fn follow(&self, agent: domain::AgentId) -> tokio::sync::broadcast::Receiver<LogLine>;
    /// Removes the log of a gone agent.
    fn forget(&self, agent: domain::AgentId);
}

/// Keeps closed buckets of metrics; a node may lose them.
pub trait Series: Send + Sync + 'static {
    /// Keeps a bucket that began at `at`.
    fn put(&self, agent: domain::AgentId, at: Timestamp, bucket: Vec<u8>);
    /// The buckets that began in `from..to`, oldest first: of ten seconds in the last day, of five
    /// minutes in the 30 days before. Those of this node, or copies of another one's, as far as they are kept here.
    fn range(
        &self,
        node: Option<domain::NodeId>,
        agent: domain::AgentId,
        from: Timestamp,
        to: Timestamp,
    ) -> Vec<(Timestamp, Vec<u8>)>;
    /// Removes the buckets of a gone agent.
    fn forget(&self, agent: domain::AgentId);
}
