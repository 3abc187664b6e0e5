//! The world as it is: each file puts one real thing behind a port of `actors`.

pub mod archive;
pub mod blobs;
pub mod builder;
pub mod door;
pub mod git;
pub mod isolation;
pub mod logs;
pub mod process;
pub mod series;
pub mod system;
pub mod tls;
