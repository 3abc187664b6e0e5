//! The audit log: every change is written down before it is answered, refused ones in sums by
//! organization, mode, address and second. The row of a change of the directory is in the change's own entry
//! ([`actors::call::auditing`]); others are written beside it. Where the organization's shard does not answer,
//! a change that was made is not kept secret from who made it: it is answered after a while, and written down
//! when the shard is back.
//! `GET /v1/audit-log` reads it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use actors::call::{AuditWanted, Records, RecordsWanted, Service, auditing::Whose};
use domain::{
    AuditId, OrgId, Timestamp,
    account::Mode,
    audit::{self, Actor, Audited},
};
use poem_openapi::{OpenApi, param::Query, payload::Json};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::Instant,
};

use crate::{
    Handle, Shared,
    access::Operation,
    body::account::AuditBody,
    caller::{Caller, ClientAddress, Identity},
    envelope::{Current, Page, Success},
    error::{ApiError, Problem},
    listing::Wanted,
    query,
};

/// Rows that wait to be written on a node.
const WAITING_MAX: usize = 10_000;
/// Rows of one entry of the log.
const ROWS_AT_ONCE: usize = 256;
/// How long rows are written again while their shard does not answer, and after which pause.
const WRITTEN_FOR: Duration = Duration::from_secs(3600);
const WRITTEN_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// How long an answer waits for its row.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Longest target that is written down.
const TARGET_CHARS_MAX: usize = 256;

/// A row, who waits for it, and its place among those that wait.
struct Written {
    row: Arc<Audited>,
    told: oneshot::Sender<()>,
    _place: OwnedSemaphorePermit,
}

/// Refused calls by organization, mode, address and second.
type Refused = Mutex<BTreeMap<(OrgId, Mode, String, u64), Audited>>;

/// Writes rows: those that come at once go into the log at once.
pub(crate) struct Journal {
    rows: mpsc::Sender<Written>,
    places: Arc<Semaphore>,
    refused: Arc<Refused>,
}

impl Journal {
    /// Writes through this service, for as long as it is held.
    pub(crate) fn new(service: Service) -> Self {
        let (rows, waiting) = mpsc::channel(WAITING_MAX);
        actors::root::detach(write(service.clone(), waiting));
        let refused = Arc::new(Refused::default());
        actors::root::detach(sum_up(service, Arc::downgrade(&refused)));
        Self { rows, places: Arc::new(Semaphore::new(WAITING_MAX)), refused }
    }

    /// Writes a row; on return it is durable, or waits for its shard if that does not answer.
    async fn write(&self, row: Audited) {
        let (action, target) = (row.action.clone(), row.target.clone());
        let (told, written) = oneshot::channel();
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            tracing::error!(
                action,
                target,
                "too much waits already: a change is not in the audit log"
            );
            return;
        };
        let sent =
            self.rows.send(Written { row: Arc::new(row), told, _place: place }).await.is_ok();
        let waited = tokio::time::timeout(ANSWERED_WITHIN, written).await;
        if !sent || !matches!(waited, Ok(Ok(()))) {
            tracing::warn!(action, target, "a change is not yet in the audit log");
        }
    }

    fn note_refused(&self, row: Audited) {
        let key = (row.org, row.mode, row.actor.ip.clone(), row.at.seconds());
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() < WAITING_MAX {
            refused.entry(key).and_modify(|sum| sum.count += 1).or_insert(row);
        }
    }
}

async fn write(service: Service, mut waiting: mpsc::Receiver<Written>) {
    let mut batch: Vec<Written> = vec![];
    while waiting.recv_many(&mut batch, ROWS_AT_ONCE).await > 0 {
        let mut by_org: BTreeMap<OrgId, Vec<Written>> = BTreeMap::new();
        for row in batch.drain(..) {
            by_org.entry(row.row.org).or_default().push(row);
        }
        // One organization's shard may be slow: the others do not wait for it.
        for (org, rows) in by_org {
            actors::root::detach(write_of(service.clone(), org, rows));
        }
    }
}

/// Writes rows of one organization, again and again while its shard does not answer: a row that comes
/// twice is written once.
async fn write_of(service: Service, org: OrgId, rows: Vec<Written>) {
    let until = Instant::now() + WRITTEN_FOR;
    let all: Vec<Arc<Audited>> = rows.iter().map(|row| Arc::clone(&row.row)).collect();
    while let Err(error) = service.audit(org, all.clone()).await {
        if Instant::now() >= until {
            tracing::error!(%org, rows = all.len(), %error, "changes are not in the audit log");
            return;
        }
        tokio::time::sleep(WRITTEN_AGAIN_AFTER).await;
    }
    // Whoever waited may have hung up.
    for row in rows {
        let _ = row.told.send(());
    }
}

