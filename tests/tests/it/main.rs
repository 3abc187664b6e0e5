//! One node, real processes, real HTTPS: every promise of the interface as a story.

mod agents;
mod docker;
mod door;
mod durable;
mod invoke;
mod isolation;
mod jobs;
mod logs;
mod repeat;
mod rollout;
mod sources;
mod wrong;
