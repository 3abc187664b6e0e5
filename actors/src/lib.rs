//! Who does the work.

pub mod ports;
