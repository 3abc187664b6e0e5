//! Where it is put together: the real adapters, the settings, and the commands of the binary `roost`.

pub mod adapters;
pub mod assembly;
pub mod backup;
pub mod bootstrap;
pub mod cli;
pub mod config;
pub mod demo;
pub mod dev;
pub mod exec;
pub mod folder;
pub mod hooks;
pub mod host;
pub mod identity;
pub mod join;
pub mod keys;
pub mod masters;
pub mod muster;
pub mod operate;
pub mod reach;
pub mod receiver;
pub mod recover;
pub mod serve;
pub mod starting;
pub mod steward;
pub mod tasks;

pub use domain::hex::hex;
