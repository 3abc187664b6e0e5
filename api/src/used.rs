//! Last uses of keys: noted in memory, told to the directory once a minute, so that a call costs no
//! entry of the log. A crash loses at most that minute.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use actors::call::Service;
use domain::{ApiKeyId, account::Used, directory::Command};

/// Between telling.
const TOLD_EVERY: Duration = Duration::from_secs(60);
/// Keys told of at once.
const KEYS_AT_ONCE: usize = 500;

/// What was used since the last telling.
#[derive(Default)]
pub(crate) struct KeysUsed(Mutex<HashMap<ApiKeyId, Used>>);

impl KeysUsed {
    /// Notes a use.
    pub(crate) fn note(&self, id: ApiKeyId, used: Used) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, used);
    }

    /// The last use that this node has seen and not told yet.
    pub(crate) fn of(&self, id: ApiKeyId) -> Option<Used> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    fn take(&self) -> Vec<(ApiKeyId, Used)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).drain().collect()
    }
}

/// Tells the directory, for as long as the notes are held.
pub(crate) async fn tell(service: Service, notes: Weak<KeysUsed>) {
    loop {
        tokio::time::sleep(TOLD_EVERY).await;
        let Some(notes): Option<Arc<KeysUsed>> = notes.upgrade() else { return };
        for uses in notes.take().chunks(KEYS_AT_ONCE) {
            if let Err(error) = service.change(Command::NoteKeyUse(uses.to_vec()), None).await {
                tracing::warn!(%error, "last uses of keys could not be told");
            }
        }
    }
}
