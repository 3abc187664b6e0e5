//! An organization: the account that owns everything, with its tier.

use serde::{Deserialize, Serialize};

use crate::{
    OrgId, Rejection, Timestamp, account::User, cloud::Cloud, directory::Directory,
    event::DirectoryEvent,
};

/// How much an organization may ask of the service (`interface`, Limits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The smallest.
    Starter,
    /// The middle.
    Pro,
    /// The greatest.
    #[default]
    Enterprise,
}

impl Tier {
    /// The word used in bodies and settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starter => "starter",
            Self::Pro => "pro",
            Self::Enterprise => "enterprise",
        }
    }

    /// Most agents of an organization, per mode; `None` is no limit.
    pub fn agents_max(self) -> Option<usize> {
        match self {
            Self::Starter => Some(5),
            Self::Pro => Some(50),
            Self::Enterprise => None,
        }
    }

    /// Most builds of an organization at once, per mode; others wait.
    pub fn builds_max(self) -> usize {
        match self {
            Self::Starter => 1,
            Self::Pro => 3,
            Self::Enterprise => 10,
        }
    }

    /// Most calls of an organization in flight at once, per mode: synchronous ones, streams and what is
    /// passed through.
    pub fn in_flight_max(self) -> u64 {
        match self {
            Self::Starter => 20,
            Self::Pro => 200,
            Self::Enterprise => 2000,
        }
    }

    /// Most jobs of an organization that wait, per mode.
    pub fn queued_jobs_max(self) -> u64 {
        match self {
            Self::Starter => 1000,
            Self::Pro => 20_000,
            Self::Enterprise => 200_000,
        }
    }

    /// Most webhooks of an organization, per mode.
    pub fn webhooks_max(self) -> usize {
        match self {
            Self::Starter => 5,
            Self::Pro => 20,
            Self::Enterprise => 50,
        }
    }
}

/// An account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Organization {
    /// Its id, which events call `account_id`.
    pub id: OrgId,
    /// Shown to people.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// How much it may ask for.
    #[serde(default)]
    pub tier: Tier,
    /// When it was last changed.
    #[serde(default)]
    pub updated_at: Timestamp,
    /// Counts changes.
    #[serde(default)]
    pub revision: u64,
}

/// A change of an organization; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrganizationPatch {
    /// New name.
    pub name: Option<String>,
    /// New tier.
    pub tier: Option<Tier>,
}

impl Directory {
    /// An organization.
    pub fn organization(&self, id: OrgId) -> Result<std::sync::Arc<Organization>, Rejection> {
        self.organizations.get(&id).ok_or(Rejection::OrganizationNotFound(id))
    }

    /// The organization that looks after the cluster: the first one.
    pub fn operator(&self) -> Option<OrgId> {
        self.organizations.rows().next().map(|(id, _)| *id)
    }

    /// An organization's tier.
    pub fn tier(&self, id: OrgId) -> Tier {
        self.organizations.get(&id).map_or(Tier::default(), |row| row.tier)
    }
}

/// No two organizations have one name.
fn check_name(state: &Directory, id: OrgId, name: &str) -> Result<(), Rejection> {
    let mut others = state.organizations.rows().filter(|(other, _)| **other != id);
    match others.any(|(_, other)| other.name.eq_ignore_ascii_case(name)) {
        true => Err(Rejection::OrganizationNameTaken(name.to_owned())),
        false => Ok(()),
    }
}

pub(crate) fn create(
    state: &Directory,
    organization: &Organization,
    owner: &User,
    clouds: &[Cloud],
) -> Result<Vec<DirectoryEvent>, Rejection> {
    check_name(state, organization.id, &organization.name)?;
    let mut events = vec![
        DirectoryEvent::OrganizationPut(Box::new(organization.clone())),
        DirectoryEvent::UserPut(Box::new(owner.clone())),
    ];
    events.extend(clouds.iter().map(|cloud| DirectoryEvent::CloudPut(Box::new(cloud.clone()))));
    Ok(events)
}

pub(crate) fn update(
    state: &Directory,
    id: OrgId,
    patch: &OrganizationPatch,
    if_match: Option<u64>,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut row = Organization::clone(&*state.organization(id)?);
    if if_match.is_some_and(|wanted| wanted != row.revision) {
        return Err(Rejection::StaleObject);
    }
    if let Some(name) = &patch.name {
        check_name(state, id, name)?;
        row.name.clone_from(name);
    }
    row.tier = patch.tier.unwrap_or(row.tier);
    row.updated_at = at;
    row.revision += 1;
    Ok(vec![DirectoryEvent::OrganizationPut(Box::new(row))])
}
