//! One node, real processes, real HTTPS: every promise of the interface as a story.

mod agents;
mod attacks;
mod bodies;
mod canaries;
mod deploy;
mod docker;
mod door;
mod durable;
mod identity;
mod invoke;
mod isolation;
mod jobs;
mod limits;
mod lists;
mod logs;
mod matrix;
mod oauth;
mod receivers;
mod repeat;
mod rollout;
mod secrets;
mod sources;
mod webhooks;
mod wrong;
