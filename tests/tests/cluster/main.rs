//! Several nodes, real processes: any node answers any call, and nothing acknowledged is lost.

mod failover;
mod forward;
mod history;
mod identity;
mod members;
mod strangers;
mod webhooks;
