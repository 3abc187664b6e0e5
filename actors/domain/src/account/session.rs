//! Sessions: who refreshes an access token, how often, and when that ends; and who guesses passwords.
//!
//! A refresh token names its session and a generation. Using it moves the session to the next one.
//! The token before is answered alike for a few seconds, to the same client, in case an answer was
//! lost; used later, or elsewhere, it tells that a copy is in other hands, and the session ends
//! (RFC 9700, section 4.14.2).

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    ApplicationId, OrgId, Rejection, SessionId, Timestamp, UserId,
    account::{Code, Redemption, Scopes, Tenant},
    directory::Directory,
    event::{DirectoryEvent, ShardEvent},
    shard::Shard,
};

/// The longest that an access token is good.
pub const TOKENS_LAST: Duration = Duration::from_secs(24 * 3600);
/// How long the token before the current one is answered like it.
pub const REUSE_GRACE: Duration = Duration::from_secs(10);
/// Wrong passwords per account and address before guessing is paused.
pub const LOGIN_FAILURES_MAX: usize = 5;
/// The window that wrong passwords are counted in.
pub const LOGIN_WINDOW: Duration = Duration::from_secs(15 * 60);
/// Ended sessions that are looked at for expired ones whenever another one ends.
const ENDED_LOOKED_AT: usize = 256;
/// Sessions of one person or application. The oldest goes when there are more: it can't be refreshed any more,
/// and its last access token is good until it expires, as nobody has asked for its end.
const SESSIONS_MAX: usize = 100;

/// A chain of refresh tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Its id, `sid` in tokens.
    pub id: SessionId,
    /// What it reaches.
    pub tenant: Tenant,
    /// Whose it is; an application that acts for itself has none.
    pub user: Option<UserId>,
    /// The application that was let in, if it was one.
    pub application: Option<ApplicationId>,
    /// What its tokens may do, at most.
    pub scopes: Scopes,
    /// Lifetime of access tokens, in seconds.
    pub token_seconds: u64,
    /// The number of the refresh token that is good.
    pub generation: u64,
    /// When it began.
    pub created_at: Timestamp,
    /// When it was last refreshed.
    pub refreshed_at: Timestamp,
    /// The client that refreshed it last.
    pub client: String,
    /// When it ends unless refreshed.
    pub expires_at: Timestamp,
    /// When it ends at the latest.
    pub ends_at: Timestamp,
    /// How long an unused refresh token is good, in seconds.
    pub idle_seconds: u64,
}

/// Wrong passwords for one e-mail address from one client, in whichever organization.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Throttle {
    /// Oldest first.
    pub failures: Vec<Failure>,
}

/// A wrong password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When.
    pub at: Timestamp,
    /// The organization that was named with it.
    pub org: Option<OrgId>,
}

impl Session {
    /// Whether it can't be refreshed any more.
    pub fn is_over(&self, at: Timestamp) -> bool {
        at >= self.expires_at || at >= self.ends_at
    }
}

impl Throttle {
    /// Whether none of its failures counts any more.
    pub fn is_forgotten(&self, at: Timestamp) -> bool {
        !self.failures.iter().any(|failure| failure.counts(at))
    }

    /// Until when no password is heard, if there were too many wrong ones.
    pub fn until(&self, at: Timestamp) -> Option<Timestamp> {
        let recent: Vec<_> = self.failures.iter().filter(|failure| failure.counts(at)).collect();
        let first = recent.len().checked_sub(LOGIN_FAILURES_MAX)?;
        Some(recent[first].at.plus(LOGIN_WINDOW))
    }
}

impl Failure {
    fn counts(self, now: Timestamp) -> bool {
        self.at.plus(LOGIN_WINDOW) > now
    }
}

/// Who holds a session: in which mode of which organization, and through which application.
pub(crate) type Holder = (Tenant, Option<UserId>, Option<ApplicationId>);

fn holder(session: &Session) -> Holder {
    (session.tenant, session.user, session.application)
}

impl Shard {
    pub(crate) fn put_session(&mut self, session: &Session) {
        self.held.entry(holder(session)).or_default().insert(session.id);
        self.sessions.put(session.id, session.clone());
    }

    pub(crate) fn remove_session(&mut self, id: SessionId) {
        let Some(holder) = self.sessions.get(&id).map(|row| holder(&row)) else { return };
        if let Some(held) = self.held.get_mut(&holder) {
            held.remove(&id);
            if held.is_empty() {
                self.held.remove(&holder);
            }
        }
        self.sessions.remove(&id);
    }

    pub(crate) fn reindex_sessions(&mut self) {
        self.held.clear();
        for (id, row) in self.sessions.rows() {
            self.held.entry(holder(row)).or_default().insert(*id);
        }
    }

