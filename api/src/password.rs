//! Passwords: Argon2id, one at a time beside the node ([`crate::hasher`]), and as slow for people who do not
//! exist.

use tokio::sync::OnceCell;

use crate::{
    error::Problem,
    hasher::{Done, Hasher, Task},
};

/// Fewest characters of a new password (NIST SP 800-63B).
pub(crate) const PASSWORD_CHARS_MIN: usize = 8;
/// Most bytes of a password.
pub(crate) const PASSWORD_BYTES_MAX: usize = 256;

/// Hashes and checks.
pub(crate) struct Passwords {
    hasher: Hasher,
    /// Nobody's hash: checked for unknown people, so that they take as long as known ones.
    nobody: OnceCell<String>,
}

impl Passwords {
    /// Ready, for as long as it is held.
    pub(crate) fn new() -> Self {
        Self { hasher: Hasher::new(), nobody: OnceCell::new() }
    }

    /// The hash of a new password.
    pub(crate) async fn hash(&self, password: String) -> Result<String, Problem> {
        match self.hasher.run(Task::Hash { password }).await? {
            Done::Hashed(hash) => Ok(hash),
            done @ (Done::Checked(_) | Done::Failed(_)) => Err(unfit(done)),
        }
    }

    /// Whether a password is right; without a hash it is wrong, after the same time.
    pub(crate) async fn is_right(
        &self,
        password: String,
        of: Option<String>,
    ) -> Result<bool, Problem> {
        let nobody = self.nobody.get_or_try_init(|| self.hash("nobody".to_owned())).await?.clone();
        let (is_somebody, hash) = (of.is_some(), of.unwrap_or(nobody));
        match self.hasher.run(Task::Check { password, hash }).await? {
            Done::Checked(is_right) => Ok(is_right && is_somebody),
            done @ (Done::Hashed(_) | Done::Failed(_)) => Err(unfit(done)),
        }
    }
}

fn unfit(done: Done) -> Problem {
    if let Done::Failed(error) = done {
        tracing::error!(error, "a password could not be hashed");
    }
    Problem::internal()
}

/// Checks a new password.
pub(crate) fn check_new(field: &str, password: &str) -> Result<(), Problem> {
    if password.chars().count() < PASSWORD_CHARS_MIN || password.len() > PASSWORD_BYTES_MAX {
        let why = format!(
            "must have {PASSWORD_CHARS_MIN} characters or more, and at most {PASSWORD_BYTES_MAX} bytes"
        );
        return Err(Problem::field(field, why));
    }
    Ok(())
}
