//! Wire twins of domain records: the only names that clients see. Each file turns one noun into its
//! body and a body into its noun.

pub mod account;
pub mod agent;
pub mod cloud;
pub mod cluster;
pub mod deployment;
pub mod invocation;
pub mod job;
pub mod log;
pub mod metrics;
pub mod snapshot;
pub mod upload;
pub mod webhook;
