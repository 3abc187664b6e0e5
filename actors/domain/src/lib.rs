//! The rules of Roost, pure: records, commands, events, rejections.
//!
//! Five rules hold in this crate:
//! 1. A machine is plain data; `decide` reads it, `evolve` changes it, nothing else does.
//! 2. No clock, no dice, no I/O: time, ids and salt ride in the [`machine::Entry`].
//! 3. A refusal is a value ([`Rejection`]); a refused command changes nothing.
//! 4. Collections have an order, so that every replica walks them alike.
//! 5. What is written to a log or a table decodes for ever ([`codec`]).
//!
//! Two machines exist: the [`directory`] (small, on every node) and the [`shard`] (large, sharded).

pub mod account;
pub mod agent;
pub mod audit;
pub mod autopilot;
mod clearable;
pub mod cloud;
pub mod codec;
pub mod data_key;
pub mod deployment;
pub mod directory;
pub mod event;
pub mod hex;
pub mod idempotency;
pub mod ids;
pub mod instance;
pub mod job;
pub mod limits;
pub mod machine;
pub mod node;
pub mod outbox;
pub mod planted;
pub mod rate;
pub mod rejection;
pub mod schedule;
pub mod secret;
pub mod shard;
pub mod table;
pub mod time;
pub mod upload;
pub mod webhook;

pub use ids::{
    AgentId, ApiKeyId, ApplicationId, AuditId, CloudId, DeliveryId, DeploymentId, EventId,
    InstanceId, InvitationId, JobId, NodeId, OrgId, RequestId, SessionId, SnapshotId, UploadId,
    UserId, WebhookId,
};
pub use rejection::Rejection;
pub use time::Timestamp;