    /// A session that goes on.
    pub fn session(&self, id: SessionId, at: Timestamp) -> Option<std::sync::Arc<Session>> {
        let row = self.sessions.get(&id)?;
        (!row.is_over(at)).then_some(row)
    }
}

/// A session begins, and the oldest of too many ends.
pub(crate) fn begin(state: &Shard, session: &Session) -> Vec<ShardEvent> {
    let held = state.held.get(&holder(session));
    let surplus = (held.map_or(0, BTreeSet::len) + 1).saturating_sub(SESSIONS_MAX);
    // Ids are in the order of their making.
    let oldest = held.into_iter().flatten().take(surplus);
    let mut events: Vec<ShardEvent> = oldest.map(|id| ShardEvent::SessionGone(*id)).collect();
    events.push(ShardEvent::SessionPut(Box::new(session.clone())));
    events
}

/// A password that was wrong, or right: then wrong ones that named the same organization are forgotten. Those
/// that named another one are not: who has an account there under the address of somebody else would wipe out
/// guesses at the account of that person. After too many wrong ones neither is heard.
pub(crate) fn note_login(
    state: &Shard,
    guess: &[u8; 32],
    org: Option<OrgId>,
    is_right: bool,
    at: Timestamp,
) -> Result<Vec<ShardEvent>, Rejection> {
    let known = state.throttles.get(guess);
    if let Some(until) = known.as_ref().and_then(|row| row.until(at)) {
        return Err(Rejection::LoginThrottled { until });
    }
    let mut row = known.as_deref().cloned().unwrap_or_default();
    row.failures.retain(|failure| failure.counts(at) && !(is_right && failure.org == org));
    if !is_right {
        row.failures.push(Failure { at, org });
    }
    Ok(match (row.failures.is_empty(), known) {
        (true, None) => vec![],
        (true, Some(_)) => vec![ShardEvent::ThrottleGone(*guess)],
        (false, _) => vec![ShardEvent::ThrottlePut { guess: *guess, row }],
    })
}

/// The session's next token, or its end if an old one was used.
pub(crate) fn refresh(
    state: &Shard,
    id: SessionId,
    generation: u64,
    client: &str,
    at: Timestamp,
) -> Result<Vec<ShardEvent>, Rejection> {
    let session = state.session(id, at).ok_or(Rejection::GrantInvalid)?;
    if generation == session.generation {
        let mut next = Session::clone(&session);
        next.generation += 1;
        next.refreshed_at = at;
        client.clone_into(&mut next.client);
        next.expires_at = at.plus(Duration::from_secs(next.idle_seconds)).min(next.ends_at);
        return Ok(vec![ShardEvent::SessionPut(Box::new(next))]);
    }
    let is_lost_answer = generation + 1 == session.generation
        && at <= session.refreshed_at.plus(REUSE_GRACE)
        && client == session.client;
    // An old token in other hands: this is not refused but done, so that it holds everywhere.
    if is_lost_answer { Ok(vec![]) } else { Ok(vec![ShardEvent::SessionGone(id)]) }
}

/// The access tokens of a session are good no more, on any node. Older ones whose tokens have expired are
/// forgotten with it.
pub(crate) fn end_session(state: &Directory, id: SessionId, at: Timestamp) -> Vec<DirectoryEvent> {
    let oldest = state.ended_sessions.rows().take(ENDED_LOOKED_AT);
    let over = oldest.filter(|(_, until)| ***until <= at);
    let mut events: Vec<DirectoryEvent> =
        over.map(|(id, _)| DirectoryEvent::SessionForgotten(*id)).collect();
    events.push(DirectoryEvent::SessionEnded { id, until: at.plus(TOKENS_LAST) });
    events
}

/// A code becomes a session, once. Used again, what came of it ends.
pub(crate) fn redeem(
    state: &Shard,
    redemption: &Redemption,
    at: Timestamp,
) -> Result<Vec<ShardEvent>, Rejection> {
    let code = state.codes.get(&redemption.hash).ok_or(Rejection::GrantInvalid)?;
    if let Some(session) = code.session {
        return Ok(vec![ShardEvent::SessionGone(session)]);
    }
    if !code.fits(redemption) || at >= code.expires_at {
        return Err(Rejection::GrantInvalid);
    }
    let used = Code { session: Some(redemption.session.id), ..Code::clone(&code) };
    let session = Session {
        tenant: code.tenant,
        user: Some(code.user),
        scopes: code.scopes,
        ..redemption.session.clone()
    };
    let mut events = vec![ShardEvent::CodePut(Box::new(used))];
    events.extend(begin(state, &session));
    Ok(events)
}