/// Writes down once a second what was refused.
async fn sum_up(service: Service, refused: std::sync::Weak<Refused>) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let Some(refused) = refused.upgrade() else { return };
        let sums = std::mem::take(&mut *refused.lock().unwrap_or_else(PoisonError::into_inner));
        for (org, rows) in audit::by_org(sums.into_values().map(Arc::new)) {
            for rows in rows.chunks(ROWS_AT_ONCE) {
                if let Err(error) = service.audit(org, rows.to_vec()).await {
                    tracing::warn!(%error, "refused calls could not be written to the audit log");
                }
            }
        }
    }
}

/// A change that is to be audited, as it came in.
pub(crate) struct Watched {
    pub(crate) operation: Operation,
    /// Who asks; nobody where the operation asks for no credentials.
    pub(crate) identity: Option<Arc<Identity>>,
    pub(crate) address: ClientAddress,
    pub(crate) target: String,
}

impl Watched {
    /// Whose it is by the credentials that came with it.
    pub(crate) fn whose(&self) -> Option<Whose> {
        let identity = self.identity.as_ref()?;
        let (kind, id) = identity.name();
        Some(Whose { tenant: identity.tenant, kind, id, target: None })
    }
}

impl Shared {
    /// The row of a change that succeeds, once it is known whose it is.
    pub(crate) fn audited(&self, watched: Watched, whose: Whose) -> Audited {
        let Watched { operation, address, target, .. } = watched;
        let Whose { tenant, kind, id, target: told } = whose;
        let target = told.unwrap_or(target);
        Audited {
            id: self.service.world.mint(AuditId::new),
            org: tenant.org,
            mode: tenant.mode,
            at: self.service.world.now(),
            actor: Actor { kind: kind.to_owned(), id, ip: address.text() },
            action: operation.id.to_owned(),
            target: target.chars().take(TARGET_CHARS_MAX).collect(),
            outcome: "succeeded".to_owned(),
            request_id: Current::get().request_id,
            count: 1,
            hash: [0; 32],
            previous: [0; 32],
        }
    }

    /// Writes down a call that changed nothing in the directory, where its row would have gone with the
    /// change.
    pub(crate) async fn audit(&self, row: Audited, refusal: Option<String>) {
        match refusal {
            Some(outcome) => {
                // Another row than the one that may have gone with a change whose outcome is unknown.
                let id = self.service.world.mint(AuditId::new);
                self.journal.note_refused(Audited { id, outcome, ..row });
            }
            None => self.journal.write(row).await,
        }
    }
}

pub(crate) struct AuditApi(pub(crate) Handle);

type Result<T> = std::result::Result<T, ApiError>;

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Audit")]
impl AuditApi {
    /// List the audit log
    ///
    /// Who changed what, newest first. Each row carries a hash over the one before it.
    #[oai(path = "/audit-log", method = "get", operation_id = "listAuditLog")]
    #[expect(clippy::too_many_arguments, reason = "one argument per documented parameter")]
    async fn list(
        &self,
        caller: Caller,
        /// Items of a page.
        #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
        /// Only this operation, by its `operationId`.
        action: Query<Option<String>>,
        /// Only of this actor, by id.
        actor: Query<Option<String>>,
        /// Only with this outcome.
        outcome: Query<Option<String>>,
        /// Only since this time (RFC 3339).
        since: Query<Option<String>>,
        /// Only before this time.
        until: Query<Option<String>>,
    ) -> Result<Json<Success<Page<AuditBody>>>> {
        let tenant = caller.tenant();
        let since: Option<Timestamp> = query::time("since", since.0)?;
        let until: Option<Timestamp> = query::time("until", until.0)?;
        let filters: [&(dyn std::fmt::Debug + Sync); 6] =
            [&"audit", &action.0, &actor.0, &outcome.0, &since, &until];
        let wanted = Wanted::new(tenant, &filters, limit.0, cursor.0);
        let rows = RecordsWanted::Audit(AuditWanted {
            org: tenant.org,
            mode: tenant.mode,
            action: action.0,
            actor: actor.0,
            outcome: outcome.0,
            since,
            until,
            before: wanted.after(&self.0)?,
            limit: wanted.limit + 1,
        });
        self.0.service.audit_is_told(tenant.org).await?;
        let shard = self.0.service.home_of(tenant.org);
        let Records::Audit(rows) = self.0.service.records(shard, rows).await? else {
            return Err(Problem::internal().into());
        };
        let page = wanted.page(&self.0, &rows, |row| row.id.to_string(), |row| AuditBody::of(row));
        Ok(Json(Success::of(page)))
    }
}
