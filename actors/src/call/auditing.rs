//! The audit log of changes: a call's row travels in the very entry that makes the change, so neither is
//! ever without the other, and the answer waits for one entry instead of two. From the directory's outbox
//! rows go to the log of their organization. A login is written where that log is, so its row is there at once.

use std::{cell::RefCell, sync::Arc, time::Duration};

use domain::{ApplicationId, OrgId, UserId, account::Tenant, audit::Audited};
use tokio::time::Instant;

use super::{Service, ServiceError};

/// How long a reader waits for rows that are on their way.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// Between looks whether they have come.
const LOOK_EVERY: Duration = Duration::from_millis(5);

tokio::task_local! {
    static OF_THIS_CALL: RefCell<Option<Arc<Audited>>>;
    static OF_STRANGER: RefCell<Option<Stranger>>;
}

/// What is known of a call that came without credentials.
enum Stranger {
    /// How its row is made, and whose it is, once that is found out.
    Heard { make: Box<dyn FnOnce(Whose) -> Audited + Send>, whose: Option<Whose> },
    /// Its row, which went with a change that did not come to pass.
    Told(Arc<Audited>),
}

impl Stranger {
    fn row(self) -> Option<Arc<Audited>> {
        match self {
            Self::Heard { make, whose } => Some(Arc::new(make(whose?))),
            Self::Told(row) => Some(row),
        }
    }
}

/// Into whose log the call of somebody without credentials belongs, and who it turned out to be.
#[derive(Clone, Debug)]
pub struct Whose {
    /// The organization, and its mode.
    pub tenant: Tenant,
    /// The kind of actor.
    pub kind: &'static str,
    /// Its id, if it is known.
    pub id: String,
    /// What was changed, if the address of the call does not say it.
    pub target: Option<String>,
}

impl Whose {
    /// Of somebody who is not known by name.
    pub fn anonymous(tenant: Tenant) -> Self {
        Self { tenant, kind: "anonymous", id: String::new(), target: None }
    }

    /// A person's.
    pub fn user(tenant: Tenant, id: UserId) -> Self {
        Self { tenant, kind: "user", id: id.to_string(), target: None }
    }

    /// An application's.
    pub fn application(tenant: Tenant, id: ApplicationId) -> Self {
        Self { tenant, kind: "application", id: id.to_string(), target: None }
    }
}

/// Carries out a call of somebody without credentials. `make` makes its row, once it is known whose it is; gives
/// that row unless it went with a change, or nobody found out.
pub async fn of_stranger<F: Future>(
    make: impl FnOnce(Whose) -> Audited + Send + 'static,
    call: F,
) -> (F::Output, Option<Audited>) {
    let carried = async {
        let output = call.await;
        (output, take_of_stranger().map(Arc::unwrap_or_clone))
    };
    let heard = Stranger::Heard { make: Box::new(make), whose: None };
    OF_STRANGER.scope(RefCell::new(Some(heard)), carried).await
}

/// Says whose this call is, if it came without credentials.
pub fn belongs_to(whose: Whose) {
    let _ = OF_STRANGER.try_with(|known| {
        if let Some(Stranger::Heard { whose: known, .. }) = known.borrow_mut().as_mut() {
            *known = Some(whose);
        }
    });
}

/// The row of this call, if it came without credentials and no change has it already.
pub(super) fn take_of_stranger() -> Option<Arc<Audited>> {
    OF_STRANGER.try_with(RefCell::take).ok().flatten().and_then(Stranger::row)
}

/// A row of such a call whose change did not come to pass.
pub(super) fn put_back_of_stranger(row: Option<Arc<Audited>>) {
    let _ = OF_STRANGER.try_with(|known| *known.borrow_mut() = row.map(Stranger::Told));
}

/// Carries a call out whose change is to be audited; gives the row back unless it went with the change.
pub async fn audited<F: Future>(row: Audited, call: F) -> (F::Output, Option<Audited>) {
    let carried = async {
        let output = call.await;
        (output, take().map(Arc::unwrap_or_clone))
    };
    OF_THIS_CALL.scope(RefCell::new(Some(Arc::new(row))), carried).await
}

/// The row of this call, unless a change has it already.
pub(super) fn take() -> Option<Arc<Audited>> {
    OF_THIS_CALL.try_with(|row| row.borrow_mut().take()).ok().flatten()
}

/// A row whose change did not come to pass.
pub(super) fn put_back(audit: Option<Arc<Audited>>) {
    let _ = OF_THIS_CALL.try_with(|row| *row.borrow_mut() = audit);
}

impl Service {
    /// Waits until the audit log of an organization has what was acknowledged before this call; fails if that
    /// takes too long.
    pub async fn audit_is_told(&self, org: OrgId) -> Result<(), ServiceError> {
        let Some(newest) = self.directory().await?.read().outbox.newest_audited(org) else {
            return Ok(());
        };
        let until = Instant::now() + TOLD_WITHIN;
        let waits = || {
            let directory = self.world.directory().read();
            let mut rows = directory.outbox.audited.rows();
            rows.any(|(number, row)| *number <= newest && row.org == org)
        };
        while waits() {
            if Instant::now() >= until {
                return Err(ServiceError::Elsewhere);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}
