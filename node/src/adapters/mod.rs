//! The world as it is: each file puts one real thing behind a port of `actors`.

pub mod archive;
pub mod authority;
pub mod backup;
pub mod blobs;
pub mod builder;
pub mod carry;
pub mod cgroup;
pub mod copies;
pub mod docker;
pub mod door;
pub mod git;
pub mod install;
pub mod isolation;
pub mod local;
pub mod logs;
pub mod metrics;
pub mod outbound;
pub mod peers;
pub mod process;
pub mod recipe;
pub mod series;
pub mod snapshots;
pub mod source;
pub mod system;
pub mod tls;
pub mod view;
