//! Rate limits as one node keeps them: calls are spent from a small batch that the organization's
//! shard has lent ([`domain::rate`]), so the path of a call touches the log only when the batch is
//! empty. Callers that find it empty wait for one question together.
//!
//! A node with much to do borrows ahead, at most a fair share of what is left; near the limit it
//! borrows only for those who wait, so no node starves while calls are left. What is not spent goes
//! back within a second.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError, RwLock, atomic::AtomicU64, atomic::Ordering::Relaxed},
    time::Duration,
};

use domain::{
    Timestamp,
    account::{Tenant, Tier},
    rate::{Allowance, Grant, LENT_FOR, Spent},
    shard::{Command, Reply},
};

use serde::{Deserialize, Serialize};

use crate::{root::lock, world::World};

/// Between looks at what is held.
const TEND_EVERY: Duration = Duration::from_millis(250);
/// A batch this old is settled: renewed if its account is busy, given back if not.
const RENEWED_AFTER: Duration = Duration::from_millis(1000);
/// How long a refusal is remembered without asking again.
const REFUSED_FOR: Duration = Duration::from_secs(1);
/// Between questions while other nodes hold the last calls.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How long a question is repeated while the shard has no leader.
const ASKED_FOR: Duration = Duration::from_secs(5);

/// How many calls are allowed to whom.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Whether limits hold at all.
    pub enabled: bool,
    /// Of each tier.
    pub tiers: BTreeMap<Tier, Allowance>,
    /// Calls a minute without credentials, per address.
    pub unauthenticated_per_minute: u64,
}

impl Default for Rates {
    fn default() -> Self {
        let allowance = |per_minute, per_day| Allowance { per_minute, per_day };
        Self {
            enabled: true,
            tiers: [
                (Tier::Starter, allowance(60, Some(10_000))),
                (Tier::Pro, allowance(300, Some(100_000))),
                (Tier::Enterprise, allowance(1_000_000, None)),
            ]
            .into(),
            unauthenticated_per_minute: 30,
        }
    }
}

impl Rates {
    /// What a tier allows.
    pub fn of(&self, tier: Tier) -> Allowance {
        let none = Allowance { per_minute: 0, per_day: None };
        self.tiers.get(&tier).copied().unwrap_or(none)
    }
}

/// Where a caller stands: what the headers of every answer say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Calls of the window.
    pub limit: u64,
    /// Calls left.
    pub remaining: u64,
    /// When the window moves on, in seconds since 1970.
    pub reset: u64,
    /// Whether this is the window of a day.
    pub is_day: bool,
}

/// Whether a call may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    /// It may.
    Allowed(Standing),
    /// The limit is reached.
    Refused(Standing),
    /// Nobody can tell right now.
    Unknown(Standing),
}

#[derive(Default)]
struct Held {
    grant: Option<Grant>,
    left: u64,
    spent: BTreeMap<u64, u64>,
    borrowed_at: Timestamp,
    /// Calls since the batch was borrowed.
    calls: u64,
    refused_until: Timestamp,
}

#[derive(Default)]
struct Account {
    held: Mutex<Held>,
    waiting: AtomicU64,
    asking: tokio::sync::Mutex<()>,
}

/// A caller who waits, for as long as they do: one who hangs up waits no more.
struct Waits<'a>(&'a AtomicU64);

