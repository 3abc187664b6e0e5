//! Several nodes, real processes: any node answers any call, and nothing acknowledged is lost.

mod blobs;
mod disk;
mod failover;
mod forward;
mod history;
mod identity;
mod limits;
mod masters;
mod members;
mod operators;
mod outbound;
mod recovery;
mod strangers;
mod webhooks;
