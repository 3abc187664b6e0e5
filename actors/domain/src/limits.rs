//! Every limit with a name. Where a number comes from a text, the text is named.

/// Versions kept per agent.
pub const VERSIONS_KEPT: usize = 10;
/// Ended deployments kept per agent.
pub const DEPLOYMENTS_KEPT: usize = 50;
/// Longest agent or cloud name.
pub const NAME_CHARS_MAX: usize = 63;
/// Most environment variables of an agent.
pub const ENVIRONMENT_MAX: usize = 100;
/// Longest name of an environment variable.
pub const VARIABLE_NAME_MAX: usize = 128;
/// Most bytes of an environment, names and values together.
pub const ENVIRONMENT_BYTES_MAX: usize = 64 * 1024;
/// Most metadata keys (as Stripe has it).
pub const METADATA_KEYS_MAX: usize = 50;
/// Longest metadata key.
pub const METADATA_KEY_CHARS_MAX: usize = 40;
/// Longest metadata value.
pub const METADATA_VALUE_CHARS_MAX: usize = 500;
/// Jobs that are not finished, per shard.
pub const PENDING_JOBS_PER_SHARD: usize = 50_000;
/// Most attempts a job may ask for.
pub const JOB_ATTEMPTS_MAX: u32 = 10;
/// Outputs above this are not kept in the log but refused until blobs carry them.
pub const JOB_OUTPUT_BYTES_MAX: usize = 6 * 1024 * 1024;