impl<'a> Waits<'a> {
    fn one_more(waiting: &'a AtomicU64) -> Self {
        waiting.fetch_add(1, Relaxed);
        Self(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The limits of this node.
#[derive(Default)]
pub struct Limiter {
    accounts: RwLock<HashMap<Tenant, Arc<Account>>>,
}

fn standing(grant: Option<&Grant>, left: u64, allowance: Allowance, now: Timestamp) -> Standing {
    let minute = Standing {
        limit: allowance.per_minute,
        remaining: grant.map_or(allowance.per_minute, |grant| grant.minute_left + left),
        reset: grant.map_or(0, |grant| grant.minute_reset).max(now.seconds() + 1),
        is_day: false,
    };
    let (Some(limit), Some(grant)) = (allowance.per_day, grant) else { return minute };
    let remaining = grant.day_left.unwrap_or(limit) + left;
    // The window with the smaller share left is the one that will stop the caller first.
    match u128::from(remaining) * u128::from(minute.limit)
        < u128::from(minute.remaining) * u128::from(limit)
    {
        true => Standing { limit, remaining, reset: grant.day_reset, is_day: true },
        false => minute,
    }
}

impl Held {
    /// Spends one call of the batch.
    fn spend(&mut self, allowance: Allowance, now: Timestamp) -> Option<Standing> {
        let grant = self.grant.as_ref()?;
        if self.left == 0 || now >= grant.lent.until {
            return None;
        }
        self.left -= 1;
        self.calls += 1;
        *self.spent.entry(now.seconds()).or_default() += 1;
        Some(standing(self.grant.as_ref(), self.left, allowance, now))
    }

    fn settlement(&self) -> Option<Spent> {
        let grant = self.grant.as_ref()?;
        // It stays known until the next batch is here: a question may get no answer.
        Some(Spent { number: grant.lent.number, by_second: self.spent.clone() })
    }

    /// How much to borrow beside what callers wait for: what the last second took, but no more than
    /// a quarter of this node's fair share.
    fn ahead(&self, nodes: u64, now: Timestamp) -> u64 {
        let Some(grant) = self.grant.as_ref() else { return 0 };
        let age = now.since(self.borrowed_at);
        if age > LENT_FOR * 2 {
            return 0;
        }
        let millis = u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(10);
        let a_second = self.calls.saturating_mul(1000) / millis;
        let left = grant.day_left.map_or(grant.minute_left, |day| day.min(grant.minute_left));
        (a_second * 2).min(left / (4 * nodes.max(1)))
    }

    fn take(&mut self, grant: Grant, now: Timestamp) {
        self.left = grant.lent.calls;
        self.spent.clear();
        self.calls = 0;
        self.borrowed_at = now;
        self.grant = Some(grant);
    }
}

impl Limiter {
    fn account(&self, tenant: Tenant) -> Arc<Account> {
        let known = self.accounts.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = known.get(&tenant) {
            return Arc::clone(account);
        }
        drop(known);
        let mut accounts = self.accounts.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(accounts.entry(tenant).or_default())
    }
}

impl World {
    /// Where a tenant stands, without counting a call.
    pub fn standing(&self, tenant: Tenant) -> Standing {
        let allowance = self.allowance(tenant);
        let account = self.limiter.account(tenant);
        let held = lock(&account.held);
        standing(held.grant.as_ref(), held.left, allowance, self.now())
    }

    fn allowance(&self, tenant: Tenant) -> Allowance {
        let tier = self.directory().read().tier(tenant.org);
        self.settings.rates.of(tier)
    }

    /// Counts a call of a tenant.
    pub async fn admit(self: &Arc<Self>, tenant: Tenant) -> Admission {
        let allowance = self.allowance(tenant);
        if !self.settings.rates.enabled {
            return Admission::Allowed(standing(None, 0, allowance, self.now()));
        }
        let account = self.limiter.account(tenant);
        if let Some(standing) = lock(&account.held).spend(allowance, self.now()) {
            return Admission::Allowed(standing);
        }
        let _waits = Waits::one_more(&account.waiting);
        self.admit_slowly(tenant, &account, allowance).await
    }

    async fn admit_slowly(
        self: &Arc<Self>,
        tenant: Tenant,
        account: &Account,
        allowance: Allowance,
    ) -> Admission {
        let _turn = account.asking.lock().await;
        let until = self.now().plus(LENT_FOR);
        loop {
            let now = self.now();
            if now >= until.plus(ASKED_FOR) {
                let held = lock(&account.held);
                return Admission::Unknown(standing(held.grant.as_ref(), 0, allowance, now));
            }
            {
                let mut held = lock(&account.held);
                if let Some(standing) = held.spend(allowance, now) {
                    return Admission::Allowed(standing);
                }
                if now < held.refused_until {
                    return Admission::Refused(standing(held.grant.as_ref(), 0, allowance, now));
                }
            }
            let wanted = account.waiting.load(Relaxed).max(1);
            let Some(grant) = self.borrow(tenant, account, wanted, allowance).await else {
                let held = lock(&account.held);
                return Admission::Unknown(standing(held.grant.as_ref(), 0, allowance, now));
            };
            if grant.lent.calls > 0 {
                continue;
            }
            if grant.held_elsewhere == 0 || self.now() >= until {
                lock(&account.held).refused_until = self.now().plus(REFUSED_FOR);
                return Admission::Refused(standing(Some(&grant), 0, allowance, self.now()));
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// Settles the last batch and borrows another one. With nothing wanted it only gives back.
    async fn borrow(
        self: &Arc<Self>,
        tenant: Tenant,
        account: &Account,
        waiting: u64,
        allowance: Allowance,
    ) -> Option<Grant> {
        let nodes = self.others().len() as u64 + 1;
        let (spent, wanted) = {
            let mut held = lock(&account.held);
            let ahead = if waiting > 0 { held.ahead(nodes, self.now()) } else { 0 };
            // From here on nothing of the old batch may be spent: it is settled as it stands.
            held.left = 0;
            (held.settlement(), waiting + ahead)
        };
        let shard = self.home_of(tenant.org);
        let node = self.node_id;
        let wanted = if waiting > 0 { wanted } else { 0 };
        let command = Command::LendCalls { tenant, node, wanted, allowance, spent };
        let until = self.now().plus(ASKED_FOR);
        // Asking twice is harmless: whoever has not heard the answer is lent the same batch again.
        let reply = loop {
            match self.ask_shard(shard, command.clone(), None, None).await {
                Ok(answer) => break answer.result.ok()?,
                Err(_) if self.now() < until => tokio::time::sleep(ASK_AGAIN).await,
                Err(_) => return None,
            }
        };
        let Reply::Grant(grant) = reply else { return None };
        lock(&account.held).take(Grant::clone(&grant), self.now());
        Some(*grant)
    }

    /// Gives back what idle accounts hold, for as long as the node runs.
    pub async fn tend_rates(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TEND_EVERY).await;
            let accounts: Vec<(Tenant, Arc<Account>)> = {
                let accounts = self.limiter.accounts.read().unwrap_or_else(PoisonError::into_inner);
                accounts.iter().map(|(tenant, account)| (*tenant, Arc::clone(account))).collect()
            };
            for (tenant, account) in accounts {
                self.settle_if_due(tenant, &account).await;
            }
        }
    }

    async fn settle_if_due(self: &Arc<Self>, tenant: Tenant, account: &Account) {
        let now = self.now();
        let is_due = {
            let held = lock(&account.held);
            held.left > 0 && now.since(held.borrowed_at) >= RENEWED_AFTER
        };
        let Ok(_turn) = account.asking.try_lock() else { return };
        if !is_due {
            return;
        }
        let is_busy = lock(&account.held).calls > 0;
        let allowance = self.allowance(tenant);
        // A busy account goes on with a new batch; callers wait for it as for any other.
        let waiting = account.waiting.load(Relaxed).max(u64::from(is_busy));
        let _ = self.borrow(tenant, account, waiting, allowance).await;
    }
}
