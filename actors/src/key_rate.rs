//! API keys with a limit of their own, beside that of their organization. As with an address, one node counts
//! the calls of a key, whichever node is called.

use domain::ApiKeyId;

use crate::{ask::Ask, limiter::Admission, world::World};

/// Keys beyond those that can be remembered share one budget.
const CROWD: ApiKeyId = ApiKeyId(0);

impl World {
    /// Counts a call of a key that may make so many a minute.
    pub async fn admit_key(&self, key: ApiKeyId, most: u64) -> Admission {
        let (ask, here) = (Ask::CountKey { key, most }, || self.count_key_here(key, most));
        self.count(&self.key_calls, ("key", key), ask, here).await
    }

    /// Counts a call at whichever node it came in.
    pub(crate) fn count_key_here(&self, key: ApiKeyId, most: u64) -> Admission {
        self.key_calls.admit(key, CROWD, most, self.now())
    }
}
