//! Passwords: Argon2id, a few at a time, and as slow for people who do not exist.

use argon2::{Argon2, PasswordHasher as _, PasswordVerifier as _};
use http::StatusCode;
use tokio::sync::Semaphore;

use crate::error::Problem;

/// Fewest characters of a new password (NIST SP 800-63B).
pub(crate) const PASSWORD_CHARS_MIN: usize = 8;
/// Most bytes of a password.
pub(crate) const PASSWORD_BYTES_MAX: usize = 256;
/// Passwords being hashed at once: each takes 19 MiB and some 20 ms of a core.
const AT_ONCE: usize = 1;
/// Passwords that wait for their turn.
const WAITING_MAX: usize = 200;

/// Hashes and checks.
pub(crate) struct Passwords {
    turns: Semaphore,
    waiting: Semaphore,
    /// Nobody's hash: checked for unknown people, so that they take as long as known ones.
    nobody: tokio::sync::OnceCell<String>,
}

impl Default for Passwords {
    fn default() -> Self {
        Self {
            turns: Semaphore::new(AT_ONCE),
            waiting: Semaphore::new(WAITING_MAX),
            nobody: tokio::sync::OnceCell::new(),
        }
    }
}

/// The hash of a password, in the PHC string format.
pub fn hash(password: &str) -> Result<String, argon2::password_hash::Error> {
    Ok(Argon2::default().hash_password(password.as_bytes())?.to_string())
}

impl Passwords {
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let _place = self.waiting.try_acquire().map_err(|_| busy())?;
        let _turn = self.turns.acquire().await.map_err(|_| Problem::internal())?;
        tokio::task::spawn_blocking(work).await.map_err(|_| Problem::internal())
    }

    /// The hash of a new password.
    pub(crate) async fn hash(&self, password: String) -> Result<String, Problem> {
        let hashed = self.run(move || hash(&password)).await?;
        hashed.map_err(|error| {
            tracing::error!(%error, "a password could not be hashed");
            Problem::internal()
        })
    }

    /// Whether a password is right; without a hash it is wrong, after the same time.
    pub(crate) async fn is_right(
        &self,
        password: String,
        of: Option<String>,
    ) -> Result<bool, Problem> {
        let nobody = self.nobody.get_or_try_init(|| self.hash("nobody".to_owned())).await?.clone();
        let (is_somebody, of) = (of.is_some(), of.unwrap_or(nobody));
        let check = move || Argon2::default().verify_password(password.as_bytes(), of.as_str());
        Ok(self.run(check).await?.is_ok() && is_somebody)
    }
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

fn busy() -> Problem {
    let message = "too many people log in right now; try again in a moment";
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "LOGIN_THROTTLED", message).retry_after(2)
}
