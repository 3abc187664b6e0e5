//! Idempotency keys: the same call twice is one call.
//!
//! A key's row is written by the wrapper in [`crate::machine::apply`], in the very entry that
//! creates the object, so two nodes cannot mint one key twice. It keeps the answer for
//! [`KEPT_FOR`] after it was given. Rows carry their expiry in a second table, walked by sweeps.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Rejection, Timestamp, codec, table::Table};

/// How long an answer is kept after it was given.
pub const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// How many rows one sweep removes at most.
pub const SWEPT_AT_ONCE: usize = 500;

/// SHA-256 over organization, mode, method, path and the client's key.
pub type KeyHash = [u8; 32];

/// The key of a call and the fingerprint of its body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keyed {
    /// Which key, in which scope.
    pub hash: KeyHash,
    /// SHA-256 of the canonical body.
    pub fingerprint: [u8; 32],
}

/// What is known of a key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeyRow {
    /// The body it was first used with.
    pub fingerprint: [u8; 32],
    /// The encoded answer; `None` while the call runs.
    #[serde(with = "serde_bytes")]
    pub answer: Option<Vec<u8>>,
    /// When it is forgotten.
    pub expires_at: Timestamp,
    /// Until when a running call may go on before it is ended as lost.
    #[serde(default)]
    pub deadline: Option<Timestamp>,
    /// The life of the node that runs the call.
    #[serde(default)]
    pub boot: Option<String>,
}

/// What an earlier use of the key means for this one.
pub enum Seen<R> {
    /// Nothing: go on.
    Never,
    /// The answer was given already.
    Answered(Result<R, Rejection>),
    /// This use is refused.
    Refused(Rejection),
}

/// All keys of one machine.
pub struct Keys {
    /// Finished calls: history.
    pub done: Table<KeyHash, KeyRow>,
    /// Calls that run now.
    pub running: Table<KeyHash, KeyRow>,
    /// `(expires_at, key)` of finished calls.
    pub expiry: Table<(u128, KeyHash), ()>,
}

impl Keys {
    /// Keys in three tables that begin at this number.
    pub fn new(first_table: u8) -> Self {
        Self {
            done: Table::history(first_table),
            running: Table::live(first_table + 1),
            expiry: Table::history(first_table + 2),
        }
    }

    /// Whether something came under a key already.
    pub fn knows(&self, key: &Keyed, at: Timestamp) -> bool {
        self.find(&key.hash, at).is_some()
    }

    /// Looks a key up.
    pub fn seen<R: DeserializeOwned>(&self, key: &Keyed, at: Timestamp) -> Seen<R> {
        let Some(row) = self.find(&key.hash, at) else { return Seen::Never };
        if row.fingerprint != key.fingerprint {
            return Seen::Refused(Rejection::IdempotencyKeyReused);
        }
        match row.answer.as_deref().map(codec::decode) {
            Some(Ok(result)) => Seen::Answered(result),
            Some(Err(error)) => unreachable!("a stored answer is not readable: {error}"),
            None => Seen::Refused(Rejection::IdempotencyInProgress),
        }
    }

    fn find(&self, hash: &KeyHash, at: Timestamp) -> Option<std::sync::Arc<KeyRow>> {
        self.running.get(hash).or_else(|| self.done.get(hash).filter(|row| row.expires_at > at))
    }

    /// Keeps the answer of a finished call.
    pub fn answered<R: Serialize>(
        &mut self,
        key: &Keyed,
        at: Timestamp,
        result: &Result<R, Rejection>,
    ) {
        let row = KeyRow {
            fingerprint: key.fingerprint,
            answer: Some(codec::encode(result)),
            expires_at: at.plus(KEPT_FOR),
            deadline: None,
            boot: None,
        };
        self.running.remove(&key.hash);
        self.expiry.put((u128::from(row.expires_at.millis()), key.hash), ());
        self.done.put(key.hash, row);
    }

    /// Marks a call as running.
    pub fn begun(&mut self, key: &Keyed, deadline: Timestamp, boot: &str) {
        let row = KeyRow {
            fingerprint: key.fingerprint,
            answer: None,
            expires_at: deadline.plus(KEPT_FOR),
            deadline: Some(deadline),
            boot: Some(boot.to_owned()),
        };
        self.running.put(key.hash, row);
    }

    /// The keys due for removal at `at`, oldest first, at most [`SWEPT_AT_ONCE`].
    pub fn expired(&self, at: Timestamp) -> BTreeSet<(u128, KeyHash)> {
        self.expiry.due(at, SWEPT_AT_ONCE)
    }

    /// Forgets what [`Keys::expired`] named. A key used again since then has a later expiry: it stays.
    pub fn forget(&mut self, due: &BTreeSet<(u128, KeyHash)>) {
        for key in due {
            self.expiry.remove(key);
            let same = self
                .done
                .get(&key.1)
                .is_some_and(|row| u128::from(row.expires_at.millis()) == key.0);
            if same {
                self.done.remove(&key.1);
            }
        }
    }
}

/// Answers worth repeating: what was done, and refusals that would come out the same. A validation
/// error or a passing fault is not kept, so that the client's corrected retry works.
pub fn is_kept<R>(result: &Result<R, Rejection>) -> bool {
    match result {
        Ok(_) => true,
        Err(reason) => reason.is_final(),
    }
}
