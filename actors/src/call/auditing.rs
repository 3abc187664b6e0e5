//! The audit log of changes: a call's row travels in the very entry that makes the change, so neither is
//! ever without the other, and the answer waits for one entry instead of two. From the directory's outbox
//! rows go to the log of their organization.

use std::{cell::RefCell, time::Duration};

use domain::{ApplicationId, OrgId, UserId, account::Tenant, audit::Audited};
use tokio::time::Instant;

use super::{Service, ServiceError};

/// How long a reader waits for rows that are on their way.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// Between looks whether they have come.
const LOOK_EVERY: Duration = Duration::from_millis(5);

tokio::task_local! {
    static OF_THIS_CALL: RefCell<Option<Box<Audited>>>;
    static WHOSE: RefCell<Option<Whose>>;
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

/// Carries out a call of somebody without credentials; gives what was found out about them.
pub async fn of_stranger<F: Future>(call: F) -> (F::Output, Option<Whose>) {
    let carried = async {
        let output = call.await;
        (output, WHOSE.with(RefCell::take))
    };
    WHOSE.scope(RefCell::new(None), carried).await
}

/// Says whose this call is, if it came without credentials.
pub fn belongs_to(whose: Whose) {
    let _ = WHOSE.try_with(|known| *known.borrow_mut() = Some(whose));
}

/// Carries a call out whose change is to be audited; gives the row back unless it went with the change.
pub async fn audited<F: Future>(row: Audited, call: F) -> (F::Output, Option<Audited>) {
    let carried = async {
        let output = call.await;
        (output, take().map(|row| *row))
    };
    OF_THIS_CALL.scope(RefCell::new(Some(Box::new(row))), carried).await
}

/// The row of this call, unless a change has it already.
pub(super) fn take() -> Option<Box<Audited>> {
    OF_THIS_CALL.try_with(|row| row.borrow_mut().take()).ok().flatten()
}

/// A row whose change did not come to pass.
pub(super) fn put_back(audit: Option<Box<Audited>>) {
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
